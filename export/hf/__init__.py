"""Hugging Face: a folder that transformers loads, and what stands in it."""
