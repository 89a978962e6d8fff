"""Exports checkpoints to other formats, and imports published weights."""
