"""Errors about a user's data: every message says what is wrong, where, and what to do.

All are ValueErrors with one string argument, so that they survive the trip through a process pool
or a cluster.
"""


class DataError(ValueError):
    """Says that something about the data or its folder is wrong; the base of those below."""


class InputError(DataError):
    """Says that the text that was given cannot be read as asked."""


class ShardError(DataError):
    """Says that prepared data on disk is missing, damaged, or belongs to something else."""


class PreparationFailedError(DataError):
    """Says that a run has used up what is sealed, and that the preparation was given up."""


class PrepareError(DataError):
    """Says that preparation cannot write where it was told to, or would overwrite other work."""
