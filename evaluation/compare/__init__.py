"""Comparisons: arms of equal size over seeds, their paired differences, and what they cost."""
