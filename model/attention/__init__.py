"""Holds model/attention."""
