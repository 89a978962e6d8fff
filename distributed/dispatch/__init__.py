"""Dispatchers move rows to the ranks that hold their experts and bring the outputs back."""
