"""Predicts memory, traffic and time of a layout."""
