"""A run's order over a prepared folder: global sample numbers in, rows out.

`OrderedSamples` tracks how far the folder has grown, and describes positions for checkpoints. `Loader`
divides its samples into steps and ranks; `moebius data peek` shows them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..data_config import DataConfig
from ..errors import DataError, PreparationFailedError
from ..manifest import given_up
from .chunks import TokenRows
from .corruption import BatchFetcher
from .mixture import SourceMixture, WeightStage, mixed
from .order import ORDER_VERSION, EndOfSourceError, RowRefs, SampleOrder, SourceRows, group_pairs
from .packing import PLAN_VERSION
from .rows import Prepared, RowReader, check_names, too_short

_DIGEST_BITS = 31


class OrderedSamples:
    """Joins order and rows: global sample numbers in, rows out. Not thread-safe.

    Raises:
        DataError: the folder cannot be read as configured.
    """

    def __init__(self, data: DataConfig, fetch: BatchFetcher):
        self._data = data
        self.prepared = Prepared(
            data.directory,
            seq_len=data.seq_len,
            packing=data.packing,
            document_ids=data.gives_document_ids,
            fetch=fetch,
        )
        check_names(self.prepared.manifest, data)
        names = [source.name for source in self.prepared.manifest.sources]
        self._weights = {name: data.weights.get(name, 1.0) for name in names}
        self._max_epochs = {name: data.max_epochs.get(name, 0) for name in names}
        self.mixture = SourceMixture(names, _stages(data, self._weights), seed=data.seed)
        self._counted = dict.fromkeys(names, 0)
        self.order = SampleOrder(
            self.mixture,
            {name: self._source_rows(name) for name in names},
            self.prepared.chunks,
            seed=data.seed,
        )
        self._reader = RowReader(self.prepared, self.mixture.names)
        self._content: dict[tuple[int, int], int] = {}
        self._count_what_is_cheap()
        self._check_lengths()

    def prepare(self, start: int, count: int) -> str:
        """Prepares to return the samples start, …, start + count − 1.

        Returns:
            "" if they are available, else what to wait for.

        Raises:
            DataError: the sources are used up before.
            PreparationFailedError: the preparation that should make them has failed.
        """
        while True:
            try:
                self.order.check(start, count)
                return ""
            except EndOfSourceError as missing:
                if self._count_more(missing.source):
                    continue
                if not missing.growing:
                    raise DataError(self._used_up(missing, start + count)) from None
                segment = f"segment {self._counted[missing.source]} of source {missing.source!r}"
                self._check_growth(missing.source, segment)
                return f"{segment} is not sealed yet"

    def await_segments(self, position: Mapping[str, Any]) -> str:
        """Counts sealed segments until the folder has all that a position has read.

        Some are missing if the folder was deleted and is being prepared again during a run.

        Returns:
            "" if they are available, else what to wait for.

        Raises:
            PreparationFailedError: the preparation that should make them has failed.
        """
        for name, read in position["spec"].get("segments", {}).items():
            if name not in self._counted:
                continue
            while not self.prepared.manifest.complete and (
                read["all"] or self._num_sealed(name) < read["number"]
            ):
                if not self._count_more(name):
                    segment = f"segment {self._num_sealed(name)} of source {name!r}"
                    self._check_growth(name, segment)
                    return f"{segment}, which the checkpoint has read, is not sealed yet"
        return ""

    def _check_growth(self, source: str, segment: str) -> None:
        """Raises PreparationFailedError if a missing segment will never be sealed."""
        reason = given_up(self.prepared.directory)
        if reason is not None and not self._count_more(source):  # sealed just before the end
            raise PreparationFailedError(
                f"{segment} of {self.prepared.directory} will not come: its preparation has failed "
                f"({reason}). All sealed data is used up: fix the cause and run the same command again"
            )

    def read(self, refs: RowRefs) -> TokenRows:
        """Reads rows by their names.

        Raises:
            ShardError: a record batch is damaged.
        """
        return self._reader.read(refs.sources, refs.segments, refs.rows)

    def digest(self, first: int, refs: RowRefs) -> int:
        """Returns the sum, modulo 2**31, of a hash per row of sample, name and segment content."""
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

        It omits the folder's path, so data may be moved or copied. It lists only the segments reached,
        so it stays valid while a folder grows.
        """
        reached = {
            name: self._segments_reached(name, int(count))
            for name, count in zip(
                self.mixture.names, self.mixture.rows_before(samples), strict=True
            )
        }
        return _signed(self._spec(reached))

    def differences(self, position: Mapping[str, Any]) -> list[str]:
        """Returns how a saved position differs from this order, one line per difference."""
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
        """Checks that the sources last for `samples` samples, as far as is known.

        Raises:
            DataError: a source would exceed its `max_epochs`.
        """
        counts = self.mixture.rows_before(samples)
        for name, count in zip(self.mixture.names, counts.tolist(), strict=True):
            rows = self._source_rows(name)
            known = sum(rows.segment_rows) * rows.max_epochs
            if rows.complete and rows.max_epochs and count > known:
                missing = EndOfSourceError(name, known, known, growing=False)
                raise DataError(self._used_up(missing, samples))

    @property
    def is_complete(self) -> bool:
        """Returns whether all data is there, so that its rows can be counted."""
        return self.prepared.manifest.complete

    def passes(self, samples: int) -> tuple[float, str, int] | None:
        """Returns how often the first samples read the source that they repeat most; its name and tokens.

        None while the folder grows.
        """
        if not self.is_complete:
            return None
        counts = zip(self.mixture.names, self.mixture.rows_before(samples).tolist(), strict=True)
        tokens = {name: self._num_tokens(name) for name in self.mixture.names}
        return max(
            (count * self._data.seq_len / tokens[name], name, tokens[name])
            for name, count in counts
        )

    def num_rows(self) -> int:
        """Counts the rows of all sources, which may make their plans of rows."""
        for name in self._counted:
            while self._count_more(name):
                pass
        return sum(sum(self._source_rows(name).segment_rows) for name in self._counted)

    def _num_sealed(self, name: str) -> int:
        return len(self.prepared.manifest.segments(name))

    def _num_tokens(self, name: str) -> int:
        segments = self.prepared.manifest.segments(name)
        return sum(segment.num_tokens("train") for segment in segments)

    def _source_rows(self, name: str) -> SourceRows:
        counted = self._counted[name]
        rows = tuple(self.prepared.num_rows(name, segment) for segment in range(counted))
        complete = self.prepared.manifest.complete and counted == self._num_sealed(name)
        return SourceRows(rows, complete, self._max_epochs[name])

    def _count_what_is_cheap(self) -> None:
        """Counts the rows of all segments if the manifest alone determines them."""
        if self._data.packing == "concat":
            for name in self._counted:
                self._counted[name] = self._num_sealed(name)
            self.order.extend({name: self._source_rows(name) for name in self._counted})

    def _count_more(self, name: str) -> bool:
        """Counts the rows of a source's next segment; False if none is sealed yet."""
        if self._counted[name] < self._num_sealed(name):
            self._counted[name] += 1  # may make its plan of rows
            self.order.extend({name: self._source_rows(name)})
            return True
        if self.prepared.manifest.complete or not self.prepared.grow():
            return False
        self._count_what_is_cheap()
        # all sources: a folder completes without a new segment of each
        self.order.extend({name: self._source_rows(name) for name in self._counted})
        return True

    def _check_lengths(self) -> None:
        manifest = self.prepared.manifest
        for source in manifest.sources if manifest.complete else ():
            tokens = self._num_tokens(source.name)
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
            return f"source {missing.source!r} has no row of {self._data.seq_len + 1} tokens"
        return (
            f"source {missing.source!r} has {rows} rows and max_epochs="
            f"{self._max_epochs[missing.source]}: they are used up before sample {samples}. Train "
            "for fewer steps, raise its max_epochs, or lower its weight (data.stages can end it)"
        )

    def _content_of(self, source: int, segment: int) -> int:
        key = source, segment
        if key not in self._content:
            name = self.mixture.names[source]
            described = f"{name} {segment} {self.prepared.content_of(name, segment)}".encode()
            self._content[key] = int.from_bytes(hashlib.sha256(described).digest()[:8], "big")
        return self._content[key]

    def _segments_reached(self, name: str, count: int) -> tuple[int, bool]:
        """Returns how many segments a source's first `count` rows span, and whether it wrapped."""
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
            sealed = self._num_sealed(name)
            there = sealed if all_of_them else min(number, sealed)
            contents = "\n".join(self.prepared.content_of(name, one) for one in range(there))
            sha256 = hashlib.sha256(contents.encode()).hexdigest()
            segments[name] = {"number": there, "all": all_of_them, "sha256": sha256}
        return {
            "order_version": ORDER_VERSION,
            "seed": data.seed,
            "seq_len": data.seq_len,
            "packing": "concat" if data.packing == "concat" else f"{data.packing} {PLAN_VERSION}",
            "weights": self._weights,
            "stages": [stage.model_dump(mode="json") for stage in data.stages],
            "max_epochs": self._max_epochs,
            "tokenizer_sha256": manifest.header.tokenizer.sha256,
            "batch_tokens": manifest.header.batch_tokens,
            "segments": segments,
        }


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the entries of nested dicts under dotted names."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _signed(spec: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(spec, sort_keys=True)
    return {"spec": json.loads(text), "spec_hash": hashlib.sha256(text.encode()).hexdigest()}


def _stages(data: DataConfig, weights: Mapping[str, float]) -> list[WeightStage]:
    """Returns the mixture's stages, in rows; `weights` apply before the first."""
    later = [
        WeightStage(-(-stage.at_tokens // data.seq_len), stage.weights) for stage in data.stages
    ]
    if later and later[0].start_row == 0:
        return later
    return [WeightStage(0, weights), *later]
