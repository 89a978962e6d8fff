"""Holds the places where jobs run: Ray clusters, and simulated ones."""
