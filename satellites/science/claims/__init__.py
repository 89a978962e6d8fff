"""Tests claims of the papers on toy models."""
