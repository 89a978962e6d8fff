"""Holds train/config."""
