"""The configuration of a run: its sections, their validation, and how recipes and files resolve."""
