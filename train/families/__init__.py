"""What comes in: families of published models, `--from`, and the import as a run."""
