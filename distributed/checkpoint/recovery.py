"""Finds the checkpoint to resume from: the newest intact one, the same on all ranks.

    newest first: every rank reads a share of the files → damaged? again with other shares → next

A checkpoint counts as damaged only if two readings agree, because the second assigns every file to
another rank. If the newest one is damaged or missing, copies in the second place are tried too:
newest first, and the folder's own before a copy of the same step. Nothing is renamed before an intact
one is found. If there is none, all stay in place and one error lists what was tried; a run that has had
checkpoints never silently restarts from the beginning.

Cost: the bytes are read once by all ranks together (0.8 GB/s per core), twice for damaged checkpoints.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..mesh import Mesh
from .checkpoint_folder import DamagedCheckpoint, list_set_aside
from .format import (
    CheckpointError,
    CheckpointMeta,
    CorruptCheckpointError,
    list_checkpoints,
    step_name,
    step_of,
    without_advice,
)
from .loading import check_for_all, load
from .second_copy import SecondCopy
from .together import gathered

logger = logging.getLogger(__name__)
_READINGS = 2


@dataclass(frozen=True)
class WholeCheckpoint:
    """The checkpoint that a run resumes from."""

    path: Path
    meta: CheckpointMeta
    damaged: tuple[DamagedCheckpoint, ...]  # of the same step or newer, newest first
    fetched_for: Path | None = None  # final path of a `path` fetched from the second place
    grow: Callable[..., None] | None = None  # reads the state of a branch that grows out of it

    def load(self, *state: Mapping[str, Any], mesh: Mesh, allow_unexpected: bool) -> None:
        """Fills this rank's part of a run's state in place, tensors and shards. Collective."""
        options: dict[str, Any] = {"check_bytes": False, "allow_unexpected": allow_unexpected}
        read = self.grow or partial(load, self.path, **options)
        read(*state, mesh=mesh)


def newest_whole(
    directory: Path,
    group: dist.ProcessGroup,
    second: SecondCopy | None = None,
) -> WholeCheckpoint | None:
    """Returns the newest intact checkpoint and the damaged newer ones. Collective.

    All ranks get the same result, based on rank 0's view of the folder. Nothing is renamed.

    Args:
        directory: the run's checkpoints.
        group: all ranks, with a timeout that allows for slow disks.
        second: the place of their copies.

    Returns:
        None if the run has never had a checkpoint.

    Raises:
        CheckpointError: there were checkpoints, but none is intact; or one cannot be read for another
            reason than damage.
    """
    own, aside = _seen_by_rank_0(directory, group)
    search = _Search(group, second)
    if own and (found := search.try_own(own[0])):
        return found
    copies = _copies(second, group, must_answer=not own)
    candidates = [(path, search.try_own) for path in own[1:]]
    candidates += [(directory / step_name(step), search.try_copy) for step in copies]
    # newest first; for the same step, the folder's own before its copy
    for path, attempt in sorted(candidates, key=lambda each: -step_of(each[0].name)):
        if found := attempt(path):
            return found
    if search.tried or aside:
        raise CheckpointError(_nothing_left(directory, search.tried, aside))
    return None


def _seen_by_rank_0(directory: Path, group: dist.ProcessGroup) -> tuple[list[Path], list[str]]:
    """Returns the committed checkpoints, newest first, and descriptions of those set aside.

    Only rank 0 lists them, because network file systems may show ranks different listings.
    """

    def look() -> tuple[list[str], list[str]]:
        if group.rank() != 0:
            return [], []
        found = [str(each.path) for each in reversed(list_checkpoints(directory))]
        aside = [f"{path.name} was set aside as damaged" for path in list_set_aside(directory)]
        return found, aside

    found, aside = gathered(group, look)[0]
    return [Path(path) for path in found], aside


def _copies(second: SecondCopy | None, group: dist.ProcessGroup, *, must_answer: bool) -> list[int]:
    """Returns the steps of the copies in the second place, as seen by rank 0."""
    if second is None:
        return []

    def look() -> list[int]:
        if group.rank() != 0:
            return []
        try:
            return second.steps()
        except CheckpointError as error:
            if must_answer:
                raise
            logger.warning("%s; trying only the run folder's checkpoints", error)
            return []

    return gathered(group, look)[0]


class _Search:
    """The damaged checkpoints found so far, and descriptions of everything tried."""

    def __init__(self, group: dist.ProcessGroup, second: SecondCopy | None) -> None:
        self._group, self._second = group, second
        self._damaged: list[DamagedCheckpoint] = []
        self.tried: list[str] = []

    def try_own(self, path: Path) -> WholeCheckpoint | None:
        """Returns a checkpoint of the run folder if it is intact, else records what is wrong."""
        meta, why = _checked(path, self._group)
        if meta is not None:
            return WholeCheckpoint(path, meta, tuple(self._damaged))
        self._damaged.append(DamagedCheckpoint(step_of(path.name), path, why))
        self.tried.append(why)
        return None

    def try_copy(self, path: Path) -> WholeCheckpoint | None:
        """Fetches a checkpoint's copy and returns it if it is intact, else records what is wrong."""
        second, fetched = self._second, path.with_name(f"{path.name}.fetched.tmp")
        assert second is not None, "copies are in a second place"

        def fetch() -> str:
            if self._group.rank() == 0:
                try:
                    second.fetch(path.name, fetched)
                except CheckpointError as error:
                    return str(error)
            return ""

        meta, why = None, gathered(self._group, fetch)[0]
        if not why:
            meta, why = _checked(fetched, self._group)
        if meta is not None:
            return WholeCheckpoint(fetched, meta, tuple(self._damaged), fetched_for=path)
        self.tried.append(f"the copy in {second.url}: {why}")
        return None


def _checked(path: Path, group: dist.ProcessGroup) -> tuple[CheckpointMeta | None, str]:
    """Returns the meta of an intact checkpoint, or None and what is wrong with it."""
    why = ""
    for reading in range(_READINGS):
        try:
            return check_for_all(path, group, reading=reading), ""
        except CorruptCheckpointError as error:
            why = without_advice(str(error))
    return None, why


def _nothing_left(directory: Path, tried: Sequence[str], aside: Sequence[str]) -> str:
    """Lists everything tried on one line, because summaries show only the first line."""
    words = [" ".join(each.split()) for each in tried]
    words += [f"{each} by an earlier start" for each in aside]
    return (
        f"{directory} has no intact checkpoint left, and the run does not silently restart from step 0; tried, "
        f"newest first: {'; '.join(words)}; `moebius ckpt verify {directory.parent}` names the lost tensors; "
        "restore one from a copy, or move them all away to start from step 0"
    )
