"""Holds data_pipeline/make."""
