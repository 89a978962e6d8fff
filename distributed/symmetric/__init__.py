"""Memory that every rank of a node can reach: one-sided exchanges without a collective."""
