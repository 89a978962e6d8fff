"""Does a folder behave as a run folder must? What one node does to find out.

Runs rely on three things of a shared folder: what one node has written and renamed is whole where
others see it, a rename replaces without a gap, and of several that create the same file one alone
succeeds (so a checkpoint is committed once).
"""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from .findings import Written

LOOK_EVERY_S = 0.01
PREFIX = ".moebius-doctor-"


@dataclass(frozen=True)
class Seen:
    """Says what became of a wait for a file's new content."""

    seconds: float | None  # None: it did not come
    why: str = ""
    gap: str = ""  # what was there between the old content and the new, if anything


def publish(path: str, text: str) -> Written:
    """Writes a file beside its place, fsyncs it and renames it into place."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{target.name}.{os.getpid()}")
    started = time.perf_counter()
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(target)
    return Written(time.perf_counter() - started, shutil.disk_usage(target.parent).free)


def await_text(path: str, text: str, limit_s: float, before: str | None = None) -> Seen:
    """Waits until a file holds a text.

    Args:
        before: what it held until now; anything else in between is a gap.
    """
    started, gap, why = time.perf_counter(), "", ""
    while (elapsed := time.perf_counter() - started) < limit_s:
        try:
            found = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            found, why = None, error.strerror or str(error)
        if found == text:
            return Seen(elapsed, gap=gap)
        if before is not None and found != before:
            gap = "no file" if found is None else f"{len(found)} of {len(text)} characters"
        if found is not None:
            why = "it holds another text"
        time.sleep(LOOK_EVERY_S)
    return Seen(None, why, gap)


def claim(path: str) -> bool:
    """Creates a file that must not be there; returns False where it was."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def clean(folder: str, token: str) -> None:
    """Removes what a check has left."""
    for path in Path(folder).glob(f"{PREFIX}{token}*"):
        path.unlink(missing_ok=True)
