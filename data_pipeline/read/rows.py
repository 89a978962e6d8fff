"""The segments of a prepared folder, opened when they are reached, and rows gathered from their chunks.

1. `Prepared` follows the chain of manifests, counts the rows of every segment, and opens the index and
   the plan of those that are read.
2. `RowReader` keeps the chunks of one window of the order decoded per source (16 MiB at 128 Ki
   tokens of uint16) and gathers rows from them.
3. `SplitReader` numbers the rows of first segments one after the other: validation, and text to stand
   beside a request.

Legend: S tokens predicted per row, n rows asked for.
"""

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np

from ..data_config import DataConfig
from ..errors import DataError, ShardError
from ..manifest import DatasetManifest, SealedSegment, follow, read_manifest
from ..tokenizers.interface import token_dtype
from .chunks import (
    BatchReader,
    BestFitLayout,
    ChunkLayout,
    ConcatLayout,
    LoadedChunk,
    WantedOfTokens,
)
from .corruption import BatchFetcher
from .gather import JoinedChunks, Rows, empty_rows
from .order import ChunkTable, group_pairs, num_rows
from .packing import CHUNK_BATCHES, BestFitPlan, PlanKey, open_plan
from .token_store import TokenStore

Packing = Literal["concat", "best_fit"]
ChunkReader = Callable[[str, int, int], LoadedChunk]
"""Returns the rows of a chunk by its source, segment and number: decoded here, or by a server."""

_SPARE_CHUNKS = 1  # beside those of a window


class Prepared:
    """Opens the segments of one split of a prepared folder, which may still be growing.

    Args:
        directory: the folder.
        split: "train" or "validation".
        seq_len: S.
        packing: how documents become rows.
        document_ids: whether they are wanted.
        read_batch: reads record batches.
        check_sizes: whether a missing or truncated shard is refused when its segment is opened.
        chunk_batches: record batches that are decoded together where rows are cut: few for rows
            from all over, more for the order of a run.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        split: str = "train",
        seq_len: int,
        packing: Packing = "concat",
        document_ids: bool = False,
        read_batch: BatchReader | None = None,
        check_sizes: bool = True,
        chunk_batches: int = CHUNK_BATCHES,
    ):
        self.directory, self.split = Path(directory), split
        self.seq_len, self.packing = seq_len, packing
        self.manifest = read_manifest(directory)
        has_mask = packing == "best_fit" or any(s.has_loss_mask for s in self.manifest.sources)
        self.wanted = WantedOfTokens(counts=has_mask, documents=document_ids)
        self._read_batch = read_batch or BatchFetcher()
        self._check_sizes, self._chunk_batches = check_sizes, chunk_batches
        self._stores: OrderedDict[tuple[str, int], TokenStore] = OrderedDict()
        kept = 2 * len(self.manifest.sources) + 2
        self.layout = functools.lru_cache(maxsize=kept)(self._open)
        """(source, segment) to its ChunkLayout; the latest are kept."""
        self._plan_rows = functools.cache(self._rows_of_plan)

    @property
    def token_bytes(self) -> int:
        """Returns how many bytes a token takes."""
        return token_dtype(self.manifest.vocab_size).itemsize

    def grow(self) -> bool:
        """Reads what was added to the chain of manifests; False: nothing was."""
        known, self.manifest = self.manifest, follow(self.directory, self.manifest)
        return self.manifest is not known

    def segment(self, source: str, number: int) -> SealedSegment:
        """Returns a segment that is sealed."""
        return self.manifest.segments(source)[number]

    def num_rows(self, source: str, segment: int) -> int:
        """Returns the number of rows of a segment: from the manifest alone where they are cut."""
        if self.packing == "concat":
            return num_rows(self.segment(source, segment).num_tokens(self.split), self.seq_len)
        return self._plan_rows(source, segment)

    def chunks(self, source: str, segment: int) -> ChunkTable:
        """Returns how the rows of a segment lie in chunks."""
        return self.layout(source, segment).plan.chunks

    def read_chunk(self, source: str, segment: int, chunk: int) -> LoadedChunk:
        """Decodes the record batches of a chunk and returns its rows.

        Raises:
            ShardError: they cannot be read, and that is not to be passed over.
        """
        return self.layout(source, segment).read(chunk)

    def content_of(self, source: str, segment: int) -> str:
        """Returns a hash of the content of one segment: of what its shards and indices hold."""
        shards = self.segment(source, segment).of(self.split)
        hashes = [f"{shard.blake2b} {shard.index_blake2b}" for shard in shards]
        return hashlib.sha256("\n".join(hashes).encode()).hexdigest()

    def close(self) -> None:
        """Closes the files; reading opens them again."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()
        self.layout.cache_clear()

    def _open(self, source: str, segment: int) -> ChunkLayout:
        store = TokenStore(
            self.directory,
            source,
            segment,
            self.split,
            self.manifest,
            check_sizes=self._check_sizes,
        )
        self._stores[source, segment] = store
        while len(self._stores) > 2 * len(self.manifest.sources) + 2:
            self._stores.popitem(last=False)[1].close()
        if self.packing == "concat":
            return ConcatLayout(
                store,
                self._read_batch,
                seq_len=self.seq_len,
                wanted=self.wanted,
                chunk_batches=self._chunk_batches,
            )
        plan = self._plan(source, segment, store)
        return BestFitLayout(
            store, self._read_batch, seq_len=self.seq_len, wanted=self.wanted, plan=plan
        )

    def _plan(self, source: str, segment: int, store: TokenStore | None = None) -> BestFitPlan:
        def document_ends():
            opened = store or TokenStore(self.directory, source, segment, self.split, self.manifest)
            return map(opened.document_ends, range(opened.num_batches))

        return open_plan(
            self.directory,
            PlanKey(source, segment, self.seq_len, self.content_of(source, segment)),
            batch_tokens=self.manifest.batch_tokens,
            batches=document_ends,
        )

    def _rows_of_plan(self, source: str, segment: int) -> int:
        return self._plan(source, segment).plan.chunks.num_rows


class RowReader:
    """Gathers rows from decoded chunks, of which the latest of each source are kept.

    Not for several threads at once.
    """

    def __init__(
        self, prepared: Prepared, names: Sequence[str], read_chunk: ChunkReader | None = None
    ):
        """Reads from a prepared folder.

        Args:
            prepared: the folder.
            names: the sources by the numbers that the order has for them.
            read_chunk: where chunks come from; None: they are decoded here.
        """
        self._prepared, self._names = prepared, tuple(names)
        self._read_chunk = read_chunk or prepared.read_chunk
        self._loaded: dict[int, OrderedDict[tuple[int, int], LoadedChunk]] = {}
        self._joined: dict[int, tuple[int, JoinedChunks]] = {}  # of each source, with its segment

    def read(self, sources: np.ndarray, segments: np.ndarray, rows: np.ndarray) -> Rows:
        """Reads rows, each named by source, segment and row: int64 [n] each.

        Raises:
            ShardError: a record batch is not as it was written, and that is not to be passed over.
        """
        found: Rows | None = None
        for source, segment, here in group_pairs(sources, segments):
            part = self._read_segment(source, segment, rows[here])
            if len(here) == len(rows):
                return part
            if found is None:
                found = self._empty(len(rows))
            found.put(here, part)
        return found or self._empty(len(rows))

    def _empty(self, count: int) -> Rows:
        wanted = self._prepared.wanted
        return empty_rows(
            count,
            self._prepared.seq_len,
            loss_mask=wanted.counts,
            document_ids=wanted.documents,
        )

    def _read_segment(self, source: int, segment: int, rows: np.ndarray) -> Rows:
        table, wanted = self._prepared.chunks(self._names[source], segment), self._prepared.wanted
        chunks = table.chunks_of(rows)
        return self._joined_chunks(source, segment, chunks, table).read(
            chunks,
            rows - table.row_starts[chunks],
            loss_mask=wanted.counts,
            document_ids=wanted.documents,
        )

    def _joined_chunks(
        self, source: int, segment: int, chunks: np.ndarray, table: ChunkTable
    ) -> JoinedChunks:
        """Returns what joins rows of some chunks, and of those of the segment that are kept beside."""
        known = self._joined.get(source)
        if known is not None and known[0] == segment and known[1].has(chunks):
            return known[1]
        self._joined.pop(source, None)  # before it keeps more in memory than is asked for
        keep = table.chunks_per_window + _SPARE_CHUNKS
        # in the order in which they appear: what belongs to the window before is not read again
        asked = {
            chunk: self._load(source, segment, chunk, keep=keep)
            for chunk in dict.fromkeys(chunks.tolist())
        }
        kept = {chunk: one for (of, chunk), one in self._loaded[source].items() if of == segment}
        joined = JoinedChunks(
            kept | asked,
            num_chunks=len(table.row_starts) - 1,
            width=self._prepared.seq_len + 1,
            end_id=self._prepared.manifest.end_of_document_id,
        )
        if asked.keys() <= kept.keys():
            self._joined[source] = segment, joined
        return joined

    def _load(self, source: int, segment: int, chunk: int, *, keep: int) -> LoadedChunk:
        kept = self._loaded.setdefault(source, OrderedDict())
        found = kept.get((segment, chunk))
        if found is None:
            while len(kept) >= keep:
                kept.popitem(last=False)
            found = self._read_chunk(self._names[source], segment, chunk)
        kept[segment, chunk] = found
        kept.move_to_end((segment, chunk))
        return found


class SplitReader:
    """Reads rows of the first segment of every source, numbered source after source.

    They are cut from the streams, S tokens apart, whatever a run's packing: with a little data they
    are the whole split, and they are there as soon as a folder can be read at all. Use as a context
    manager, or call `close`.
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
            ShardError: it cannot be read.
        """
        self._prepared = Prepared(
            directory,
            split=split,
            seq_len=seq_len,
            document_ids=document_ids,
            read_batch=fetch,
            check_sizes=fetch is None or fetch.when_corrupt == "fail",
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
        """Returns the rows of each source, which follow each other in its stream."""
        ends = self._ends.tolist()
        return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]

    def read(self, rows: np.ndarray) -> Rows:
        """Reads rows 0 <= n < num_rows.

        Raises:
            ShardError: a record batch is not as it was written.
        """
        sources = np.searchsorted(self._ends, rows, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        return self._reader.read(sources, np.zeros_like(rows), rows - starts[sources])

    def close(self) -> None:
        """Closes the files; reading opens them again."""
        self._prepared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_names(manifest: DatasetManifest, data: DataConfig) -> None:
    """Checks that the mixture names sources of the folder only.

    Raises:
        DataError: it names another one.
    """
    known = {source.name for source in manifest.sources}
    if unknown := sorted(data.mixture_names - known):
        raise DataError(
            f"data.weights, data.max_epochs or data.stages name {', '.join(unknown)}: the folder's "
            f"sources are {', '.join(sorted(known))}"
        )


def too_short(what: str, num_tokens: int, seq_len: int) -> ShardError:
    """Returns the error about a stream that holds no row."""
    return ShardError(
        f"{what} has {num_tokens} tokens, fewer than the {seq_len + 1} of one row ({seq_len=}): "
        "prepare more text for it (for validation: raise validation_fraction), or lower seq_len"
    )
