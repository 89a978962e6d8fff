"""Measures steps, and writes the numbers to metrics.jsonl and other sinks."""
