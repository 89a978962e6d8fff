"""A filter that some texts crash, like a library's crash from outside."""

import errno
import os
import signal


class PanicError(BaseException):
    """Is not an Exception, like a Rust panic, and does not unpickle."""

    def __init__(self, one: int, two: int):
        super().__init__(f"panicked at {one}:{two}")


class HomemadeError(Exception):
    """Cannot be unpickled, because its arguments differ from its constructor's."""

    def __init__(self, one: int, two: int):
        super().__init__(f"homemade {one} {two}")


_KILLED = {"SEGMENTATION": signal.SIGSEGV, "KILL": signal.SIGKILL}
_RAISED = {
    "SYSTEMEXIT": SystemExit(5),
    "PANIC": PanicError(3, 4),
    "HOMEMADE": HomemadeError(3, 4),
    "VALUE": ValueError("the detector is at its wits' end"),
    "BADGZIP": OSError("not a gzipped file"),
    "MEMORY": MemoryError(),
    "FULL": OSError(errno.ENOSPC, "No space left on device"),
    "BROKEN": OSError(errno.EIO, "Input/output error"),
    "MODULE": ModuleNotFoundError("No module named 'fasttext'"),
    "CTRLC": KeyboardInterrupt(),
}


def keep_what_does_no_harm(text: str) -> None:
    """Keeps every harmless text."""
    for word in text.partition("POISON ")[2].split()[:1]:
        if word == "EXIT":
            os._exit(3)
        if word in _KILLED:
            os.kill(os.getpid(), _KILLED[word])
        if word in _RAISED:
            raise _RAISED[word]
