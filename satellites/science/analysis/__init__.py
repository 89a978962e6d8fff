"""Computes statistics of a trained model's routers and depth steps."""
