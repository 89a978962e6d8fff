"""Holds train/record."""
