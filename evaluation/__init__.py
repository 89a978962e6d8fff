"""Measures checkpoints: perplexity, zero-shot tasks, generated text, traces."""
