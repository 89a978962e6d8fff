"""Commands that start, follow and end jobs, and check clusters."""
