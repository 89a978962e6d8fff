"""Text to token ids and back: what a tokenizer is, and every kind that the pipeline can use."""
