"""Studies trained moebius models: pictures, comparisons, algorithmic tasks, claims of papers."""

__version__ = "0.3.0"
