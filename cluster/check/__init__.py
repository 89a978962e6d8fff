"""Holds cluster/check."""
