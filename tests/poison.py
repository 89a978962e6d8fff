"""A filter that some texts crash, like a library's crash from outside."""

import errno
import os
import signal
import sys


class PanicError(BaseException):
    """Is not an Exception, like a Rust panic, and does not unpickle."""

    def __init__(self, one: int, two: int):
        super().__init__(f"panicked at {one}:{two}")


class HomemadeError(Exception):
    """Cannot be unpickled, because its arguments differ from its constructor's."""

    def __init__(self, one: int, two: int):
        super().__init__(f"homemade {one} {two}")


def _raise(error: BaseException) -> None:
    raise error


_HARM = {
    "EXIT": lambda: os._exit(3),
    "SEGMENTATION": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "KILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SYSTEMEXIT": lambda: sys.exit(5),
    "PANIC": lambda: _raise(PanicError(3, 4)),
    "HOMEMADE": lambda: _raise(HomemadeError(3, 4)),
    "VALUE": lambda: _raise(ValueError("the detector is at its wits' end")),
    "BADGZIP": lambda: _raise(OSError("not a gzipped file")),
    "MEMORY": lambda: _raise(MemoryError()),
    "FULL": lambda: _raise(OSError(errno.ENOSPC, "No space left on device")),
    "BROKEN": lambda: _raise(OSError(errno.EIO, "Input/output error")),
    "MODULE": lambda: _raise(ModuleNotFoundError("No module named 'fasttext'")),
    "CTRLC": lambda: _raise(KeyboardInterrupt()),
}


def keep_what_does_no_harm(text: str) -> None:
    """Keeps every harmless text."""
    for word, harm in _HARM.items():
        if f"POISON {word}" in text:
            harm()
