"""Draws the statistics of an analysis."""
