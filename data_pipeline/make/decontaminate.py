"""Decontamination: documents that share n words in a row with an evaluation item are left out.

1. `build_index`          once: every n-gram of plain words of every item of the evaluation sets, as
                          a sorted array of 64-bit hashes beside the number of the first item that
                          has it. It is saved as one file, which every process maps.
2. `EvaluationIndex.find` per document, in any process: the first n-gram that is in the index, and
                          the item that it is of.

n is 13, as GPT-3 chose it (Brown et al. 2020, arXiv:2005.14165, appendix C); words are compared in
lower case and without punctuation (`words.plain_words`). An item is all text in its record (or the
fields that are named), joined in the order of the record, so that a question and its first answer
are also found where they are printed one after the other. Items of fewer than n words are not looked
for, as they would be found everywhere.

A hash of 64 bits is taken for the n-gram: two different n-grams have the same one with probability
2**-64, so 10**7 n-grams of evaluation sets meet 10**12 of a corpus once by chance.

Cost (`benchmarks/data_stages.py`, on a busy machine): 12 bytes per n-gram of the sets and 8 MiB; 43
MB/s/core, most of it for the words: a bitmap of the hashes' first bits answers for nearly all
n-grams, a binary search for the others.
"""

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import zstandard

from ..arrow_columns import number_column
from ..errors import InputError, ShardError
from ..prepare_config import DecontaminateConfig
from .words import ngram_hashes, plain_words, spelled_plain_words

_BITMAP_BITS = 26  # 8 MiB
_HEAD = b"moebius.evaluation_index"
_SCHEMA = pa.schema([("hash", pa.uint64()), ("item", pa.uint32())])


@dataclass(frozen=True)
class Contamination:
    """Says which evaluation item a document shares words with."""

    evaluation_set: str  # name of the file, without folder and ending
    item: int  # counted from 0
    words: str  # the shared n-gram, as plain words

    def __str__(self) -> str:
        return f"{self.evaluation_set}, item {self.item}: {self.words}"


class EvaluationIndex:
    """Holds the n-grams of evaluation sets; `find` is safe in any number of threads."""

    def __init__(
        self,
        *,
        ngram_words: int,
        sets: Sequence[tuple[str, int]],
        hashes_H: np.ndarray,
        items_H: np.ndarray,
    ):
        """Takes what `build_index` has made.

        Args:
            ngram_words: n.
            sets: name and number of items of each set; items are counted through all of them.
            hashes_H: uint64, ascending.
            items_H: uint32, the first item that has the n-gram.
        """
        self.ngram_words, self.sets = ngram_words, tuple(sets)
        self.hashes_H, self.items_H = hashes_H, items_H
        self._bitmap = np.zeros(2**_BITMAP_BITS // 8, dtype=np.uint8)
        places = hashes_H >> np.uint64(64 - _BITMAP_BITS)
        np.bitwise_or.at(self._bitmap, places >> np.uint64(3), _bit(places))

    @property
    def num_items(self) -> int:
        """Returns the number of items of all sets."""
        return sum(num_items for _, num_items in self.sets)

    def find(self, text: str) -> Contamination | None:
        """Returns the first n-gram of a text that is in the index, or None."""
        ngrams = ngram_hashes(plain_words(text), self.ngram_words)
        places = ngrams >> np.uint64(64 - _BITMAP_BITS)
        possible = np.flatnonzero(self._bitmap[places >> np.uint64(3)] & _bit(places))
        if not len(possible) or not len(self.hashes_H):
            return None
        found = np.searchsorted(self.hashes_H, ngrams[possible])
        found = np.minimum(found, len(self.hashes_H) - 1)
        matches = np.flatnonzero(self.hashes_H[found] == ngrams[possible])
        if not len(matches):
            return None
        return self._described(
            text, int(possible[matches[0]]), int(self.items_H[found[matches[0]]])
        )

    def _described(self, text: str, word: int, item: int) -> Contamination:
        shared = spelled_plain_words(text)[word : word + self.ngram_words]
        for name, num_items in self.sets:
            if item < num_items:
                return Contamination(name, item, " ".join(shared))
            item -= num_items
        raise AssertionError(f"item {item} is of no set in {self.sets}")

    def save(self, file: IO[bytes]) -> None:
        """Writes an Arrow file; its bytes depend on the sets and n alone."""
        head = {"ngram_words": self.ngram_words, "sets": self.sets}
        schema = _SCHEMA.with_metadata({_HEAD: json.dumps(head)})
        columns = [number_column(one, one.dtype) for one in (self.hashes_H, self.items_H)]
        with pa.ipc.new_file(pa.PythonFile(file, mode="w"), schema) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def _bit(places: np.ndarray) -> np.ndarray:
    return np.left_shift(np.uint8(1), (places & np.uint64(7)).astype(np.uint8))


def load_index(path: str | Path) -> EvaluationIndex:
    """Loads what `EvaluationIndex.save` has written; the arrays are mapped, not copied.

    Raises:
        ShardError: the file is missing or no such index.
    """
    try:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        head = json.loads((table.schema.metadata or {})[_HEAD])
        return EvaluationIndex(
            ngram_words=head["ngram_words"],
            sets=[(name, num_items) for name, num_items in head["sets"]],
            hashes_H=np.from_dlpack(table.column("hash").chunk(0)),
            items_H=np.from_dlpack(table.column("item").chunk(0)),
        )
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ShardError(
            f"{path} is no evaluation index ({error}): delete the unfinished folder and prepare "
            "again"
        ) from error


def build_index(config: DecontaminateConfig) -> EvaluationIndex:
    """Reads the evaluation sets and collects their n-grams.

    Raises:
        InputError: a set cannot be read, or no item has n words.
    """
    sets: list[tuple[str, int]] = []
    hashes: list[np.ndarray] = []
    items: list[np.ndarray] = []
    num_items = 0
    for path in config.evaluation_sets:
        num_before = num_items
        for text in _item_texts(path, config.fields):
            ngrams = ngram_hashes(plain_words(text), config.ngram_words)
            hashes.append(ngrams)
            items.append(np.full(len(ngrams), num_items, dtype=np.uint32))
            num_items += 1
        if num_items == num_before:
            raise InputError(f"evaluation set {path} holds no items: name another file")
        sets.append((_name_of(path), num_items - num_before))
    # the first of equal hashes is that of the first item
    hashes_H, first = np.unique(np.concatenate(hashes), return_index=True)
    if not len(hashes_H):
        raise InputError(
            f"no item of {', '.join(config.evaluation_sets)} has {config.ngram_words} words: "
            f"lower prepare.decontaminate.ngram_words={config.ngram_words}, or name other sets"
        )
    items_H = np.concatenate(items)[first]
    return EvaluationIndex(
        ngram_words=config.ngram_words, sets=sets, hashes_H=hashes_H, items_H=items_H
    )


def _name_of(path: str) -> str:
    name = Path(path).name
    return name.removesuffix(".zst").removesuffix(".jsonl")


def _item_texts(path: str, fields: Sequence[str]) -> Iterator[str]:
    """Yields the text of every item of one set."""
    if not path.endswith((".jsonl", ".jsonl.zst")):
        raise InputError(
            f"evaluation set {path}: its ending is not read; give .jsonl or .jsonl.zst files"
        )
    try:
        with open(path, "rb") as file:
            lines = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
            stream = io.BufferedReader(lines) if path.endswith(".zst") else file
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield _item_text(line, fields, f"evaluation set {path}, line {number}")
    except OSError as error:
        raise InputError(
            f"evaluation set {path}: cannot be read ({error.strerror or error}): check the name"
        ) from error
    except zstandard.ZstdError as error:
        raise InputError(
            f"evaluation set {path}: is not valid zstd ({error}): fetch it again"
        ) from error


def _item_text(line: bytes, fields: Sequence[str], where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON ({error})") from error
    if not isinstance(record, dict):
        raise InputError(
            f"{where}: a JSON {type(record).__name__}; each line must be one JSON object"
        )
    if missing := [field for field in fields if field not in record]:
        raise InputError(
            f"{where}: no field {missing[0]!r}; its fields are {', '.join(map(repr, record))}: "
            "set prepare.decontaminate.fields"
        )
    chosen = [record[field] for field in fields] if fields else list(record.values())
    return "\n".join(_strings(chosen))


def _strings(value: Any) -> Iterator[str]:
    """Yields the strings in a JSON value, in their order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from _strings(entry)
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))
