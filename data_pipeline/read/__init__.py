"""Holds data_pipeline/read."""
