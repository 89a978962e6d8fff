"""Which errors of a rank no restart mends, and how a rank says so.

A job starts again what a crash has ended. A configuration that cannot be run, data that is not
there, a device that the machine does not have: these will be the same after any number of restarts,
so the rank ends with an exit code of its own, and the supervision ends the job with it.

Nothing heavy is imported at the top: the supervision knows the exit code and needs no torch.
"""

from ...data_pipeline.errors import DataError

EXIT_MISTAKE = 78  # EX_CONFIG of sysexits.h; ranks of other programs may use it alike

_PERMANENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


def no_restart_mends(error: BaseException) -> bool:
    """Returns whether a rank that raised this would raise it again after any restart.

    Data that a file system failed to deliver (an I/O error, a stale handle) may be readable again.
    """
    from ...distributed.process.process import DeviceError
    from .run_config import ConfigError

    if not isinstance(error, ConfigError | DataError | DeviceError):
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
