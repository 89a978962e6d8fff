"""Asks trained models of moebius what they have learned: pictures, comparisons, tasks, claims."""

__version__ = "0.2.0"
