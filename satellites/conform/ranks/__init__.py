"""Runs the ranks of one world as forked processes and returns what they computed."""
