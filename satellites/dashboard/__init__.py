"""Shows runs on a live local web page: the command `moebius dashboard`."""

__version__ = "0.3.0"
