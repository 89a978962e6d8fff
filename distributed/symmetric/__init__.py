"""Memory shared by the ranks of a node: one-sided exchanges without collectives."""
