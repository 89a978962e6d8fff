"""From file names, globs, URLs and functions to documents: one file per format."""
