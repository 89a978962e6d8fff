"""Runs a job's processes on one machine: node, template, agent and ranks."""
