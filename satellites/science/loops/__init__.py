"""Measures what loops are worth: equal-FLOPs runs on text, and steps to learn made-up tasks."""
