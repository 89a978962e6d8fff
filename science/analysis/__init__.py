"""Counts what a trained model's routers and depth steps do."""
