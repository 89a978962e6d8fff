"""Benchmarks; run each one as `python -m benchmarks.NAME` from the project's folder."""
