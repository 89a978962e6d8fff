"""Holds cluster/watch."""
