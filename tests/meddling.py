"""Pools that disturb a preparation, and what such tests inspect."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moebius.data_pipeline.files import TEMPORARY
from moebius.data_pipeline.make.pools import SerialPool
from moebius.data_pipeline.manifest import is_prepared, read_manifest
from moebius.data_pipeline.read.token_store import verify_shard


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


def check_nothing_is_half_there(folder: Path, expected: dict[str, bytes]) -> None:
    """Checks that every named file has its final content, and that sealed segments are whole."""
    for name, content in files_of(folder).items() if folder.exists() else ():
        assert TEMPORARY in name or content == expected[name], name
    if is_prepared(folder):
        for shard in read_manifest(folder).shards:
            verify_shard(folder, shard)
