"""Compares arms of equal size over seeds: paired differences, verdicts, and what a step costs."""
