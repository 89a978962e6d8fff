"""Runs ranks on one machine: the node, its template, the agents, and how nodes meet."""
