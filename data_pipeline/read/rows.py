"""The segments of a prepared folder, opened on demand, and rows gathered from their chunks.

1. `Prepared` follows the chain of manifests, counts each segment's rows, and opens the index and plan
   of those that are read.
2. `RowReader` keeps the decoded chunks of one shuffle window per source (16 MiB at 128 Ki tokens of
   uint16) and gathers rows from them.
3. `SplitReader` numbers the rows of each source's first segment, for validation and for text beside a
   prompt.

Legend: S tokens predicted per row, n requested rows.
"""

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from ..data_config import DataConfig
from ..errors import DataError, NothingToReadError
from ..manifest import DatasetManifest, SealedSegment, follow, read_manifest
from ..words import some_of
from .chunks import PADDING, ChunkReader, LoadedChunk, TokenRows
from .corruption import BatchFetcher
from .order import ChunkTable, group_pairs, num_rows
from .packing import CHUNK_BATCHES, PlanKey, SegmentPlan, concat_plan, open_plan
from .token_store import TokenStore

Packing = Literal["concat", "best_fit"]
_SPARE_CHUNKS = 1  # beside those of a window


class Prepared:
    """Opens the segments of one split of a prepared folder, which may still be growing.

    Args:
        directory: the folder.
        split: "train" or "validation".
        seq_len: S.
        packing: how documents become rows.
        document_ids: whether rows have document ids.
        fetch: reads record batches. If it knows replicas, opening a segment accepts missing or
            truncated shards.
        chunk_batches: record batches decoded together with "concat": few for scattered rows, more
            for a run's order.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        split: str = "train",
        seq_len: int,
        packing: Packing = "concat",
        document_ids: bool = False,
        fetch: BatchFetcher | None = None,
        chunk_batches: int = CHUNK_BATCHES,
    ):
        self.directory, self.split = Path(directory), split
        self.seq_len, self.packing = seq_len, packing
        self.manifest = read_manifest(directory)
        self.document_ids = document_ids
        self.loss_mask = packing == "best_fit" or any(
            s.has_loss_mask for s in self.manifest.sources
        )
        self._fetch, self._chunk_batches = fetch or BatchFetcher(), chunk_batches
        kept = 2 * len(self.manifest.sources) + 2
        self.reader = functools.lru_cache(maxsize=kept)(self._open)
        """(source, segment) to its ChunkReader; caches the latest."""
        self._plan_rows = functools.cache(self._rows_of_plan)

    def grow(self) -> bool:
        """Reads new manifests of the chain; returns whether there were any."""
        known, self.manifest = self.manifest, follow(self.directory, self.manifest)
        return self.manifest is not known

    def segment(self, source: str, number: int) -> SealedSegment:
        """Returns a sealed segment of a source."""
        return self.manifest.segments(source)[number]

    def num_rows(self, source: str, segment: int) -> int:
        """Returns the number of rows of a segment; with "concat" the manifest determines it."""
        if self.packing == "concat":
            return num_rows(self.segment(source, segment).num_tokens(self.split), self.seq_len)
        return self._plan_rows(source, segment)

    def chunks(self, source: str, segment: int) -> ChunkTable:
        """Returns how a segment's rows are divided into chunks."""
        return self.reader(source, segment).plan.chunks

    def content_of(self, source: str, segment: int) -> str:
        """Returns a hash of the content of a segment's shards and indices."""
        shards = self.segment(source, segment).of(self.split)
        hashes = [f"{shard.blake2b} {shard.index_blake2b}" for shard in shards]
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()

    def empty_rows(self, count: int) -> TokenRows:
        """Returns rows of padding, which `LoadedChunk.copy_row` fills."""
        shape, end_id = (count, self.seq_len + 1), self.manifest.header.tokenizer.end_of_document_id
        return TokenRows(
            np.full(shape, end_id, dtype=np.int64),
            np.zeros(shape, dtype=bool) if self.loss_mask else None,
            np.full(shape, PADDING, dtype=np.int32) if self.document_ids else None,
        )

    def _open(self, source: str, segment: int) -> ChunkReader:
        store = self._store(source, segment)
        if is_fitted := self.packing == "best_fit":
            plan = self._plan(source, segment, store)
        else:
            plan = concat_plan(
                store.batch_starts,
                self.seq_len,
                self.manifest.header.batch_tokens,
                chunk_batches=self._chunk_batches,
            )
        return ChunkReader(
            store, self._fetch, plan, self.seq_len, is_fitted, document_ids=self.document_ids
        )

    def _store(self, source: str, segment: int) -> TokenStore:
        check_sizes = not self._fetch.replicas
        of = (source, segment, self.split, self.manifest)
        return TokenStore(self.directory, *of, check_sizes=check_sizes)

    def _plan(self, source: str, segment: int, store: TokenStore | None = None) -> SegmentPlan:
        def document_ends() -> Iterator[np.ndarray]:
            opened = store or self._store(source, segment)
            return (self._fetch(opened, n).document_ends for n in range(opened.num_batches))

        return open_plan(
            self.directory,
            PlanKey(source, segment, self.seq_len, self.content_of(source, segment)),
            batch_tokens=self.manifest.header.batch_tokens,
            batches=document_ends,
        )

    def _rows_of_plan(self, source: str, segment: int) -> int:
        return self._plan(source, segment).chunks.num_rows


class RowReader:
    """Gathers rows from decoded chunks, keeping each source's latest. Not thread-safe.

    Args:
        prepared: the folder.
        names: the sources, in the order that numbers them.
    """

    def __init__(self, prepared: Prepared, names: Sequence[str]):
        self._prepared, self._names = prepared, tuple(names)
        self._loaded: dict[int, OrderedDict[tuple[int, int], LoadedChunk]] = {}

    def read(self, sources: np.ndarray, segments: np.ndarray, rows: np.ndarray) -> TokenRows:
        """Reads rows by the numbers of their source, segment and row: int64 [n] each.

        Raises:
            ShardError: a record batch is damaged.
        """
        found = self._prepared.empty_rows(len(rows))
        for source, segment, here in group_pairs(sources, segments):
            table = self._prepared.chunks(self._names[source], segment)
            chunks = table.chunks_of(rows[here])
            inside = rows[here] - table.row_starts[chunks]
            keep = table.chunks_per_window + _SPARE_CHUNKS
            # in order of appearance, so that the previous window's chunks are not read again
            for number in dict.fromkeys(chunks.tolist()):
                chunk, of_chunk = self._load(source, segment, number, keep), chunks == number
                places = here[of_chunk].tolist()
                for row, place in zip(inside[of_chunk].tolist(), places, strict=True):
                    chunk.copy_row(row, found, place)
        return found

    def _load(self, source: int, segment: int, chunk: int, keep: int) -> LoadedChunk:
        kept = self._loaded.setdefault(source, OrderedDict())
        found = kept.get((segment, chunk))
        if found is None:
            while len(kept) >= keep:
                kept.popitem(last=False)
            found = self._prepared.reader(self._names[source], segment).read(chunk)
        kept[segment, chunk] = found
        kept.move_to_end((segment, chunk))
        return found


class SplitReader:
    """Reads rows of every source's first segment, numbered source after source.

    Rows are cut from the streams, S tokens apart, whatever the run's packing. First segments exist as
    soon as a folder can be read, and are the whole split if it is small.
    """

    def __init__(
        self,
        directory: str | Path,
        split: str,
        *,
        seq_len: int,
        document_ids: bool = False,
        fetch: BatchFetcher | None = None,
    ):
        """Opens the folder.

        Raises:
            ShardError: the folder cannot be read.
        """
        self._prepared = Prepared(
            directory,
            split=split,
            seq_len=seq_len,
            document_ids=document_ids,
            fetch=fetch,
            chunk_batches=1,
        )
        manifest = self._prepared.manifest
        self.directory, self.seq_len = Path(directory), seq_len
        names = [source.name for source in manifest.sources if manifest.segments(source.name)]
        self._reader = RowReader(self._prepared, names)
        self._ends = np.cumsum([self._prepared.num_rows(name, 0) for name in names], dtype=np.int64)
        first_segments = [self._prepared.segment(name, 0) for name in names]
        self.num_tokens = sum(segment.num_tokens(split) for segment in first_segments)

    @property
    def num_rows(self) -> int:
        """Returns the number of rows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def streams(self) -> list[range]:
        """Returns the rows of each source, which are consecutive in its stream."""
        ends = self._ends.tolist()
        return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def read(self, rows: np.ndarray) -> TokenRows:
        """Reads rows by their numbers, 0 <= n < num_rows.

        Raises:
            ShardError: a record batch is damaged.
        """
        sources = np.searchsorted(self._ends, rows, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        return self._reader.read(sources, np.zeros_like(rows), rows - starts[sources])


def check_names(manifest: DatasetManifest, data: DataConfig) -> None:
    """Checks that the mixture names only sources of the folder.

    Raises:
        DataError: it names an unknown source.
    """
    known = {source.name for source in manifest.sources}
    if unknown := sorted(data.mixture_names - known):
        raise DataError(
            f"data.weights, data.max_epochs or data.stages name {some_of(unknown)}: the folder's "
            f"sources are {some_of(sorted(known), unknown[0])}"
        )


def too_short(what: str, num_tokens: int, seq_len: int) -> NothingToReadError:
    """Returns the error about a stream shorter than one row."""
    return NothingToReadError(
        f"{what} has {num_tokens} tokens, fewer than the {seq_len + 1} of one row ({seq_len=}): "
        "prepare more text for it in another folder, or lower data.seq_len. (Of one document nothing "
        "is held out for validation: name another file, prepare.validation_input=FILE; of several, "
        "raise prepare.validation_fraction)"
    )
