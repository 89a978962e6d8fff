"""Grows a trained model: operators, each from a model to a larger one and a table of what it copies."""
