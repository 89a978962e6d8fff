"""The format of a checkpoint's directory: its small files, lookup and verification.

    step_00000050/  __<rank>_0.distcp   the tensors that this rank wrote (torch.save, read with weights_only)
                    .metadata           DCP's own index, a pickle for other readers; never opened here
                    index.json          the same index: name -> dtype, shape, chunks -> file, offset, length
                    meta.json           step, layout, experts per sharded tensor, versions, and the caller's meta
                    manifest.json       size and BLAKE2b of every file above

Verification reads every byte, at about 0.8 GB/s per core. Nothing here runs processes or executes
what it reads.
"""

import hashlib
import itertools
import json
import math
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from ...data_pipeline.files import read_regular
from ...data_pipeline.words import run_and_step, runs_near
from ...data_pipeline.words import step_of as step_of
from ..layout import Layout

Weights = Literal["trained", "average"]
"""Which weights of a checkpoint are read: those of its step, or their average (../average.py)."""

SUM_BYTES = 16
_READ_BYTES = 2**22
_MAX_BYTES = 2**30  # of an index
_ADVICE = "restore it from a copy, or delete the directory and resume from the checkpoint before it"
_STEP_NAME = re.compile(r"step_(\d{8,})")
Model = TypeVar("Model", bound=BaseModel)
# offsets and sizes of a chunk in all dims but the first
_Column = tuple[tuple[int, ...], tuple[int, ...]]
_Columns = tuple[_Column, ...]
OnBytes = Callable[[int], None]
"""Receives the number of bytes read or written since its last call."""
StartProgress = Callable[[str, int], OnBytes]
"""Starts a progress bar with a name and a number of bytes."""


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be written or read; says what to do."""


class CorruptCheckpointError(CheckpointError):
    """Raised if files differ from what was written, or lack required content."""


class StaleGenerationError(CheckpointError):
    """Raised in a process of an earlier generation of its job, which may no longer commit."""


class SaveFailedError(CheckpointError):
    """Raised after a failed save if the run must then end; a restart would not help."""


class _Record(BaseModel):
    # Without "constants" a NaN in the caller's meta would be read back as None.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Chunk(_Record):
    """A slice of a tensor and the location of its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class StoredTensor(_Record):
    """A tensor's dtype, shape and chunks."""

    dtype: str  # "float32"
    shape: tuple[int, ...]
    chunks: list[Chunk]


class Index(_Record):
    """index.json: all tensors of a checkpoint by name."""

    tensors: dict[str, StoredTensor]


class CheckpointMeta(_Record):
    """meta.json: everything in a checkpoint that is not a tensor."""

    step: int
    generation: int
    layout: Layout  # of the ranks that wrote it; any other layout can read it
    num_experts: dict[str, int]  # number of experts of sharded tensors
    versions: dict[str, str]
    meta: dict[str, Any]  # the caller's


class FileSum(_Record):
    """The size and the checksum of a file."""

    num_bytes: int
    blake2b: str


class CheckpointManifest(_Record):
    """manifest.json: all files of a checkpoint."""

    format: Literal[1]
    files: dict[str, FileSum]
    digest: str  # of `files`, so that damage of the manifest is not blamed on other files


@dataclass(frozen=True)
class StoredCheckpoint:
    """The small files of a checkpoint, parsed."""

    path: Path
    manifest: CheckpointManifest
    index: Index
    meta: CheckpointMeta
    weights: Weights = "trained"  # in "model.<name>"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint's step and directory."""

    step: int
    path: Path


def step_name(step: int) -> str:
    """Returns the directory name of a step's checkpoint: "step_00000050"."""
    return f"step_{step:08d}"


def list_checkpoints(directory: Path) -> list[Checkpoint]:
    """Lists the committed checkpoints, oldest first; empty if the directory does not exist."""
    if not directory.is_dir():
        return []
    matches = ((_STEP_NAME.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted(
        (Checkpoint(int(match[1]), path) for match, path in matches if match),
        key=lambda found: found.step,
    )


def latest(directory: Path) -> Path | None:
    """Returns the committed checkpoint of the highest step, without verifying it."""
    return found[-1].path if (found := list_checkpoints(directory)) else None


def read_meta(path: Path) -> CheckpointMeta:
    """Reads the meta.json of a checkpoint."""
    return _read(path, "meta.json", CheckpointMeta)


def find_checkpoint(named: Path, step: int | None = None) -> Path:
    """Returns the checkpoint of a name: RUN (the newest), RUN@STEP, or its folder; unverified.

    Raises:
        ValueError: there is none; the message lists the existing ones.
    """
    path, step = run_and_step(named, step)
    if any((path / name).exists() for name in ("manifest.json", "index.json", "meta.json")):
        if step is not None:
            raise CheckpointError(f"{path} is a checkpoint: give a run folder to select a step")
        return path
    found = list_checkpoints(path / "checkpoints")
    if not found:
        what = f"has no checkpoint (a run's are in {path / 'checkpoints'})"
        what = what if path.exists() else "there is no such folder"
        raise CheckpointError(f"{path}: {what}{runs_near(path)}")
    chosen = [checkpoint.path for checkpoint in found if step in (None, checkpoint.step)]
    if not chosen:
        steps = ", ".join(str(checkpoint.step) for checkpoint in found)
        raise CheckpointError(f"{path}: has no checkpoint of step {step}; it has those of {steps}")
    return chosen[-1]


def missing_files(path: Path) -> list[str]:
    """Lists missing files and wrong sizes of a checkpoint, without reading bytes."""
    problems = []
    for name, expected in _manifest_of(path).files.items():
        if (problem := _misfit(path / name, expected)) is not None:
            problems.append(f"{name} {problem}")
    return problems


def open_verified(path: Path, on_bytes: OnBytes | None = None) -> StoredCheckpoint:
    """Opens a checkpoint, verifies every checksum, and checks that it holds every expert once.

    Raises:
        CorruptCheckpointError: lists all problems.
    """
    manifest = _manifest_of(path)
    try:
        stored = open_checkpoint(path)
    except CorruptCheckpointError:
        refuse(
            path,
            [f"{name} {problem}" for name, problem in _damages(path, manifest.files, on_bytes)],
        )
        raise
    damaged = damaged_files(stored, sorted(manifest.files), on_bytes)
    refuse(path, audit(stored.index, stored.meta.num_experts) + damaged)
    return stored


def open_checkpoint(path: Path) -> StoredCheckpoint:
    """Reads and verifies the small files of a checkpoint, not the tensors' bytes."""
    manifest = _manifest_of(path)
    small = {
        name: manifest.files[name] for name in ("index.json", "meta.json") if name in manifest.files
    }
    refuse(path, [f"{name} {problem}" for name, problem in _damages(path, small)])
    index = _read(path, "index.json", Index)
    named = {chunk.file for tensor in index.tensors.values() for chunk in tensor.chunks}
    if strangers := sorted(named - manifest.files.keys()):
        refuse(path, [f"index.json names {strangers}, which manifest.json does not list"])
    return StoredCheckpoint(path, manifest, index, _read(path, "meta.json", CheckpointMeta))


def _manifest_of(path: Path) -> CheckpointManifest:
    """Reads and verifies manifest.json."""
    manifest = _read(path, "manifest.json", CheckpointManifest)
    if manifest.digest != digest_of_sums(manifest.files):
        refuse(path, ["manifest.json is damaged: it does not match its own checksum"])
    if outside := [name for name in manifest.files if Path(name).name != name]:
        refuse(path, [f"manifest.json names files outside of it: {outside}"])
    return manifest


def refuse(path: Path, problems: Sequence[str]) -> None:
    """Raises a CorruptCheckpointError with all problems, if there are any."""
    if problems:
        listed = "\n  ".join(problems)
        raise CorruptCheckpointError(f"{path} is damaged:\n  {listed}\n{_ADVICE}")


def without_advice(message: str) -> str:
    """Returns the message of a CorruptCheckpointError without its advice."""
    return message.removesuffix(_ADVICE).rstrip()


def damaged_files(
    stored: StoredCheckpoint, names: Sequence[str], on_bytes: OnBytes | None = None
) -> list[str]:
    """Lists the damage of the files `names`, and the tensors in them."""
    sums = {name: stored.manifest.files[name] for name in names}
    return [
        f"{name} {problem}{_contents(stored, name)}"
        for name, problem in _damages(stored.path, sums, on_bytes)
    ]


def audit(index: Index, num_experts: Mapping[str, int]) -> list[str]:
    """Lists the parts of tensors that the index lacks or has more than once.

    For tensors with experts (`num_experts`, by name) it names the experts.
    """
    tensors = index.tensors
    problems = [
        f"{name}: all {count} experts are missing"
        for name, count in num_experts.items()
        if name not in tensors
    ]
    for name, tensor in tensors.items():
        if not all(_is_block(chunk, len(tensor.shape)) for chunk in tensor.chunks):
            problems.append(
                f"{name} has shape {list(tensor.shape)}, and parts that are not blocks of such a tensor"
            )
        elif name in num_experts and tensor.shape[:1] != (num_experts[name],):
            problems.append(
                f"{name} has shape {list(tensor.shape)}, but {num_experts[name]} experts"
            )
        else:
            problems += [
                f"{name}: {gap}"
                for gap in _gaps(tensor, "experts" if name in num_experts else "rows")
            ]
    return problems


def _is_block(chunk: Chunk, num_dims: int) -> bool:
    """Returns whether a chunk has one non-negative offset and size per dimension."""
    return len(chunk.offsets) == len(chunk.sizes) == num_dims and all(
        number >= 0 for number in (*chunk.offsets, *chunk.sizes)
    )


def _gaps(tensor: StoredTensor, unit: str) -> list[str]:
    """Lists the rows with elements that no chunk or several chunks hold.

    Between two chunk bounds the same chunks hold every row, so one row is checked for all. FSDP may cut
    one bank in two ways: between experts if a rank's experts suffice for its group, else within them.
    """
    if not tensor.shape:
        return [] if len(tensor.chunks) == 1 else [f"stored {len(tensor.chunks)} times"]
    num_rows, inner = tensor.shape[0], math.prod(tensor.shape[1:])
    verdicts: dict[_Columns, str | None] = {}
    gaps: list[tuple[int, int, str]] = []
    for (start, end), columns in _bands(tensor):
        if columns not in verdicts:
            verdicts[columns] = _row_gap(columns, inner)
        verdict = "lie outside of the tensor" if end > num_rows else verdicts[columns]
        if verdict is not None and gaps and gaps[-1][1:] == (start, verdict):
            gaps[-1] = (gaps[-1][0], end, verdict)
        elif verdict is not None:
            gaps.append((start, end, verdict))
    return [f"{unit} {_span(start, end)} of {num_rows} {verdict}" for start, end, verdict in gaps]


def _bands(tensor: StoredTensor) -> Iterator[tuple[tuple[int, int], _Columns]]:
    """Yields ranges of rows in order, each with the parts of a row that its chunks hold."""
    spans = [(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in tensor.chunks]
    edges = sorted({0, tensor.shape[0], *itertools.chain.from_iterable(spans)})
    number = {row: place for place, row in enumerate(edges)}
    columns: list[list[_Column]] = [[] for _ in edges]
    for chunk, (start, end) in zip(tensor.chunks, spans, strict=True):
        for place in range(number[start], number[end]):
            columns[place].append((chunk.offsets[1:], chunk.sizes[1:]))
    for place, span in enumerate(itertools.pairwise(edges)):
        yield span, tuple(columns[place])


def _row_gap(columns: _Columns, inner: int) -> str | None:
    """Describes the problem of a row of `inner` elements with these parts, or returns None."""
    if not columns:
        return "are missing"
    if len(set(columns)) < len(columns):
        return "are stored more than once"
    stored = sum(math.prod(sizes) for _, sizes in columns)
    if stored != inner or any(
        _meet(one, other) for one, other in itertools.combinations(columns, 2)
    ):
        return f"have {stored} of {inner} elements each, some missing or more than once"
    return None


def _meet(one: _Column, other: _Column) -> bool:
    """Returns whether two blocks, given as offsets and sizes, overlap."""
    return all(
        a < b + size_b and b < a + size_a for a, size_a, b, size_b in zip(*one, *other, strict=True)
    )


def _damages(
    path: Path, sums: Mapping[str, FileSum], on_bytes: OnBytes | None = None
) -> Iterator[tuple[str, str]]:
    """Yields every damaged file's name and problem."""
    for name, expected in sums.items():
        if (problem := _misfit(path / name, expected)) is not None:
            yield name, problem
            continue
        try:
            found = _blake2b_of(path / name, on_bytes)
        except OSError as error:
            yield name, f"cannot be read: {error.strerror}"
        else:
            if found != expected.blake2b:
                yield name, "does not match its checksum: bytes have changed"


def _misfit(file: Path, expected: FileSum) -> str | None:
    """Describes what is wrong with a file's existence or size, or returns None."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return "is not a file"
    size = status.st_size
    return (
        None if size == expected.num_bytes else f"has {size} bytes instead of {expected.num_bytes}"
    )


def _contents(stored: StoredCheckpoint, file: str) -> str:
    """Describes which tensors and experts a file holds."""
    held = []
    for name, tensor in stored.index.tensors.items():
        for chunk in tensor.chunks:
            if chunk.file == file and name in stored.meta.num_experts:
                held.append(
                    f"experts {_span(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])} of "
                    f"{name}"
                )
            elif chunk.file == file:
                held.append(name)
    more = f" and {len(held) - 3} more" if len(held) > 3 else ""
    return f" (it holds {', '.join(held[:3])}{more})" if held else ""


def _span(start: int, end: int) -> str:
    return str(start) if end == start + 1 else f"{start}-{end - 1}"


def _read(path: Path, name: str, kind: type[Model]) -> Model:
    """Reads one of the small files."""
    try:
        return kind.model_validate_json(read_regular(path / name, max_bytes=_MAX_BYTES))
    except OSError as error:
        raise CorruptCheckpointError(
            f"{path} is not a complete checkpoint: cannot read {name}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise CorruptCheckpointError(
            f"{path}: {name} is damaged or of another format: {error}"
        ) from error


# Sums -------------------------------------------------------------------------------------------


def blake2b(data: bytes) -> str:
    """Returns the checksum of bytes in manifest.json's spelling."""
    return hashlib.blake2b(data, digest_size=SUM_BYTES).hexdigest()


def digest_of_sums(sums: Mapping[str, FileSum]) -> str:
    """Returns one checksum over all checksums."""
    return blake2b(
        json.dumps(
            [(name, found.num_bytes, found.blake2b) for name, found in sorted(sums.items())]
        ).encode()
    )


def _blake2b_of(file: Path, on_bytes: OnBytes | None = None) -> str:
    digest, buffer = hashlib.blake2b(digest_size=SUM_BYTES), memoryview(bytearray(_READ_BYTES))
    with open(file, "rb", buffering=0) as stream:
        while length := stream.readinto(buffer):
            digest.update(buffer[:length])
            if on_bytes is not None:
                on_bytes(length)
    return digest.hexdigest()
