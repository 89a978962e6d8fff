"""What a run is worth: perplexity and generated text."""
