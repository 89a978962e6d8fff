"""Holds cluster/report."""
