"""Claims of the papers, tried on toys."""
