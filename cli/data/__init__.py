"""Holds cli/data."""
