"""Placement of experts on ranks: balancing measured load, moving experts, replicating hot ones."""
