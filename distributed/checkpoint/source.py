"""Starts a run from another run's checkpoint or a published folder, instead of drawn weights.

`source.json` in the run folder records it. It is written before the ranks start and decides for every
start before the run's first checkpoint, so a run that is killed before it starts from the same bits.
Only weights are loaded: the optimizer, the schedule and the data begin anew. A branch instead goes on
from a step of another run, its trunk, with all of its state.

A rank reads only the blocks of a published folder that it stores, one at a time, so it never holds more
than its share of the model and one tensor. `pieces` say where they are; no family is known here.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from ...data_pipeline.files import read_regular
from ...data_pipeline.words import some_of
from ...plugins import distrust
from .format import (
    CheckpointError,
    blake2b,
    open_checkpoint,
)
from .together import gathered, together

if TYPE_CHECKING:  # commands read source.json without DTensor's import of half a second
    from ..local_shard import LocalShard
    from ..mesh import Mesh
    from .grown import BlockReader
    from .recovery import WholeCheckpoint

SOURCE = "source.json"
SOURCE_FILES = "source"
"""The folder of a run folder with a copy of the published folder's small files, for `ckpt export`."""

_SHOWN_DIGITS = 12  # of a digest
_MAX_BYTES = 2**28  # of source.json, which has a row for each region of a grown bank


class GrownBy(BaseModel):
    """One growth of a source: the words that asked for it, and what it comes to.

    What a run starts from follows from this alone, whatever an operator of the same words does later.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    words: str
    model: dict[str, Any]  # the section that it leads to
    takes: tuple[Any, ...] = ()  # rows of `takes_to_json`
    digest: str  # of model and takes

    @staticmethod
    def of(words: str, model: dict[str, Any], takes: Sequence[Any]) -> "GrownBy":
        """Returns a growth with its digest."""
        return GrownBy(words=words, model=model, takes=tuple(takes), digest=_digest(model, takes))

    def check(self) -> None:
        """Refuses a table that was changed."""
        if _digest(self.model, self.takes) != self.digest:
            raise CheckpointError(f"{SOURCE}: the growth {self.words} is not the one of its digest")


def _digest(model: dict[str, Any], takes: Sequence[Any]) -> str:
    return blake2b(json.dumps([model, takes]).encode())


class Source(BaseModel):
    """source.json: the source of a run's weights, and the changes that fit them to its model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # branch: a checkpoint with all of its state; written: what the run's first checkpoint was made of
    kind: Literal["checkpoint", "folder", "branch", "written"]
    given: str  # what the user named, with an absolute path
    path: str  # of the checkpoint or the folder, absolute
    step: int | None = None  # of a checkpoint
    family: str | None = None  # of a folder
    digest: str  # of the checkpoint's manifest, or of the folder's config.json, index and headers
    tokenizer: str | None = None  # SHA-256 of the tokenizer whose ids the weights know
    drawn: tuple[str, ...] = ()  # parameters drawn anew
    zeros: tuple[str, ...] = ()  # of older runs: buffers that the folder's family lacks
    ignored: tuple[str, ...] = ()  # tensors of the source that the model lacks
    dequantised: tuple[str, ...] = ()  # tensors of the folder in a packed format
    pieces: tuple[Any, ...] = ()  # of a folder: rows of `pieces_to_json`
    grown: tuple[GrownBy, ...] = ()  # growths of the source's model, in their order
    moments: Literal["keep", "new"] = "keep"  # of a branch that grows: the optimizer's state

    def words(self) -> str:
        """Says in one line what the run starts or branches from."""
        verb = "branches" if self.kind == "branch" else "starts"
        what = self.family if self.step is None else f"step {self.step:,}"
        words = f"{verb} from {self.given}, {what} (digest {self.digest[:_SHOWN_DIGITS]})"
        told = {"dequantised": self.dequantised, "drawn anew": self.drawn, "ignored": self.ignored}
        lists = (f"; {what}: {some_of(names, most=80)}" for what, names in told.items() if names)
        for growth in self.grown:
            words += f", grown by {growth.words} (digest {growth.digest[:_SHOWN_DIGITS]})"
        return words + "".join(lists)

    def public_words(self) -> str:
        """Says the same to readers of a published model, without folders of the user's."""
        is_public = self.given.startswith("hf://")
        given = self.given if is_public else Path(self.given).name
        return self.model_copy(update={"given": given}).words()

    def as_text(self) -> str:
        """Returns the text of source.json, a key per line."""
        keys = self.model_dump(mode="json", exclude_defaults=True).items()
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in keys]
        return "{\n " + ",\n ".join(lines) + "\n}\n"

    def is_like(self, other: "Source") -> bool:
        """Returns whether both take the same from the same, and draw the same parameters anew."""
        same = self.given == other.given or self.digest == other.digest
        mine, others = (
            (source.kind, source.drawn, source.moments, [growth.digest for growth in source.grown])
            for source in (self, other)
        )
        return same and mine == others


def read_source(run_dir: Path) -> Source | None:
    """Returns what a run starts from; None: its weights are drawn.

    Raises:
        CheckpointError: source.json is damaged.
    """
    path = run_dir / SOURCE
    try:
        source = Source.model_validate_json(read_regular(path, max_bytes=_MAX_BYTES))
        distrust(source.family, run_dir)
        return source
    except (OSError, ValidationError) as error:
        if not path.exists():
            return None
        reason = error.strerror if isinstance(error, OSError) else f"{error.error_count()} errors"
        raise CheckpointError(
            f"{path}: is damaged ({reason}): restore it; a run with a checkpoint also goes on without it, "
            "and any other starts again with --from"
        ) from None


def keep_small_files(source: Source, run_dir: Path) -> None:
    """Copies configuration, tokenizer, licence and the like of a published folder into the run folder.

    A run that starts from such a run keeps them, too.
    """
    from .pieces import PublishedFolder

    kept = run_dir / SOURCE_FILES
    shutil.rmtree(kept, ignore_errors=True)
    if source.kind == "folder":
        PublishedFolder(Path(source.path)).copy_small_files(kept)
    elif before := kept_files(Path(source.path).parent.parent):
        kept.mkdir()
        for path in before:
            shutil.copyfile(path, kept / path.name)
    if source.grown:  # it describes the model before
        (kept / "README.md").unlink(missing_ok=True)


def kept_files(run_dir: Path) -> list[Path]:
    """Returns the small files that a run folder has of the published folder that it began with.

    Raises:
        CheckpointError: one is a link, which no run makes, or they are too large.
    """
    from .pieces import small_files

    kept = run_dir / SOURCE_FILES
    if not os.path.lexists(kept):
        return []
    if links := [path for path in (kept, *kept.iterdir()) if path.is_symlink()]:
        raise CheckpointError(
            f"{links[0]}: is a link, and what it leads to is not copied; remove it"
        )
    return small_files(kept)


def load_start(
    run_dir: Path, tensors: Mapping[str, Tensor], shards: "Mapping[str, LocalShard]", mesh: "Mesh"
) -> "WholeCheckpoint | None":
    """Fills this rank's weights from what source.json names, if the run has one. Collective.

    Returns:
        Of a branch, its trunk's checkpoint, verified, from which nothing is loaded yet; else None.

    Raises:
        CheckpointError: on all ranks, which then have changed nothing: as for `load_blocks`, or the
            ranks see different files.
    """
    own: list[Source | None] = []

    def read() -> str:
        own.append(read_source(run_dir))
        return "" if own[0] is None else blake2b(own[0].as_text().encode())

    seen = gathered(mesh.world_group, read)
    if other := [rank for rank, digest in enumerate(seen) if digest != seen[0]]:
        raise CheckpointError(
            f"{run_dir / SOURCE}: rank {other[0]} sees another file than rank 0; the run folder must "
            "be the same on every node"
        )
    source = own[0]
    if source is not None and source.kind == "branch":
        return _trunk_of(source, mesh)
    if source is not None:
        kept = {f"model.{name}" for name in (*source.drawn, *source.zeros)}
        wanted = {name: tensor for name, tensor in tensors.items() if name not in kept}
        load_blocks(source, wanted, shards, mesh=mesh)
    return None


def _trunk_of(source: Source, mesh: "Mesh") -> "WholeCheckpoint":
    """Verifies every byte of the checkpoint that a branch goes on from. Collective."""
    from .loading import check_for_all
    from .recovery import WholeCheckpoint

    together(mesh.world_group, lambda: _check_digest(source, _digest_of(source)))
    path = Path(source.path)
    meta = check_for_all(path, mesh.world_group)
    if not source.grown:
        return WholeCheckpoint(path, meta, damaged=())
    # Not kept: where experts lay, which steps were normal, and of new moments all that goes with them.
    lost = ("spikes", *(("average", "groups") if source.moments == "new" else ()))
    kept = {key: value for key, value in meta.meta.items() if key not in lost} | {"experts": {}}
    kept["config"] = {**kept["config"], "model": source.grown[-1].model}
    if source.moments == "new":
        kept["progress"] = {**kept["progress"], "updates": 0, "skipped": 0}
    grow = partial(load_blocks, source, check_bytes=False)
    return WholeCheckpoint(path, meta.model_copy(update={"meta": kept}), damaged=(), grow=grow)


def check_source(source: Source) -> None:
    """Checks, before ranks start, that what a run starts from is there and has not changed.

    Raises:
        CheckpointError: it is not.
    """
    is_folder = source.kind == "folder" and Path(source.path).is_dir()  # its headers, ranks read
    _check_digest(source, source.digest if is_folder else _digest_of(source))


def _digest_of(source: Source) -> str:
    """Returns the digest that a checkpoint has now; "" if it is not there."""
    path = Path(source.path)
    return open_checkpoint(path).manifest.digest if path.is_dir() else ""


def _check_digest(source: Source, now: str) -> None:
    if source.kind == "written":
        raise CheckpointError(
            f"the checkpoint that this run began with, made from {source.given}, is gone: make it again "
            "in a new run folder"
        )
    advice = "restore it, or start again with --from in a new run folder"
    if not now:
        raise CheckpointError(f"{source.path}: what this run starts from is not there: {advice}")
    if now != source.digest:
        raise CheckpointError(
            f"{source.path}: has changed since this run was started with it (digest "
            f"{source.digest[:_SHOWN_DIGITS]}…, now {now[:_SHOWN_DIGITS]}…): {advice}"
        )


# Blocks ------------------------------------------------------------------------------------------


def open_reader(
    source: Source, *, part: int = 0, parts: int = 1, check_bytes: bool = True
) -> "BlockReader":
    """Opens what a run starts from as the model that it starts with; arguments as for `open_share`.

    Raises:
        CheckpointError: the source is gone, has changed or is damaged, or a growth does not fit it.
    """
    from .grown import GrownReader, PublishedReader, StoredReader, Take
    from .loading import open_share
    from .pieces import Piece, PublishedFolder, from_rows

    path = Path(source.path)
    if source.kind == "folder" and path.exists():
        folder = PublishedFolder(path)
        _check_digest(source, folder.digest)
        reader: BlockReader = PublishedReader(folder, from_rows(Piece, source.pieces))
    else:
        _check_digest(source, _digest_of(source))
        reader = StoredReader(open_share(path, part, parts, check_bytes=check_bytes))
    for growth in source.grown:
        growth.check()
        reader = GrownReader(reader, from_rows(Take, growth.takes))
    return reader


def load_blocks(
    source: Source,
    tensors: Mapping[str, Tensor],
    shards: "Mapping[str, LocalShard]",
    *,
    mesh: "Mesh",
    check_bytes: bool = True,
) -> None:
    """Fills this rank's tensors in place, in the dtype that they have here. Collective.

    Args:
        source: what the run starts from.
        tensors: to fill, as "model.<name>"; of a branch that grows, the optimizer's state, too.
        shards: this rank's shards; tensors without one are whole.
        mesh: all ranks.
        check_bytes: verify the checksum of every file of a checkpoint.

    Raises:
        CheckpointError: the source is gone, has changed, is damaged or does not fit; on all ranks.
    """
    from ..local_shard import whole_shard

    own = {name: shards.get(name) or whole_shard(tensor.shape) for name, tensor in tensors.items()}

    def check() -> "BlockReader":
        reader = open_reader(
            source, part=mesh.rank, parts=mesh.layout.world_size, check_bytes=check_bytes
        )
        shapes = {name: (reader.shape(name), shard.global_shape) for name, shard in own.items()}
        if unlike := [f"{name}: {a} there, {b} here" for name, (a, b) in shapes.items() if a != b]:
            listed = some_of(unlike, between="\n  ", most=1000)
            raise CheckpointError(
                f"{source.path}: does not give every element of the model once:\n  {listed}"
            )
        return reader

    reader = together(mesh.world_group, check)

    def read() -> None:
        for name, shard in own.items():
            for slice_ in shard.slices:
                reader.fill(slice_.view(tensors[name].detach()), name, slice_.offsets)

    together(mesh.world_group, read)
