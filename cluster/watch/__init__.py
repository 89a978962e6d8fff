"""Watches the ranks of a generation: heartbeats, hangs, waits for data, slow ranks."""
