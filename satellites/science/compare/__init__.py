"""Compares arms of equal size over seeds: paired differences, verdicts, and the cost of a step."""
