"""Writes Hugging Face folders that transformers loads."""
