"""Holds train/metrics."""
