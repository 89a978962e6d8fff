"""Decontamination: drops documents that share n consecutive words with an evaluation item.

1. `build_index` hashes every n-gram of plain words of every item to 64 bits. It sorts the hashes, each
   with the number of its first set, into one file that every process maps.
2. `EvaluationIndex.find` returns the set of a document's first n-gram that is in the index.

n is 13, as for GPT-3 (Brown et al. 2020, arXiv:2005.14165, appendix C). Words are compared in lower
case and without punctuation (`plain_words`). An item is all text of its record, or of the configured
fields, joined in order, so that a question followed by its first answer is found, too. Items of fewer
than n words are ignored, because they would match everywhere.

Two different n-grams have equal 64-bit hashes with probability 2**-64: 10**7 n-grams of evaluation sets
collide with 10**12 of a corpus once.

Cost (measured once, on a busy machine): 12 bytes per n-gram of the sets and 8 MiB; 43 MB/s/core, most
of it for the words. A bitmap of the hashes' first bits excludes nearly all n-grams; a binary search
decides the others.
"""

import io
import json
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import zstandard

from ..arrow_columns import number_column
from ..errors import InputError, ShardError
from ..prepare_config import MAX_NGRAM, DecontaminateConfig

_BITMAP_BITS = 26  # 8 MiB
_HEAD = b"moebius.evaluation_index"
_SCHEMA = pa.schema([("hash", pa.uint64()), ("set", pa.uint32())])


class EvaluationIndex:
    """Holds the n-grams of evaluation sets; `find` is thread-safe.

    Args:
        ngram_words: n.
        sets: the names of the sets' files, without folder and suffix.
        hashes_H: uint64, ascending.
        sets_H: uint32, the number of the first set with the n-gram.
    """

    def __init__(
        self, *, ngram_words: int, sets: Sequence[str], hashes_H: np.ndarray, sets_H: np.ndarray
    ):
        self.ngram_words, self.sets = ngram_words, tuple(sets)
        self.hashes_H, self.sets_H = hashes_H, sets_H
        self._bitmap = np.zeros(2**_BITMAP_BITS // 8, dtype=np.uint8)
        places = hashes_H >> np.uint64(64 - _BITMAP_BITS)
        np.bitwise_or.at(self._bitmap, places >> np.uint64(3), _bit(places))

    def find(self, text: str) -> str | None:
        """Returns the set of a text's first shared n-gram, or None."""
        ngrams = ngram_hashes(plain_words(text), self.ngram_words)
        places = ngrams >> np.uint64(64 - _BITMAP_BITS)
        possible = ngrams[np.flatnonzero(self._bitmap[places >> np.uint64(3)] & _bit(places))]
        if not len(possible):
            return None
        found = np.searchsorted(self.hashes_H, possible)
        found = np.minimum(found, len(self.hashes_H) - 1)
        matches = found[self.hashes_H[found] == possible]
        return self.sets[int(self.sets_H[matches[0]])] if len(matches) else None

    def save(self, file: IO[bytes]) -> None:
        """Writes an Arrow file whose bytes depend only on the sets and n."""
        head = {"ngram_words": self.ngram_words, "sets": self.sets}
        schema = _SCHEMA.with_metadata({_HEAD: json.dumps(head)})
        columns = [number_column(one, one.dtype) for one in (self.hashes_H, self.sets_H)]
        with pa.ipc.new_file(pa.PythonFile(file, mode="w"), schema) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def _bit(places: np.ndarray) -> np.ndarray:
    return np.left_shift(np.uint8(1), (places & np.uint64(7)).astype(np.uint8))


def load_index(path: str | Path) -> EvaluationIndex:
    """Loads a saved index; the arrays are mapped, not copied.

    Raises:
        ShardError: the file is missing or is not an index.
    """
    try:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        head = json.loads((table.schema.metadata or {})[_HEAD])
        return EvaluationIndex(
            ngram_words=head["ngram_words"],
            sets=head["sets"],
            hashes_H=np.from_dlpack(table.column("hash").chunk(0)),
            sets_H=np.from_dlpack(table.column("set").chunk(0)),
        )
    except (OSError, pa.ArrowException, KeyError) as error:
        raise ShardError(
            f"{path} is not an evaluation index ({error}): delete the unfinished folder and prepare again"
        ) from error


def build_index(config: DecontaminateConfig) -> EvaluationIndex:
    """Reads the evaluation sets and collects their n-grams.

    Raises:
        InputError: a set cannot be read, or no item has n words.
    """
    hashes: list[np.ndarray] = []
    for path in config.evaluation_sets:
        of_items = [
            ngram_hashes(plain_words(text), config.ngram_words)
            for text in _item_texts(path, config.fields)
        ]
        if not of_items:
            raise InputError(f"evaluation set {path} holds no items: name another file")
        hashes.append(np.concatenate(of_items))
    # the first of equal hashes is that of the first set
    hashes_H, first = np.unique(np.concatenate(hashes), return_index=True)
    if not len(hashes_H):
        raise InputError(
            f"no item of {', '.join(config.evaluation_sets)} has {config.ngram_words} words: "
            f"lower prepare.decontaminate.ngram_words={config.ngram_words}, or name other sets"
        )
    sets = np.repeat(np.arange(len(hashes), dtype=np.uint32), list(map(len, hashes)))
    names = [Path(path).name.removesuffix(".zst") for path in config.evaluation_sets]
    return EvaluationIndex(
        ngram_words=config.ngram_words,
        sets=[name.removesuffix(".jsonl") for name in names],
        hashes_H=hashes_H,
        sets_H=sets[first],
    )


def _item_texts(path: str, fields: Sequence[str]) -> Iterator[str]:
    """Yields the text of every item of one set."""
    if not path.endswith((".jsonl", ".jsonl.zst")):
        raise InputError(
            f"evaluation set {path} has an unknown suffix: give .jsonl or .jsonl.zst files"
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
            f"evaluation set {path} is not valid zstd ({error}): fetch it again"
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
    """Yields the strings in a JSON value, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from _strings(entry)
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))


_PIECE_CHARS = 2**20  # text processed at once: bounds the memory of a long document
_BASE = 0x9E3779B97F4A7C55  # odd, so that it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 2**64)

# the kinds of a code point, as bits
_IN_WORD, _ALONE, _IGNORED = (np.uint8(1 << bit) for bit in range(3))
_APOSTROPHES = "'’ʼ＇"
_LAST_ASSIGNED = 0x40000  # beyond lie private use and selectors, which separate words
_NO_SPACES = (  # scripts that put no space between words
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x4DBF),  # Han, extension A
    (0x4E00, 0x9FFF),  # Han
    (0xF900, 0xFAFF),  # Han, compatibility
    (0x20000, 0x3FFFF),  # Han, further extensions
)


def plain_words(text: str) -> np.ndarray:
    """Returns a hash per plain word, uint64 [W]; equal for "Don’t stop" and "DONT--stop"."""
    return _joined([_plain_words_of(piece) for piece in _pieces(text.lower())])


def ngram_hashes(hashes_W: np.ndarray, n: int) -> np.ndarray:
    """Returns a hash per n-gram of words, n <= MAX_NGRAM: uint64 [max(0, W - n + 1)]."""
    assert n <= MAX_NGRAM, (n, MAX_NGRAM)
    inverses = _powers()[1]
    pieces = []
    for start in range(0, max(0, len(hashes_W) - n + 1), _PIECE_CHARS):
        prefixes = _prefixes(hashes_W[start : start + _PIECE_CHARS + n - 1])
        ranges = prefixes[n:] - prefixes[:-n]
        ranges *= inverses[: len(ranges)]
        pieces.append(_mixed(ranges))
    return _joined(pieces)


# ---- one piece


def _plain_words_of(lowered: str) -> np.ndarray:
    codes = _codes(lowered)
    kinds = _kinds()[codes]
    ignored = (kinds & _IGNORED) != 0
    if ignored.any():
        codes, kinds = codes[~ignored], kinds[~ignored]
    in_word = (kinds & (_IN_WORD | _ALONE)) != 0
    alone = (kinds & _ALONE) != 0
    starts, stops = _runs(in_word, alone if alone.any() else None)
    return range_hashes(codes, starts, stops)


def _codes(text: str) -> np.ndarray:
    """Returns the code points of a text: uint8 if it is ASCII, else uint32."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def _runs(inside: np.ndarray, alone: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and stop of every run of True; an `alone` element is a run of its own."""
    edges = np.empty(len(inside) + 1, dtype=bool)
    edges[0] = inside[:1].any()
    np.not_equal(inside[1:], inside[:-1], out=edges[1:-1])
    edges[-1] = inside[-1:].any()
    if alone is None:
        bounds = np.flatnonzero(edges)
        return bounds[::2], bounds[1::2]
    begins, ends = edges[:-1] & inside, edges[1:] & inside
    begins |= alone
    ends |= alone
    begins[1:] |= alone[:-1] & inside[1:]
    ends[:-1] |= alone[1:] & inside[:-1]
    return np.flatnonzero(begins), np.flatnonzero(ends) + 1


def range_hashes(values: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Returns a hash of values[start:stop] for every range, independent of its position."""
    prefixes = _prefixes(values)
    return _mixed((prefixes[stops] - prefixes[starts]) * _powers()[1][starts])


def _prefixes(values: np.ndarray) -> np.ndarray:
    """Returns the polynomial of values[:i] at the base for every i, modulo 2**64."""
    prefixes = np.empty(len(values) + 1, dtype=np.uint64)
    prefixes[0] = 0
    np.multiply(values, _powers()[0][: len(values)], out=prefixes[1:], dtype=np.uint64)
    return np.cumsum(prefixes, out=prefixes)


def _mixed(hashes: np.ndarray) -> np.ndarray:
    """Applies MurmurHash3's finaliser: every input bit reaches every output bit."""
    hashes ^= hashes >> np.uint64(33)
    hashes *= np.uint64(0xFF51AFD7ED558CCD)
    hashes ^= hashes >> np.uint64(33)
    hashes *= np.uint64(0xC4CEB9FE1A85EC53)
    hashes ^= hashes >> np.uint64(33)
    return hashes


def _pieces(text: str) -> Iterator[str]:
    """Cuts a long text after blanks, or anywhere if a million characters have none."""
    start = 0
    while len(text) - start > _PIECE_CHARS:
        stop = text.rfind(" ", start, start + _PIECE_CHARS) + 1 or start + _PIECE_CHARS
        yield text[start:stop]
        start = stop
    yield text[start:]


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.uint64), *arrays])


# ---- tables, made when first used


@cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """Returns base**i and base**-i modulo 2**64, for all i in a piece: 2 * 8 MB."""
    length = _PIECE_CHARS + MAX_NGRAM  # n-grams reach n - 1 words beyond their piece
    tables = np.empty((2, length), dtype=np.uint64)
    for table, factor in zip(tables, (_BASE, _INVERSE), strict=True):
        table[0] = 1
        table[1:] = factor
        np.cumprod(table, out=table)
    return tables[0], tables[1]


@cache
def _kinds() -> np.ndarray:
    """Returns the kinds of every code point, uint8: 1.1 MB, made in 0.2 s."""
    kinds = np.zeros(sys.maxunicode + 1, dtype=np.uint8)
    for code in range(_LAST_ASSIGNED):
        if unicodedata.category(chr(code))[0] in "LNM":
            kinds[code] = _IN_WORD
    for first, last in _NO_SPACES:
        scripts = kinds[first : last + 1]
        scripts[(scripts & _IN_WORD) != 0] |= _ALONE
    for character in _APOSTROPHES:
        kinds[ord(character)] = _IGNORED
    return kinds
