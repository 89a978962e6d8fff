"""Compares runs on a live web page of this machine: the command `moebius dashboard`."""

__version__ = "0.2.0"
