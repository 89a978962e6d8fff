"""Draws what the analysis has counted."""
