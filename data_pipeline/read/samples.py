"""Global sample numbers in, rows out: the order of a run over a prepared folder.

It knows how far the folder has grown, what a position in the data is (for a checkpoint, and to say
what differs when a run is continued on other data), and which rows stand in for lost ones. `Loader`
cuts steps and ranks out of it; the command line asks it what was in a step.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..data_config import DataConfig
from ..errors import DataError, PreparationFailedError
from ..growth import given_up
from .chunks import LoadedChunk
from .corruption import BatchFetcher, SkipList, SkippedRow
from .gather import Rows
from .mixture import Mixture, WeightStage, mixed
from .order import ORDER_VERSION, EndOfSourceError, RowRefs, SampleOrder, SourceRows, group_pairs
from .packing import PLAN_VERSION
from .rows import ChunkReader, Prepared, RowReader, check_names, too_short

_DIGEST_BITS = 31
_ORDER_SAMPLES = 4096  # ordered at a time: numpy takes hardly longer for as many than for one


class ChunkServer(Protocol):
    """Gives the rows of chunks that another process has decoded."""

    def read(self, source: str, segment: int, chunk: int, *, alone: ChunkReader) -> LoadedChunk:
        """Returns the rows of a chunk; `alone` decodes it here, where the server does not."""
        ...


class OrderedSamples:
    """Joins order and rows: global sample numbers in, rows out. Not for several threads at once.

    Raises:
        DataError: the folder cannot be read as the configuration says.
    """

    def __init__(self, data: DataConfig, fetch: BatchFetcher, served: ChunkServer | None = None):
        """Opens the folder.

        Args:
            data: which, and how it is read.
            fetch: reads record batches.
            served: gives the chunks' rows; None: they are decoded here.
        """
        self._data = data
        self.prepared = Prepared(
            data.directory,
            seq_len=data.seq_len,
            packing=data.packing,
            document_ids=data.gives_document_ids,
            read_batch=fetch,
            check_sizes=data.when_corrupt == "fail",
        )
        check_names(self.prepared.manifest, data)
        names = [source.name for source in self.prepared.manifest.sources]
        self._weights = {name: data.weights.get(name, 1.0) for name in names}
        self._max_epochs = {name: data.max_epochs.get(name, 0) for name in names}
        self.mixture = Mixture(names, _stages(data, self._weights), seed=data.seed)
        self._counted = dict.fromkeys(names, 0)
        self.order = SampleOrder(
            self.mixture,
            {name: self._source_rows(name) for name in names},
            self.prepared.chunks,
            seed=data.seed,
        )
        read_chunk = self.prepared.read_chunk
        if served is not None:
            read_chunk = partial(served.read, alone=read_chunk)
        self._reader = RowReader(self.prepared, self.mixture.names, read_chunk)
        self._content: dict[tuple[int, int], int] = {}
        self._ordered: tuple[int, RowRefs | None] = (0, None)
        self._checked_until = 0
        self._count_what_is_cheap()
        self._check_lengths()

    def prepare(self, start: int, count: int) -> str:
        """Makes ready to give the samples start, …, start + count − 1.

        Returns:
            ""; or for what has to be waited.

        Raises:
            DataError: there are not so many, and never will be.
            PreparationFailedError: those that are missing will never be made.
        """
        while start + count > self._checked_until:
            try:
                self._check(start, count)
            except EndOfSourceError as missing:
                if self._count_more(missing.source):
                    continue
                if not missing.growing:
                    raise DataError(self._used_up(missing, start + count)) from None
                segment = f"segment {self._counted[missing.source]} of source {missing.source!r}"
                self._check_growth(missing.source, segment)
                return f"{segment} is not sealed yet"
        return ""

    def await_segments(self, position: Mapping[str, Any]) -> str:
        """Takes in what a growing folder has sealed, until it has the segments that a position has read.

        They are missing where the folder was deleted and is prepared again under a run.

        Returns:
            ""; or for what has to be waited.

        Raises:
            PreparationFailedError: what is missing will never be made.
        """
        for name, read in position["spec"].get("segments", {}).items():
            if name not in self._counted:
                continue
            while not self.prepared.manifest.complete and (
                read["all"] or len(self.prepared.manifest.segments(name)) < read["number"]
            ):
                if not self._count_more(name):
                    segment = (
                        f"segment {len(self.prepared.manifest.segments(name))} of source {name!r}"
                    )
                    self._check_growth(name, segment)
                    return f"{segment}, which the checkpoint has read, is not sealed yet"
        return ""

    def _check_growth(self, source: str, segment: str) -> None:
        """Checks that a segment which is missing may still come."""
        reason = given_up(self.prepared.directory)
        if reason is not None and not self._count_more(source):  # sealed just before the end
            raise PreparationFailedError(
                f"{segment} of {self.prepared.directory} will not come: its preparation has failed "
                f"({reason}). What is sealed is used up: mend the cause, and run the same command "
                "again"
            )

    def _check(self, start: int, count: int) -> None:
        """Checks that samples can be given, and many more at once where they are there."""
        for many in _ever_fewer(count):
            try:
                self.order.check(start, many)
            except EndOfSourceError:
                if many == count:
                    raise
            else:
                self._checked_until = start + many
                return

    def refs_at(self, start: int, count: int) -> RowRefs:
        """Returns the rows of samples that were made ready, from a stretch that is ordered once."""
        first, refs = self._ordered
        if refs is None or not first <= start <= start + count <= first + len(refs):
            refs = self._ordered_at(start, count)
            self._ordered = first, refs = start, refs
        return refs[slice(start - first, start - first + count)]

    def _ordered_at(self, start: int, count: int) -> RowRefs:
        """Orders samples, and as many more at once as are there."""
        there = self._checked_until - start
        many = next((many for many in _ever_fewer(count) if many <= there), count)
        return self.order.refs_at(start, many)

    def chunks_at(self, start: int, count: int) -> Iterator[tuple[str, int, int]]:
        """Yields the chunks of samples that were made ready, each by source, segment and number."""
        refs = self.refs_at(start, count)
        for source, segment, here in group_pairs(refs.sources, refs.segments):
            name = self.mixture.names[source]
            chunks = self.prepared.chunks(name, segment).chunks_of(refs.rows[here])
            for chunk in dict.fromkeys(chunks.tolist()):
                yield name, segment, chunk

    def read(self, first: int, refs: RowRefs, skipped: SkipList) -> tuple[RowRefs, Rows]:
        """Reads rows, and others for those that are lost where that was asked for.

        Returns:
            What was read, and its rows.
        """
        refs = self.with_recorded(refs, skipped)
        rows = self._reader.read(refs.sources, refs.segments, refs.rows)
        for place in np.flatnonzero(rows.damaged).tolist():
            refs, row = self._replaced(refs, place, rows)
            skipped.add_row(
                SkippedRow(
                    self.mixture.names[int(refs.sources[place])],
                    int(refs.epochs[place]),
                    int(refs.segments[place]),
                    row,
                    first + place,
                    int(refs.rows[place]),
                )
            )
        return refs, rows

    def digest(self, first: int, refs: RowRefs) -> int:
        """Adds up a number per row, modulo 2**31: of its sample, its name, and its segment's content."""
        contents = np.zeros(len(refs), dtype=np.uint64)
        for source, segment, here in group_pairs(refs.sources, refs.segments):
            contents[here] = self._content_of(source, segment)
        samples = np.arange(first, first + len(refs), dtype=np.uint64)
        words = contents
        for column in (refs.rows, refs.epochs, samples):
            words = mixed(words + column.astype(np.uint64))
        return int((words >> np.uint64(64 - _DIGEST_BITS)).sum()) % 2**_DIGEST_BITS

    def position(self, samples: int) -> dict[str, Any]:
        """Returns what fixes the order of the first `samples` samples: a spec and its hash.

        The folder's path is not in it: data may be moved or copied. Of a source it names the segments
        that were reached, so it holds however much is added to a folder that grows.
        """
        reached = {
            name: self._segments_reached(name, int(count))
            for name, count in zip(
                self.mixture.names, self.mixture.rows_before(samples), strict=True
            )
        }
        return _signed(self._spec(reached))

    def differences(self, position: Mapping[str, Any]) -> list[str]:
        """Returns what of a saved position does not hold here, each as one line."""
        saved = position["spec"]
        reached = {
            name: (segments["number"], segments["all"])
            for name, segments in saved.get("segments", {}).items()
        }
        known = {name: reached.get(name, (0, False)) for name in self.mixture.names}
        now = self._spec(known)
        before, after = dict(_flat(saved)), dict(_flat(_signed(now)["spec"]))
        return [
            f"{key}: saved {before.get(key)!r}, now {after.get(key)!r}"
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
        ]

    def check_enough(self, samples: int) -> None:
        """Checks that no source is read more often than it may be, as far as that is known.

        Raises:
            DataError: one is.
        """
        counts = self.mixture.rows_before(samples)
        for name, count in zip(self.mixture.names, counts.tolist(), strict=True):
            rows = self._source_rows(name)
            known = sum(rows.segment_rows) * rows.max_epochs
            if rows.complete and rows.max_epochs and count > known:
                missing = EndOfSourceError(name, known, known, growing=False)
                raise DataError(self._used_up(missing, samples))

    def close(self) -> None:
        """Closes the files of the prepared data; reading opens them again."""
        self.prepared.close()

    def _source_rows(self, name: str) -> SourceRows:
        segments = self.prepared.manifest.segments(name)
        counted = self._counted[name]
        rows = tuple(self.prepared.num_rows(name, segment) for segment in range(counted))
        complete = self.prepared.manifest.complete and counted == len(segments)
        return SourceRows(rows, complete, self._max_epochs[name])

    def _count_what_is_cheap(self) -> None:
        """Counts the rows of all segments where the manifest alone tells them."""
        if self._data.packing == "concat":
            for name in self._counted:
                self._counted[name] = len(self.prepared.manifest.segments(name))
            self.order.extend({name: self._source_rows(name) for name in self._counted})

    def _count_more(self, name: str) -> bool:
        """Counts the rows of another segment of a source; False: there is none yet."""
        if self._counted[name] < len(self.prepared.manifest.segments(name)):
            self._counted[name] += 1  # its plan of rows may have to be made
            self.order.extend({name: self._source_rows(name)})
            return True
        if not self.grow():
            return False
        self.order.extend({name: self._source_rows(name)})
        return True

    def grow(self) -> bool:
        """Takes in what was sealed meanwhile; False: nothing was."""
        if self.prepared.manifest.complete or not self.prepared.grow():
            return False
        self._count_what_is_cheap()
        # all sources: whether one is complete is told by the folder, with or without a new segment
        self.order.extend({name: self._source_rows(name) for name in self._counted})
        return True

    def _check_lengths(self) -> None:
        manifest = self.prepared.manifest
        for source in manifest.sources if manifest.complete else ():
            tokens = sum(segment.num_tokens("train") for segment in manifest.segments(source.name))
            rows = sum(self._source_rows(source.name).segment_rows)
            if tokens == 0 or (self._data.packing == "concat" and rows == 0):
                raise too_short(
                    f"source {source.name!r} of {self.prepared.directory}",
                    tokens,
                    self._data.seq_len,
                )

    def _used_up(self, missing: EndOfSourceError, samples: int) -> str:
        rows = sum(self._source_rows(missing.source).segment_rows)
        if not rows:
            return f"source {missing.source!r} has not one row of {self._data.seq_len + 1} tokens"
        return (
            f"source {missing.source!r} has {rows} rows and max_epochs="
            f"{self._max_epochs[missing.source]}: they are used up before sample {samples}. Train "
            "for fewer steps, raise its max_epochs, or give it less weight (data.stages can end it)"
        )

    def _content_of(self, source: int, segment: int) -> int:
        key = source, segment
        if key not in self._content:
            name = self.mixture.names[source]
            described = f"{name} {segment} {self.prepared.content_of(name, segment)}".encode()
            self._content[key] = int.from_bytes(hashlib.sha256(described).digest()[:8], "big")
        return self._content[key]

    def with_recorded(self, refs: RowRefs, skipped: SkipList) -> RowRefs:
        """Puts the rows in place that were chosen before for those that were lost."""
        if not skipped.rows:
            return refs
        rows = refs.rows.copy()
        columns = (refs.sources, refs.epochs, refs.segments, refs.rows)
        keys = zip(*(column.tolist() for column in columns), strict=True)
        for place, (source, *rest) in enumerate(keys):
            found = skipped.rows.get((self.mixture.names[source], *rest))
            if found is not None:
                rows[place] = found.replaced_by
        return refs.with_rows(rows)

    def _replaced(self, refs: RowRefs, place: int, rows: Rows) -> tuple[RowRefs, int]:
        """Reads another row in place of a lost one: from half a window on, the first whole one.

        Returns:
            What was read, and the row that was lost.
        """
        source, epoch, segment = (
            int(column[place]) for column in (refs.sources, refs.epochs, refs.segments)
        )
        lost = int(refs.rows[place])
        order = self.order.segment_order(source, epoch, segment)
        for row in order.others_of_window(int(refs.positions[place])).tolist():
            one = self._reader.read(np.array([source]), np.array([segment]), np.array([row]))
            if not one.damaged[0]:
                rows.put(np.array([place]), one)
                changed = refs.rows.copy()
                changed[place] = row
                return refs.with_rows(changed), lost
        raise DataError(
            f"all rows of a window of segment {segment} of source {self.mixture.names[source]!r} are lost: "
            "restore the folder from a copy"
        )

    def _segments_reached(self, name: str, count: int) -> tuple[int, bool]:
        """Returns how many segments the first rows of a source lie in, and whether it began anew."""
        rows = self._source_rows(name)
        total = sum(rows.segment_rows)
        if count > total:
            return len(rows.segment_rows), True
        ends = np.cumsum(rows.segment_rows)
        return (int(np.searchsorted(ends, count, side="left")) + 1 if count else 0), False

    def _spec(self, reached: Mapping[str, tuple[int, bool]]) -> dict[str, Any]:
        data, manifest = self._data, self.prepared.manifest
        segments = {}
        for name, (number, all_of_them) in reached.items():
            there = min(number, len(manifest.segments(name)))
            if all_of_them:
                there = len(manifest.segments(name))
            contents = "\n".join(self.prepared.content_of(name, one) for one in range(there))
            sha256 = hashlib.sha256(contents.encode()).hexdigest()
            segments[name] = {"number": there, "all": all_of_them, "sha256": sha256}
        return {
            "order_version": ORDER_VERSION,
            "seed": data.seed,
            "seq_len": data.seq_len,
            "packing": data.packing
            if data.packing == "concat"
            else f"{data.packing} {PLAN_VERSION}",
            "weights": self._weights,
            "stages": [stage.model_dump(mode="json") for stage in data.stages],
            "max_epochs": self._max_epochs,
            "tokenizer_sha256": manifest.tokenizer_sha256,
            "batch_tokens": manifest.batch_tokens,
            "segments": segments,
        }


def _ever_fewer(count: int) -> Iterator[int]:
    """Yields how many samples to try to order at once, so many at least."""
    many = _ORDER_SAMPLES
    while many > count:
        yield many
        many //= 2
    yield count


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the entries of dicts in dicts under dotted names."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _signed(spec: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(spec, sort_keys=True)
    return {"spec": json.loads(text), "spec_hash": hashlib.sha256(text.encode()).hexdigest()}


def _stages(data: DataConfig, weights: Mapping[str, float]) -> list[WeightStage]:
    """Returns the stages of the mixture in rows; before the first the sources' own weights hold."""
    later = [
        WeightStage(-(-stage.at_tokens // data.seq_len), stage.weights) for stage in data.stages
    ]
    if later and later[0].start_row == 0:
        return later
    return [WeightStage(0, weights), *later]
