"""Asks trained models of moebius what they have learned: pictures, comparisons, tasks, claims."""

__version__ = "0.1.0"
