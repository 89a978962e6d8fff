"""Checkpoints under global names that any layout loads: reading, writing, resharding, files."""
