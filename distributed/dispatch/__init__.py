"""Dispatchers send rows to the ranks that hold their experts and return the outputs."""
