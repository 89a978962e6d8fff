"""The checkpoint that a run goes on from: the newest whole one, chosen by all ranks alike.

    newest first: every rank reads a share of the files → damaged? a second time, other shares → next

A checkpoint is damaged if it is found so twice, by two divisions of its files among the ranks: a
file that one rank read wrongly is read by another the second time. Nothing is renamed before a
whole one is found: with none left, all stay where they are, and the run fails with one error that
lists what was tried. A run that has had checkpoints never starts from its beginning in silence.

Cost: what loading costs anyway, the bytes read once by all ranks together (0.8 GB/s and core);
twice that for each damaged one.
"""

from collections.abc import Sequence
from pathlib import Path

from ..mesh import Mesh
from .files import (
    CheckpointError,
    CheckpointMeta,
    CorruptCheckpointError,
    list_checkpoints,
    without_advice,
)
from .folder import DamagedCheckpoint, list_set_aside
from .loading import check_for_all
from .together import gathered

_READINGS = 2


def newest_whole(
    directory: Path, mesh: Mesh
) -> tuple[tuple[Path, CheckpointMeta] | None, list[DamagedCheckpoint]]:
    """Returns the newest whole checkpoint with its meta, and the damaged ones that are newer.

    A collective call; every rank gets the same, of what rank 0 sees in the folder. Nothing is
    changed.

    Returns:
        None in the place of the first: the run has never had a checkpoint.

    Raises:
        CheckpointError: there were checkpoints, and none is whole; or one cannot be read for
            another reason than damage.
    """
    damaged: list[DamagedCheckpoint] = []
    committed, aside = _seen_by_rank_0(directory, mesh)
    for step, path in committed:
        meta, why = _checked(path, mesh)
        if meta is not None:
            return (path, meta), damaged
        damaged.append(DamagedCheckpoint(step, path, why))
    if damaged or aside:
        raise CheckpointError(_nothing_left(directory, damaged, aside))
    return None, []


def _seen_by_rank_0(directory: Path, mesh: Mesh) -> tuple[list[tuple[int, Path]], list[str]]:
    """Returns steps and paths of the committed checkpoints, newest first, and names set aside.

    A rank that looked for itself could see an old listing of a network file system.
    """

    def look() -> tuple[list[tuple[int, str]], list[str]]:
        if mesh.rank != 0:
            return [], []
        found = [(each.step, str(each.path)) for each in reversed(list_checkpoints(directory))]
        return found, [path.name for path in list_set_aside(directory)]

    found, aside = gathered(mesh.world_group, look)[0]
    return [(step, Path(path)) for step, path in found], aside


def _checked(path: Path, mesh: Mesh) -> tuple[CheckpointMeta | None, str]:
    """Returns the meta of a whole checkpoint, or None and what is wrong with it."""
    why = ""
    for reading in range(_READINGS):
        try:
            return check_for_all(path, mesh, reading=reading), ""
        except CorruptCheckpointError as error:
            why = without_advice(str(error))
    return None, why


def _nothing_left(
    directory: Path, damaged: Sequence[DamagedCheckpoint], aside: Sequence[str]
) -> str:
    """Spells what was tried where no checkpoint is whole, in one line: summaries show the first."""
    tried = [" ".join(each.why.split()) for each in damaged]
    tried += [f"{name} was set aside as damaged by an earlier start" for name in aside]
    return (
        f"{directory} has no whole checkpoint left, and the run is not started from its beginning "
        f"as if there had been none; tried, newest first: {'; '.join(tried)}; restore one from a "
        "copy, or, to start from the beginning, move them all away"
    )
