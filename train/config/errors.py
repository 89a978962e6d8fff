"""Configuration errors, and which errors of a rank no restart can fix.

A job restarts after crashes. An invalid configuration, missing data or a missing device stays the
same after any restart. A rank with such an error exits with EXIT_MISTAKE, and the supervisor ends
the job.

The supervisor imports this module, so it must not import torch at the top.
"""

from ...data_pipeline.errors import DataError
from ...plugins import PluginError, own_digests

EXIT_MISTAKE = 78  # EX_CONFIG of sysexits.h; ranks of other programs may use it too

_PERMANENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class ConfigError(ValueError):
    """Reports why a configuration cannot run: which value, why, and what to do."""


def no_restart_mends(error: BaseException) -> bool:
    """Returns whether a rank would raise this error again after any restart.

    Data that a file system failed to deliver (an I/O error, a stale handle) may be readable later.
    """
    from ...distributed.process.process import DeviceError

    if isinstance(error, TypeError | AttributeError | NotImplementedError):
        return bool(own_digests())  # of a user's own part: another signature, or another kind
    if not isinstance(error, ConfigError | DataError | PluginError | DeviceError):
        return False
    origins = [step for step in _chain(error) if isinstance(step, OSError)]
    return all(isinstance(origin, _PERMANENT) for origin in origins)


def _chain(error: BaseException) -> list[BaseException]:
    """Returns the error and its causes and contexts."""
    chain: list[BaseException] = []
    step: BaseException | None = error
    while step is not None and step not in chain:
        chain.append(step)
        step = step.__cause__ or step.__context__
    return chain
