"""What a run starts from instead of drawn weights: a checkpoint of another run.

`source.json` in the run folder records it. It is written before the ranks start and decides for every
start before the run's first checkpoint, so a run that is killed before it starts from the same bits.
Only weights are loaded: the optimizer, the schedule and the data begin anew.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from ...plugins import some_of
from .format import CheckpointError, open_checkpoint
from .together import gathered, together

if TYPE_CHECKING:  # commands read source.json without DTensor's import of half a second
    from ..local_shard import LocalShard
    from ..mesh import Mesh

SOURCE = "source.json"
_SHOWN_DIGITS = 12  # of a digest


class Source(BaseModel):
    """source.json: what a run starts from, and what was done to fit its model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["checkpoint"]
    given: str  # what the user named, with an absolute path
    path: str  # of the checkpoint, absolute
    step: int | None = None
    digest: str  # of the checkpoint's manifest
    tokenizer: str | None = None  # SHA-256 of the tokenizer whose ids the weights know
    drawn: tuple[str, ...] = ()  # parameters drawn anew
    ignored: tuple[str, ...] = ()  # tensors of the source that the model lacks

    def words(self) -> str:
        """Describes the source in one line."""
        step = "" if self.step is None else f", step {self.step:,}"
        words = f"{self.given}{step} (digest {self.digest[:_SHOWN_DIGITS]})"
        for what, names in (("drawn anew", self.drawn), ("ignored", self.ignored)):
            if names:
                words += f"; {what}: {some_of(names, most=80)}"
        return words

    def is_like(self, other: "Source") -> bool:
        """Returns whether both name the same weights and draw the same parameters anew."""
        same = self.given == other.given or self.digest == other.digest
        return same and self.drawn == other.drawn


def read_source(run_dir: Path) -> Source | None:
    """Returns what a run starts from; None: its weights are drawn.

    Raises:
        CheckpointError: source.json is damaged.
    """
    path = run_dir / SOURCE
    try:
        return Source.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise CheckpointError(
            f"{path}: is damaged ({error.error_count()} errors): start the run again with --from"
        ) from None


def digest_of(checkpoint: Path) -> str:
    """Returns the digest of a checkpoint's files, from its manifest."""
    return open_checkpoint(checkpoint).manifest.digest


def load_start(
    run_dir: Path, tensors: Mapping[str, Tensor], shards: "Mapping[str, LocalShard]", mesh: "Mesh"
) -> None:
    """Fills this rank's weights from what source.json names, if the run has one. Collective.

    Raises:
        CheckpointError: on all ranks, which then have changed nothing: as for `load_source`, or the
            ranks see different files.
    """
    own: list[Source | None] = []

    def read() -> str:
        own.append(read_source(run_dir))
        return "" if own[0] is None else own[0].model_dump_json()

    seen = gathered(mesh.world_group, read)
    if other := [rank for rank, text in enumerate(seen) if text != seen[0]]:
        raise CheckpointError(
            f"{run_dir / SOURCE}: rank {other[0]} sees another file than rank 0; the run folder must "
            "be the same on every node"
        )
    if own[0] is not None:
        load_source(own[0], tensors, shards, mesh)


def load_source(
    source: Source, tensors: Mapping[str, Tensor], shards: "Mapping[str, LocalShard]", mesh: "Mesh"
) -> None:
    """Fills this rank's weights in place, in the dtype that they have here. Collective.

    Args:
        source: what the run starts from.
        tensors: this rank's weights and buffers, as "model.<name>"; those drawn anew are left alone.
        shards: this rank's shards; tensors without one are whole.
        mesh: all ranks.

    Raises:
        CheckpointError: the source is gone, has changed, is damaged or does not fit; on all ranks.
    """
    from .loading import load

    wanted = {
        name: tensor
        for name, tensor in tensors.items()
        if name.removeprefix("model.") not in source.drawn
    }
    together(mesh.world_group, lambda: _check_unchanged(source))
    path = Path(source.path)
    load(path, wanted, shards, mesh=mesh, allow_unexpected=True, converts=True)


def _check_unchanged(source: Source) -> None:
    path = Path(source.path)
    advice = "restore it, or start again with --from in a new run folder"
    if not path.is_dir():
        raise CheckpointError(f"{path}: what this run starts from is not there: {advice}")
    if (now := digest_of(path)) != source.digest:
        raise CheckpointError(
            f"{path}: has changed since this run was started with it (digest "
            f"{source.digest[:_SHOWN_DIGITS]}…, now {now[:_SHOWN_DIGITS]}…): {advice}"
        )
