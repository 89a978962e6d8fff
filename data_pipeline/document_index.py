"""Which document stands where: documents of an era by their place, and by their name.

A document is named by its place, SOURCE/ERA/NUMBER, which is found at once; by its id (or the
beginning of it), by LABEL:ROW (where it says it comes from, and its record there), or by its own
record id. Those are found by reading all record batches, at 100 to 200 M tokens/s (2 shared cores).
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from .errors import DataError
from .manifest import DatasetManifest
from .read.token_store import TokenStore

OnBytes = Callable[[int], None]
"""Told how many more bytes were read."""

_PLACE = re.compile(r"(?P<source>[a-z0-9][a-z0-9_-]*)/(?P<era>\d{1,9})/(?P<number>\d{1,15})")
_HEX = re.compile(r"[0-9a-f]{6,32}")
_ID_BYTES = 16
_KEPT_BATCHES = 32
_KEPT_STORES = 16
_MOST_NAMED = 5  # of several documents that a name fits


@dataclass(frozen=True)
class DocumentRecord:
    """Says what a document is and where its tokens lie."""

    source: str
    era: int
    number: int  # among the documents of its era and split
    doc_id: str  # hex
    label: str  # where it says it comes from
    source_row: int  # its record in the input split
    record_id: str  # its own name for itself; "": it has none
    input: str  # URL and range of the input split
    first_token: int  # of the era's stream
    num_tokens: int  # the end included

    @property
    def place(self) -> str:
        """Returns the name by which it is found at once."""
        return f"{self.source}/{self.era}/{self.number}"

    @property
    def end_token(self) -> int:
        """Returns the place after its last token in the era's stream."""
        return self.first_token + self.num_tokens

    def as_json(self) -> dict[str, Any]:
        """Returns it as values of JSON."""
        return {"place": self.place} | asdict(self)


class DocumentIndex:
    """Finds the documents of one split of a prepared folder."""

    def __init__(self, directory: str, manifest: Callable[[], DatasetManifest], split: str):
        """Takes what returns the folder's manifest, which may grow."""
        self._directory, self._manifest, self._split = directory, manifest, split
        self._stores: OrderedDict[tuple[str, int], TokenStore] = OrderedDict()
        self._batches: OrderedDict[tuple[str, int, int], pa.RecordBatch] = OrderedDict()

    def between(self, source: str, era: int, begin: int, end: int) -> list[DocumentRecord]:
        """Returns the documents of which tokens lie in a stretch of an era's stream, in order."""
        store = self._store(source, era)
        first = int(np.searchsorted(store.batch_starts, begin, side="right")) - 1
        last = int(np.searchsorted(store.batch_starts, end, side="left"))
        found = []
        for batch in range(first, min(last, store.num_batches)):
            ends = _ends(self._documents(source, era, batch)) + int(store.batch_starts[batch])
            starts = np.concatenate([store.batch_starts[batch : batch + 1], ends[:-1]])
            for row in np.flatnonzero((starts < end) & (ends > begin)).tolist():
                found.append(self._record(source, era, batch, row))
        return found

    def find(self, name: str, on_bytes: OnBytes) -> DocumentRecord:
        """Returns the document that a name means.

        Raises:
            DataError: there is none, or several.
        """
        if match := _PLACE.fullmatch(name):
            return self._at(match["source"], int(match["era"]), int(match["number"]))
        found: list[DocumentRecord] = []
        for record in self._scan(name, on_bytes):
            found.append(record)
            if record.doc_id == name.lower():  # of one id there is one document
                return record
        if not found:
            raise DataError(self._held_out(name) or self._unknown(name))
        if len(found) > 1:
            raise DataError(_several(name, found))
        return found[0]

    def num_bytes(self) -> int:
        """Returns how many bytes a search reads."""
        return sum(entry.num_bytes for entry in self._manifest().of(self._split))

    def close(self) -> None:
        """Closes the files."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()
        self._batches.clear()

    def _at(self, source: str, era: int, number: int) -> DocumentRecord:
        store = self._store(source, era)
        total = int(store.document_starts[-1])
        if number >= total:
            raise DataError(
                f"era {era} of source {source!r} has {total} {self._split} documents, numbered "
                f"from 0: none is {number}"
            )
        batch = int(np.searchsorted(store.document_starts, number, side="right")) - 1
        return self._record(source, era, batch, number - int(store.document_starts[batch]))

    def _scan(self, name: str, on_bytes: OnBytes) -> Iterator[DocumentRecord]:
        manifest = self._manifest()
        for source in manifest.sources:
            for era in manifest.eras(source.name):
                store = self._store(source.name, era.number)
                num_bytes = sum(entry.num_bytes for entry in store.entries)
                for batch in range(store.num_batches):
                    documents = store.read_documents(batch)
                    for row in np.flatnonzero(_matches(documents, name)).tolist():
                        yield self._record(source.name, era.number, batch, row)
                    on_bytes(num_bytes // store.num_batches)

    def _store(self, source: str, era: int) -> TokenStore:
        key = source, era
        if key not in self._stores:
            store = TokenStore(self._directory, source, era, self._split, self._manifest())
            self._stores[key] = store
            while len(self._stores) > _KEPT_STORES:
                self._stores.popitem(last=False)[1].close()
        self._stores.move_to_end(key)
        return self._stores[key]

    def _documents(self, source: str, era: int, batch: int) -> pa.RecordBatch:
        key = source, era, batch
        if key not in self._batches:
            self._batches[key] = self._store(source, era).read_documents(batch)
            while len(self._batches) > _KEPT_BATCHES:
                self._batches.popitem(last=False)
        self._batches.move_to_end(key)
        return self._batches[key]

    def _record(self, source: str, era: int, batch: int, row: int) -> DocumentRecord:
        store, documents = self._store(source, era), self._documents(source, era, batch)
        ends = _ends(documents)
        begin = int(ends[row - 1]) if row else 0
        names = documents.schema.names
        return DocumentRecord(
            source=source,
            era=era,
            number=int(store.document_starts[batch]) + row,
            doc_id=documents.column("doc_id")[row].as_py().hex(),
            label=documents.column("source")[row].as_py(),
            source_row=documents.column("source_row")[row].as_py(),
            record_id=documents.column("record_id")[row].as_py() if "record_id" in names else "",
            input=store.input_of(batch),
            first_token=int(store.batch_starts[batch]) + begin,
            num_tokens=int(ends[row]) - begin,
        )

    def _held_out(self, name: str) -> str:
        """Says that a document is in validation; "": it is not."""
        if self._split == "validation":
            return ""
        held_out = DocumentIndex(self._directory, self._manifest, "validation")
        found = next(held_out._scan(name, lambda num_bytes: None), None)
        held_out.close()
        if found is None:
            return ""
        return (
            f"document {name!r} ({found.doc_id}) is held out for validation (document "
            f"{found.number} of era {found.era} of source {found.source!r}): no step trains on it"
        )

    def _unknown(self, name: str) -> str:
        manifest = self._manifest()
        so_far = "" if manifest.complete else " so far; the folder is still growing"
        return (
            f"no document {name!r} among the {manifest.num_documents(self._split):,} of the "
            f"{self._split} split of {self._directory}{so_far}. A document is named by its id (6 "
            "digits or more of it), LABEL:ROW, its record id, or SOURCE/ERA/NUMBER; one that was "
            "dropped is nowhere (`moebius data stats` counts them)"
        )


def _several(name: str, found: list[DocumentRecord]) -> str:
    named = ", ".join(f"{one.place} ({one.doc_id})" for one in found[:_MOST_NAMED])
    more = f" and {len(found) - _MOST_NAMED:,} more" if len(found) > _MOST_NAMED else ""
    return f"{name!r} names {len(found):,} documents, {named}{more}: give more of the id"


def _ends(documents: pa.RecordBatch) -> np.ndarray:
    """Returns where each document ends in its record batch, int64."""
    return documents.column("tokens").offsets.to_numpy()[1:].astype(np.int64)


def _matches(documents: pa.RecordBatch, name: str) -> np.ndarray:
    """Returns which documents a name could mean, bool."""
    matches = np.zeros(documents.num_rows, dtype=bool)
    if _HEX.fullmatch(name.lower()):
        matches |= _has_id(documents, name.lower())
    label, colon, row = name.rpartition(":")
    if colon and row.isdecimal() and int(row) < 2**64:
        of_row = documents.column("source_row").to_numpy() == int(row)
        for place in np.flatnonzero(of_row).tolist():
            matches[place] |= documents.column("source")[place].as_py() == label
    if "record_id" in documents.schema.names:
        record_ids = documents.column("record_id").to_numpy(zero_copy_only=False)
        matches |= np.asarray(record_ids == name, dtype=bool)
    return matches


def _has_id(documents: pa.RecordBatch, digits: str) -> np.ndarray:
    """Returns which documents' ids begin with these hex digits."""
    column = documents.column("doc_id")
    data = np.frombuffer(column.buffers()[1], dtype=np.uint8)[: _ID_BYTES * len(column)]
    ids = data.reshape(-1, _ID_BYTES)
    whole = np.frombuffer(bytes.fromhex(digits[: len(digits) // 2 * 2]), dtype=np.uint8)
    same = (ids[:, : len(whole)] == whole).all(axis=1)
    if len(digits) % 2:
        same &= ids[:, len(whole)] >> 4 == int(digits[-1], 16)
    return same
