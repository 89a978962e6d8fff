"""Starts and supervises jobs: Ray, one torchrun agent per node, recovery, watching."""
