"""Takes a finished model and spreads it over ranks: groups, dispatch, gradients, checkpoints."""
