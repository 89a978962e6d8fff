"""The ways out: weights in the file formats of other tools."""
