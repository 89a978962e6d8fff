"""Everything that wants a GPU."""
