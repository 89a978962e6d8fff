"""Keeps a failed measurement from costing the others.

Any exception becomes a reason beside the figures. An illegal access breaks the process's CUDA
context, in which nothing runs any more: the process then replaces itself, and the fresh one reads
the finished figures from their file.
"""

import os
import sys
from typing import NoReturn

import torch

UNFINISHED = "began and did not end"  # the reason that a killed process leaves in its file
_SHOWN = 200  # characters of a message's beginning, and of its end


class Broken(Exception):
    """Reports that the CUDA context is broken; the file names the culprit."""


def require_gpu() -> None:
    """Ends the program with one line where torch sees no GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(
            f"there is no GPU here (torch {torch.__version__}, built for CUDA {torch.version.cuda}): "
            "run it on a machine with one, or with --device cpu if it has that option"
        )


def reason_of(error: BaseException) -> str:
    """Returns an error's type and its first cause's message in one line, shortened in the middle.

    Triton's compiler begins its messages with a place and ends them with the reason, and of nested
    functions the innermost alone has one.
    """
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    words = " ".join(str(root).split())
    if len(words) > 2 * _SHOWN:
        words = f"{words[:_SHOWN]} … {words[-_SHOWN:]}"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def is_broken() -> bool:
    """Returns whether this process's CUDA context no longer runs anything."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def restart(module: str, *words: str) -> NoReturn:
    """Replaces this process by a fresh one of a module, with further words on its command line."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:], *words])
