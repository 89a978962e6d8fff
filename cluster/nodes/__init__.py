"""Holds cluster/nodes."""
