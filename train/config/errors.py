"""Errors of a configuration, and which errors of a rank no restart can fix.

A job restarts what a crash has ended. A configuration that cannot run, data that is not there, a
device that the machine lacks: these stay the same after any number of restarts. A rank that meets
one exits with EXIT_MISTAKE, and the supervisor ends the job with it.

The supervisor imports this module, so it must not import torch at the top.
"""

from ...data_pipeline.errors import DataError
from ...own_parts import OwnPartError

EXIT_MISTAKE = 78  # EX_CONFIG of sysexits.h; ranks of other programs may use it too

_PERMANENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class ConfigError(ValueError):
    """Says why a configuration cannot be run: which value, why, and what to do."""


def no_restart_mends(error: BaseException) -> bool:
    """Returns whether a rank that raised this would raise it again after any restart.

    Data that a file system failed to deliver (an I/O error, a stale handle) may be readable later.
    """
    from ...distributed.process.process import DeviceError

    if not isinstance(error, ConfigError | DataError | OwnPartError | DeviceError):
        return False
    origins = [step for step in _chain(error) if isinstance(step, OSError)]
    return all(isinstance(origin, _PERMANENT) for origin in origins)


def _chain(error: BaseException) -> list[BaseException]:
    """Returns the error and what it was raised from or while handling."""
    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or step.__context__
    return chain
