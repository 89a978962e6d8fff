"""Distributes a model over ranks: groups, dispatch, gradients, checkpoints."""
