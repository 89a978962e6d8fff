"""The checkpoint that a run goes on from: the newest whole one, chosen by all ranks alike.

    newest first: every rank reads a share of the files → damaged? a second time, other shares → next

A checkpoint is damaged if it is found so twice, by two divisions of its files among the ranks: a
file that one rank read wrongly is read by another the second time. Where the newest is damaged, or
gone, the copies in a second place are tried too, newest first, this folder's before a copy of the
same step. Nothing is renamed before a whole one is found: with none left, all stay where they are,
and the run fails with one error that lists what was tried. A run that has had checkpoints never
starts from its beginning in silence. A caller may pass over whole ones (`WhyNot`): those that a run
saved on a way from which it went back since.

Cost: what loading costs anyway, the bytes read once by all ranks together (0.8 GB/s and core);
twice that for each damaged one.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

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
from .loading import check_for_all
from .second_copy import SecondCopy
from .together import gathered

logger = logging.getLogger(__name__)
_READINGS = 2
WhyNot = Callable[[CheckpointMeta], str]
"""Says why a run must not go on from a whole checkpoint; "": it may."""


@dataclass(frozen=True)
class WholeCheckpoint:
    """The checkpoint that a run goes on from."""

    path: Path
    meta: CheckpointMeta
    damaged: tuple[DamagedCheckpoint, ...]  # of the same step or newer, newest first
    fetched_for: Path | None = (
        None  # the name that `path`, fetched from the second place, shall get
    )


def newest_whole(
    directory: Path,
    group: dist.ProcessGroup,
    second: SecondCopy | None = None,
    *,
    at_most: int | None = None,
    why_not: WhyNot = lambda meta: "",
) -> WholeCheckpoint | None:
    """Returns the newest whole checkpoint, and which newer ones are damaged.

    A collective call; every rank gets the same, of what rank 0 sees. Nothing is renamed.

    Args:
        directory: the run's checkpoints.
        group: all ranks; they may wait long for one that reads or fetches.
        second: where copies of them are.
        at_most: leaves out those of later steps.
        why_not: which whole ones are passed over; they stay where they are.

    Returns:
        None: the run has never had a checkpoint; or it has no whole one up to `at_most`.

    Raises:
        CheckpointError: there were checkpoints, and none is whole; or one cannot be read for
            another reason than damage.
    """
    own, aside = _seen_by_rank_0(directory, group)
    own = [path for path in own if at_most is None or step_of(path.name) <= at_most]
    search = _Search(group, second, why_not)
    if own and (found := search.try_own(own[0])):
        return found
    copies = [
        step
        for step in _copies(second, group, must_answer=not own)
        if at_most is None or step <= at_most
    ]
    candidates = [(path, search.try_own) for path in own[1:]]
    candidates += [(directory / step_name(step), search.try_copy) for step in copies]
    # newest first, and of the same step this folder's before its copy
    for path, attempt in sorted(candidates, key=lambda each: -step_of(each[0].name)):
        if found := attempt(path):
            return found
    if at_most is None and (search.tried or aside):
        raise CheckpointError(_nothing_left(directory, search.tried, aside))
    return None


def _seen_by_rank_0(directory: Path, group: dist.ProcessGroup) -> tuple[list[Path], list[str]]:
    """Returns the committed checkpoints, newest first, and in words what was set aside.

    A rank that looked for itself could see an old listing of a network file system.
    """

    def look() -> tuple[list[str], list[str]]:
        if group.rank() != 0:
            return [], []
        found = [str(each.path) for each in reversed(list_checkpoints(directory))]
        aside = [f"{path.name} was set aside as {why}" for path, why in list_set_aside(directory)]
        return found, aside

    found, aside = gathered(group, look)[0]
    return [Path(path) for path in found], aside


def _copies(second: SecondCopy | None, group: dist.ProcessGroup, *, must_answer: bool) -> list[int]:
    """Returns the steps of the copies in the second place, as rank 0 sees it."""
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
            logger.warning("%s; only the run folder's checkpoints are tried", error)
            return []

    return gathered(group, look)[0]


class _Search:
    """What was found damaged, and in words all that was tried, until one is whole."""

    def __init__(
        self, group: dist.ProcessGroup, second: SecondCopy | None, why_not: WhyNot
    ) -> None:
        self._group, self._second, self._why_not = group, second, why_not
        self._damaged: list[DamagedCheckpoint] = []
        self.tried: list[str] = []

    def try_own(self, path: Path) -> WholeCheckpoint | None:
        """Returns a checkpoint of the run folder if it is whole; else notes what is wrong with it."""
        meta, why = _checked(path, self._group)
        if meta is None:
            self._damaged.append(DamagedCheckpoint(step_of(path.name), path, why))
        elif reason := self._why_not(meta):
            why = f"{path.name} {reason}"
        else:
            return WholeCheckpoint(path, meta, tuple(self._damaged))
        self.tried.append(why)
        return None

    def try_copy(self, path: Path) -> WholeCheckpoint | None:
        """Fetches the copy of a checkpoint and returns it if it is whole; else notes what is wrong."""
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
            why = self._why_not(meta)
        if meta is not None and not why:
            return WholeCheckpoint(fetched, meta, tuple(self._damaged), fetched_for=path)
        self.tried.append(f"the copy in {second.url}: {why}")
        return None


def _checked(path: Path, group: dist.ProcessGroup) -> tuple[CheckpointMeta | None, str]:
    """Returns the meta of a whole checkpoint, or None and what is wrong with it."""
    why = ""
    for reading in range(_READINGS):
        try:
            return check_for_all(path, group, reading=reading), ""
        except CorruptCheckpointError as error:
            why = without_advice(str(error))
    return None, why


def _nothing_left(directory: Path, tried: Sequence[str], aside: Sequence[str]) -> str:
    """Spells what was tried where no checkpoint is whole, in one line: summaries show the first."""
    words = [" ".join(each.split()) for each in tried]
    words += [f"{each} by an earlier start" for each in aside]
    return (
        f"{directory} has no whole checkpoint left, and the run is not started from its beginning "
        f"as if there had been none; tried, newest first: {'; '.join(words)}; `moebius ckpt verify "
        f"{directory.parent}` names the tensors that are lost; restore one from a copy, or move them "
        "all away to start from step 0"
    )
