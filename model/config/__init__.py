"""Holds model/config."""
