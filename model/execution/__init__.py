"""Holds model/execution."""
