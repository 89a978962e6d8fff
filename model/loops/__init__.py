"""Loop programs: what a model does between the applications of its layers, and how often."""
