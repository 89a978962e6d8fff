"""Holds cluster/supervise."""
