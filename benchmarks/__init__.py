"""What is measured; every script runs as `python -m benchmarks.NAME` from the project's folder."""
