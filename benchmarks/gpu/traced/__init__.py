"""A training step traced on a GPU that is not there: every operation and kernel, and no value."""
