"""Writes the manifests: commits shards in the order of their units, whatever order they were made in.

A segment is sealed as soon as it is full, so readers of a growing folder find the same segments in the
same order as later. The header is written with the first segment, so a folder without readable data
has none.
"""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ..atomic import atomic_write
from ..errors import PrepareError
from ..manifest import (
    MAX_MANIFEST_BYTES,
    MAX_SEGMENT_SHARDS,
    Body,
    Completion,
    Header,
    QuarantinedSplit,
    Segment,
    ShardEntry,
    SourceEntry,
    Split,
    TokenizerEntry,
    body_hash,
    encoded,
    manifest_name,
)
from ..prepare_config import PrepareConfig
from ..tokenizers.interface import main_file
from ..tokenizers.tokenizer import load_tokenizer
from .choose import SourceCounts
from .units import Unit

_NOT_LINKED = {errno.EEXIST, errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK}


class ManifestWriter:
    """Writes a folder's chain of manifests.

    Writing the same manifest again changes nothing, so an interrupted preparation can be repeated;
    writing another one in its place is refused.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._number, self._parent = 0, ""

    def append(self, body: Body) -> None:
        """Writes the next manifest atomically.

        Raises:
            PrepareError: another manifest has this number, or the folder cannot be written.
        """
        chained = {"file": self._number, "parent": self._parent} | body.model_dump(mode="json")
        data, name = encoded(chained), manifest_name(self._number)
        if len(data) > MAX_MANIFEST_BYTES:
            raise PrepareError(
                f"{name} would have {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}: give fewer "
                "and larger input files, or lower prepare.segment_tokens"
            )
        create_once(self._directory / name, data)
        self._number, self._parent = self._number + 1, body_hash(chained)


def create_once(path: Path, data: bytes) -> None:
    """Creates a file atomically, and never replaces another one.

    Raises:
        PrepareError: a file with other content exists, or the folder cannot be written.
    """
    with atomic_write(path, name=_name_once) as file:
        file.write(data)


def _name_once(temporary: Path, path: Path) -> None:
    """Gives a file its name unless that is taken.

    Without hard links it renames the file, which is safe under the folder's lock.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NOT_LINKED:
            raise
        if not path.exists():
            os.replace(temporary, path)
        elif path.read_bytes() != temporary.read_bytes():
            raise PrepareError(
                f"{path} exists with other content: another preparation wrote into this folder; choose "
                "another one"
            ) from None


class Committer:
    """Extends the chain of manifests, unit by unit."""

    def __init__(
        self,
        config: PrepareConfig,
        folder: Path,
        *,
        num_units: dict[str, int],
        on_segment: Callable[[str], None],
    ):
        """Takes each source's number of units, and a callback for the source of every segment."""
        self._config, self._folder = config, folder
        self._num_units, self._on_segment = num_units, on_segment
        self._writer = ManifestWriter(folder)
        self._open: dict[str, list[ShardEntry]] = {name: [] for name in num_units}
        self._left = dict(num_units)
        self._segments = dict.fromkeys(num_units, 0)
        self._documents = {name: _nothing() for name in num_units}
        self._tokens = {name: _nothing() for name in num_units}
        self._has_header = False

    def commit(self, source: str, shards: Sequence[ShardEntry]) -> None:
        """Commits the shards of a source's next unit; there may be none."""
        segment = self._open[source]
        segment.extend(shards)
        self._left[source] -= 1
        for shard in shards:
            self._documents[source][shard.split] += shard.num_documents
            self._tokens[source][shard.split] += shard.num_tokens
        train_tokens = sum(shard.num_tokens for shard in segment if shard.split == "train")
        is_full = train_tokens >= self._config.segment_tokens or len(segment) >= MAX_SEGMENT_SHARDS
        if segment and (is_full or not self._left[source]):
            self._seal(source)

    def num_train_tokens(self, source: str) -> int:
        """Returns the training tokens of a source that are committed so far."""
        return self._tokens[source]["train"]

    def complete(
        self,
        counts: dict[str, SourceCounts],
        quarantined: Sequence[QuarantinedSplit],
        units: Sequence[Unit],
    ) -> None:
        """Appends the last manifest, after the last unit."""
        assert not any(self._left.values()), "a unit was not committed"
        self._writer.append(
            Completion(
                num_documents=self._documents,
                num_tokens=self._tokens,
                dropped={
                    name: dict(sorted(count.dropped.items())) for name, count in counts.items()
                },
                quarantined=tuple(quarantined),
                inputs={split.url: split.size for unit in units for split in unit.splits},
            )
        )

    def _seal(self, source: str) -> None:
        if not self._has_header:
            self._writer.append(self._header())
            self._has_header = True
        shards = tuple(self._open[source])
        self._writer.append(Segment(source=source, number=self._segments[source], shards=shards))
        self._open[source] = []
        self._segments[source] += 1
        self._on_segment(source)

    def _header(self) -> Header:
        tokenizer = load_tokenizer(self._folder)
        config = self._config
        return Header(
            spec_hash=config.spec_hash,
            spec=config.spec,
            tokenizer=TokenizerEntry(
                kind=config.tokenizer,
                file=main_file(tokenizer),
                sha256=tokenizer.sha256,
                vocab_size=tokenizer.vocab_size,
                end_of_document_id=tokenizer.end_of_document_id,
            ),
            batch_tokens=config.batch_tokens,
            segment_tokens=config.segment_tokens,
            sources=tuple(
                SourceEntry(
                    name=source.name,
                    licence=source.licence,
                    num_splits=self._num_units[source.name],
                    has_loss_mask=source.has_loss_mask,
                    has_record_id=bool(source.id_field),
                )
                for source in config.all_sources
            ),
        )


def _nothing() -> dict[Split, int]:
    return {"train": 0, "validation": 0}
