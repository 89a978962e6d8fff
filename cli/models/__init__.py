"""Holds cli/models."""
