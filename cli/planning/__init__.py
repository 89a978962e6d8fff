"""Holds cli/planning."""
