"""Defines the zero-shot tasks: how records are read, worded as questions, and judged."""
