"""Describes a run: the sections of its configuration, their validation, and how recipes and files
resolve to one.
"""
