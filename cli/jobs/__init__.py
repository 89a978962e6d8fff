"""Holds cli/jobs."""
