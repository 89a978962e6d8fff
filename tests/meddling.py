"""Pools that disturb a preparation, and what such tests inspect."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moebius.data_pipeline.make.pools import SerialPool


class StoppedError(Exception):
    """Stops a coordinator."""


class Meddling(SerialPool):
    """Runs tasks one after another, and does something with function and item before each."""

    def __init__(self, meddle: Callable[[Any, Any], object]):
        super().__init__()
        self._meddle = meddle

    def submit(self, function, item, /):
        def meddled(item):
            self._meddle(function, item)
            return function(item)

        return super().submit(meddled, item)


class NothingToRun(SerialPool):
    """Stands for the pool of a preparation with nothing to do."""

    def submit(self, function, item, /):
        raise AssertionError("it was done already")


def files_of(folder: Path, pattern: str = "*") -> dict[str, bytes]:
    """Returns the contents of a folder's files, by relative name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.glob(pattern)
        if path.is_file()
    }
