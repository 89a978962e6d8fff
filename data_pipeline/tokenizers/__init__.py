"""Text to token ids and back: the tokenizer interface and its implementations."""
