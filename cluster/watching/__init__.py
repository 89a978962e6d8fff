"""Watching the ranks of a generation: where each is, who hangs, who is slow, what it uses."""
