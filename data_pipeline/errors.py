"""Errors about a user's data: every message says what is wrong, where, and what to do.

All are ValueErrors with one string argument, so they can be pickled for a process pool or a cluster.
"""


class DataError(ValueError):
    """Says that the data or its folder is wrong; the base class of the errors below."""


class InputError(DataError):
    """Says that input cannot be read as configured."""


class ShardError(DataError):
    """Says that prepared data on disk is missing, damaged, or of another preparation."""


class NothingToReadError(ShardError):
    """Says that prepared data has no row, or no target that counts in the loss."""


class PreparationFailedError(DataError):
    """Says that a run has used up all sealed data, and its preparation has failed."""


class PrepareError(DataError):
    """Says that preparation cannot write its folder, or would overwrite other work."""
