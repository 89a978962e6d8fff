"""Where the parts become a run: configuration, recipes, the loop."""
