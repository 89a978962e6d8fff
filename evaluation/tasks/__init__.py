"""The zero-shot tasks: how each is read, what is asked of a model, and how its answer is judged."""
