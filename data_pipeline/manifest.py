"""The manifests of a prepared folder: an append-only chain of files.

    manifest-000000.json   the header: specification, sources and tokenizer
    manifest-000001.json   a sealed segment: a run of consecutive shards of one source
    ...
    manifest-00000n.json   complete: totals, dropped and quarantined documents, the inputs' sizes

Each file carries its own sha256 and that of its predecessor. It names shards by counts and blake2b-256,
and the tokenizer by sha256, so a checksum covers each byte that a loader relies on. Files are created
atomically and never change. A folder without the last manifest is still being made, but its sealed
segments are final and can be trained on.

Manifests record no time, host or worker count, so the same input gives the same chain, byte for byte.
"""

import hashlib
import json
import re
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import zstandard
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from .atomic import atomic_write
from .data_config import FORMAT_VERSION, SourceName
from .errors import ShardError
from .files import read_regular
from .words import some_of

UNFINISHED = "unfinished"
"""The subfolder of a prepared folder for unfinished work."""

MAX_SEGMENT_SHARDS = 2**14
"""The most shards of a segment, so that its manifest stays small."""

MAX_MANIFEST_BYTES = 64 * 2**20
_MAX_COUNT = 2**53  # JSON readers agree on integers up to here
_GIVEN_UP = "given-up.json"
_NUMBERED = re.compile(r".+-\d{5,9}\.tok\.arrow")
_TOKENIZER_FILE = r"^[a-z0-9_-]{1,64}\.(json|model)$"
_ELSEWHERE = "restore it from a copy, or prepare again elsewhere"

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = get_args(Split)
Count = Annotated[int, Field(ge=0, le=_MAX_COUNT)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Entry(BaseModel):
    """Refuses changes and unknown keys; the base class of all parts of a manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ShardEntry(_Entry):
    """Describes a shard: a token file and its index, made from one input split."""

    name: str
    split: Split
    source: str
    input: str  # the input split: URL and range
    num_documents: Count
    num_tokens: Count  # ends of documents included
    num_text_bytes: Count  # UTF-8, without ends of documents
    num_batches: Count
    num_bytes: Count  # of the file `name`
    blake2b: Sha256
    index_blake2b: Sha256

    @property
    def index_name(self) -> str:
        """Returns the name of the shard's index file."""
        return index_name(self.name)

    @property
    def number(self) -> int:
        """Returns the number in the shard's name, which counts its source's units."""
        return int(self.name.removesuffix(".tok.arrow").rpartition("-")[2])


class SourceEntry(_Entry):
    """Describes a source of a prepared folder."""

    name: SourceName
    licence: str
    num_splits: Count
    has_loss_mask: bool
    has_record_id: bool


class TokenizerEntry(_Entry):
    """Names the tokenizer of the shards and its main file."""

    kind: str  # PrepareConfig.tokenizer
    file: str = Field(pattern=_TOKENIZER_FILE)
    sha256: Sha256
    vocab_size: int = Field(ge=1, le=2**32)
    end_of_document_id: int = Field(ge=0, lt=2**32)

    @model_validator(mode="after")
    def _end_is_in_the_vocabulary(self) -> Self:
        if self.end_of_document_id >= self.vocab_size:
            raise ValueError(
                f"end_of_document_id {self.end_of_document_id} is no id of a vocabulary of {self.vocab_size}"
            )
        return self


class Segment(_Entry):
    """Describes a sealed run of consecutive shards of one source.

    The shards of both splits are in the order of their input splits.
    """

    kind: Literal["segment"] = "segment"
    source: str
    number: Count  # among the segments of its source
    shards: tuple[ShardEntry, ...] = Field(min_length=1, max_length=2 * MAX_SEGMENT_SHARDS)


class SealedSegment:
    """Keeps a segment as compressed JSON, and its totals.

    A shard's entry thus takes some 100 bytes instead of the 1,500 of Python objects, for as long as a
    run lasts.
    """

    __slots__ = ("_num_tokens", "_packed", "last_shard", "number", "source")

    def __init__(self, segment: Segment):
        self.source, self.number = sys.intern(segment.source), segment.number
        self.last_shard = segment.shards[-1].number
        self._num_tokens: Counter[str] = Counter()
        for shard in segment.shards:
            self._num_tokens[shard.split] += shard.num_tokens
        packed = zstandard.ZstdCompressor().compress(segment.model_dump_json().encode())
        self._packed = bytes(memoryview(packed))  # the library over-allocates its result

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        """Returns the shards of both splits; unpacks them at every call."""
        packed = zstandard.ZstdDecompressor().decompress(self._packed)
        return Segment.model_validate_json(packed).shards

    def of(self, split: str) -> tuple[ShardEntry, ...]:
        """Returns the shards of one split, in stream order."""
        return tuple(shard for shard in self.shards if shard.split == split)

    def num_tokens(self, split: str) -> int:
        """Returns the number of tokens of one split, ends of documents included."""
        return self._num_tokens[split]


class QuarantinedSplit(_Entry):
    """Names an input split that could not be prepared, and why."""

    source: str
    input: str
    error: str


class Header(_Entry):
    """Begins a chain of manifests; `spec_hash` is the hash of `spec`, the configuration."""

    kind: Literal["header"] = "header"
    format_version: int = FORMAT_VERSION
    spec_hash: Sha256
    spec: dict[str, Any]
    tokenizer: TokenizerEntry
    batch_tokens: int = Field(ge=1, le=2**24)
    segment_tokens: int = Field(ge=1)
    sources: tuple[SourceEntry, ...] = Field(min_length=1)


class Completion(_Entry):
    """Ends a chain of manifests with the totals of the whole input."""

    kind: Literal["complete"] = "complete"
    num_documents: dict[str, dict[Split, Count]]  # source -> split -> documents
    num_tokens: dict[str, dict[Split, Count]]
    dropped: dict[str, dict[str, Count]]  # source -> reason -> documents
    quarantined: tuple[QuarantinedSplit, ...]
    inputs: dict[str, Count]  # URL -> size when it was read


Body = Annotated[Header | Segment | Completion, Field(discriminator="kind")]
_BODY: TypeAdapter[Body] = TypeAdapter(Body)


@dataclass(frozen=True)
class DatasetManifest:
    """Describes the content of a prepared folder so far: its chain of manifests."""

    header: Header
    sealed: tuple[SealedSegment, ...] = field(default=(), compare=False)  # implied by the hash
    completion: Completion | None = None
    sha256: str = ""
    """The last manifest's hash; folders with the same one hold the same data."""

    @property
    def complete(self) -> bool:
        """Returns whether the preparation is finished."""
        return self.completion is not None

    @property
    def sources(self) -> tuple[SourceEntry, ...]:
        """Returns the sources, in the order of the configuration."""
        return self.header.sources

    def source(self, name: str) -> SourceEntry:
        """Returns a source by its name.

        Raises:
            ShardError: no source has this name.
        """
        for source in self.sources:
            if source.name == name:
                return source
        known = some_of((source.name for source in self.sources), name)
        raise ShardError(f"the prepared folder has no source {name!r}; its sources are {known}")

    def segments(self, source: str) -> tuple[SealedSegment, ...]:
        """Returns the sealed segments of a source, in order.

        Raises:
            ShardError: no source has this name.
        """
        return self._segments_by_source.get(self.source(source).name, ())

    @cached_property
    def _segments_by_source(self) -> dict[str, tuple[SealedSegment, ...]]:
        found: dict[str, list[SealedSegment]] = {}
        for segment in self.sealed:
            found.setdefault(segment.source, []).append(segment)
        return {source: tuple(segments) for source, segments in found.items()}

    @property
    def shards(self) -> tuple[ShardEntry, ...]:
        """Returns all shards, by source and segment."""
        segments = (segment for source in self.sources for segment in self.segments(source.name))
        return tuple(shard for segment in segments for shard in segment.shards)

    def of(self, split: str) -> tuple[ShardEntry, ...]:
        """Returns the shards of one split, by source and segment."""
        return tuple(shard for shard in self.shards if shard.split == split)

    def num_tokens(self, split: str) -> int:
        """Returns the number of tokens of one split, ends of documents included."""
        return sum(segment.num_tokens(split) for segment in self.sealed)


# ---- names


def shard_name(source: str, split: Split, number: int) -> str:
    """Returns a shard's file name: `text.train-00000.tok.arrow`."""
    return f"{source}.{split}-{number:05d}.tok.arrow"


def index_name(shard_name: str) -> str:
    """Returns a shard's index: `text.train-00000.tok.arrow` -> `text.train-00000.idx.arrow`."""
    return shard_name.removesuffix(".tok.arrow") + ".idx.arrow"


def manifest_name(number: int) -> str:
    """Returns the file name of a manifest of the chain."""
    return f"manifest-{number:06d}.json"


def is_prepared(directory: str | Path) -> bool:
    """Returns whether a folder holds prepared data, complete, growing or damaged; "" is none."""
    first = Path(directory) / manifest_name(0)
    return directory != "" and (first.exists() or _later_than(first, 0) is not None)


# ---- reading


def read_manifest(directory: str | Path) -> DatasetManifest:
    """Reads the chain of manifests of a prepared folder.

    Raises:
        ShardError: there is no manifest, or one is missing or damaged.
    """
    folder = Path(directory)
    first = folder / manifest_name(0)
    data = _read(first)
    if data is None:
        if (later := _later_than(first, 0)) is not None:
            raise ShardError(f"{first} is missing, but {later.name} exists: {_ELSEWHERE}")
        raise ShardError(
            f"{first} does not exist: this folder holds no prepared data; run `moebius prepare`"
        )
    chained = _opened(first, data)
    version = chained.get("format_version")
    if version != FORMAT_VERSION:
        raise ShardError(
            f"{first} has format {version!r:.40}, but this version reads format {FORMAT_VERSION}: "
            "prepare the data again"
        )
    header = _checked(first, chained, number=0, parent="")
    if not isinstance(header, Header):
        raise ShardError(f"{first} is no header of a prepared folder: {_ELSEWHERE}")
    return follow(folder, DatasetManifest(header, sha256=body_hash(chained)))


def follow(directory: str | Path, known: DatasetManifest) -> DatasetManifest:
    """Reads the manifests added since `known` was read; returns `known` itself if there are none.

    Raises:
        ShardError: a manifest is missing, damaged, or does not continue `known`.
    """
    segments, parent, completion = list(known.sealed), known.sha256, known.completion
    last = {segment.source: segment for segment in segments}
    while completion is None:
        number = 1 + len(segments)
        path = Path(directory) / manifest_name(number)
        data = _read(path)
        if data is None:
            if (later := _later_than(path, number)) is None:
                break
            if (data := _read(path)) is None:  # else it was written a moment ago
                raise ShardError(f"{path} is missing, but {later.name} exists: {_ELSEWHERE}")
        chained = _opened(path, data)
        body = _checked(path, chained, number=number, parent=parent)
        if isinstance(body, Segment):
            _check_segment(path, body, known.header, last.get(body.source))
            segments.append(SealedSegment(body))
            last[body.source] = segments[-1]
        elif isinstance(body, Completion):
            completion = body
        else:
            raise ShardError(f"{path} is a second header: {_ELSEWHERE}")
        parent = body_hash(chained)
    if parent == known.sha256:
        return known
    return replace(known, sealed=tuple(segments), completion=completion, sha256=parent)


def _later_than(path: Path, number: int) -> Path | None:
    """Returns the next manifest after a missing one; None if the chain ends there."""
    names = (one.name for one in path.parent.glob("manifest-??????.json"))
    later = min((name for name in names if name > manifest_name(number)), default=None)
    return None if later is None else path.with_name(later)


def _read(path: Path) -> bytes | None:
    """Returns a manifest's bytes, or None if it does not exist."""
    try:
        return read_regular(path, max_bytes=MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ShardError(f"{path} cannot be read ({error.strerror}): {_ELSEWHERE}") from error


def _opened(path: Path, data: bytes) -> dict[str, Any]:
    """Returns a manifest's body after checking its bytes."""
    try:
        body = json.loads(data)["manifest"]
        intact = isinstance(body, dict) and data == encoded(body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ShardError(f"{path} is damaged ({error}): {_ELSEWHERE}") from error
    if not intact:
        raise ShardError(f"{path} is damaged (its sha256 differs): {_ELSEWHERE}")
    return body


def _checked(path: Path, chained: dict[str, Any], *, number: int, parent: str) -> Body:
    if (found := chained.get("file")) != number:
        raise ShardError(f"{path} calls itself manifest {found!r:.40}: {_ELSEWHERE}")
    if chained.get("parent") != parent:
        raise ShardError(
            f"{path} does not continue the manifest before it: files of two prepared folders were "
            f"mixed; {_ELSEWHERE}"
        )
    content = {key: value for key, value in chained.items() if key not in ("file", "parent")}
    try:
        return _BODY.validate_python(content)
    except ValidationError as error:
        raise ShardError(
            f"{path} has unknown, missing or impossible entries: prepare the data again\n{error}"
        ) from error


def _check_segment(
    path: Path, segment: Segment, header: Header, last: SealedSegment | None
) -> None:
    """Checks that a segment continues its source, and that its file names stay in the folder."""
    if segment.source not in {source.name for source in header.sources}:
        raise ShardError(f"{path} holds a segment of an unknown source {segment.source!r:.80}")
    expected = 0 if last is None else last.number + 1
    if segment.number != expected:
        raise ShardError(
            f"{path} is segment {segment.number} of source {segment.source!r}, expected {expected}"
        )
    before = (-1, "") if last is None else (last.last_shard, "validation")
    for shard in segment.shards:
        is_numbered = _NUMBERED.fullmatch(shard.name) is not None
        of_rule = is_numbered and shard_name(segment.source, shard.split, shard.number)
        if of_rule != shard.name or shard.source != segment.source:
            raise ShardError(
                f"{path} lists {shard.name!r:.200}, which is not a name of a {shard.split} shard of "
                f"source {segment.source!r}: it is damaged or edited; prepare the data again"
            )
        place = (shard.number, str(shard.split))
        if place <= before:
            raise ShardError(f"{path} lists {shard.name} out of order: prepare the data again")
        before = place


def encoded(chained: dict[str, Any]) -> bytes:
    """Returns the bytes of a manifest; any other form counts as damage."""
    whole = {"manifest": chained, "sha256": body_hash(chained)}
    return json.dumps(whole, indent=1).encode()


def body_hash(body: dict[str, Any]) -> str:
    """Returns the hex sha256 of a manifest's body, which its successor repeats."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# ---- growth
#
# A run on a growing folder waits for the next segment, for hours if necessary. If the preparation gives
# up, it writes the reason to `unfinished/given-up.json`. The next preparation of the folder removes it.


def give_up(directory: Path, reason: str) -> None:
    """Tells readers of a folder that it will not grow any more.

    Raises:
        PrepareError: the folder cannot be written.
    """
    folder = directory / UNFINISHED
    with suppress(OSError):  # the write below reports it
        folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / _GIVEN_UP) as file:
        file.write(json.dumps({"reason": reason}).encode())


def given_up(directory: Path) -> str | None:
    """Returns why a folder will not grow any more; None if it may, or cannot be read now."""
    try:
        return str(json.loads((directory / UNFINISHED / _GIVEN_UP).read_bytes())["reason"])
    except OSError:
        return None
    except (ValueError, RecursionError, KeyError, TypeError):
        return "the file with the reason is damaged"


def go_on(directory: Path) -> None:
    """Takes back what `give_up` has declared."""
    (directory / UNFINISHED / _GIVEN_UP).unlink(missing_ok=True)
