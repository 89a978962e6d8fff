"""The model's configuration: its sections, sizes and checks."""
