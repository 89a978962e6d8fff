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

Memory: 12 bytes per n-gram of the sets and 8 MiB. Most of the time goes into the words: a bitmap of the
hashes' first bits excludes nearly all n-grams, and a binary search decides the others.
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from ..errors import InputError, ShardError
from ..prepare_config import DecontaminateConfig
from ..sources.lines import json_records
from ..words import some_of

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
        ngrams = ngram_hashes(text, self.ngram_words)
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
        columns = [pa.array(self.hashes_H), pa.array(self.sets_H)]
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
            ngram_hashes(text, config.ngram_words) for text in _item_texts(path, config.fields)
        ]
        if not of_items:
            raise InputError(f"evaluation set {path} holds no items: name another file")
        hashes.append(np.concatenate(of_items))
    # the first of equal hashes is that of the first set
    hashes_H, first = np.unique(np.concatenate(hashes), return_index=True)
    if not len(hashes_H):
        raise InputError(
            f"no item of {some_of(config.evaluation_sets)} has {config.ngram_words} words: "
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
    for place, record in json_records(path):
        yield _item_text(record, fields, f"evaluation set {place}")


def _item_text(record: dict[str, Any], fields: Sequence[str], where: str) -> str:
    if missing := [field for field in fields if field not in record]:
        raise InputError(
            f"{where}: no field {missing[0]!r}; its fields are "
            f"{some_of(map(repr, record), repr(missing[0]))}: set prepare.decontaminate.fields"
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


_BASE = np.uint64(0x9E3779B97F4A7C55)
_KNOWN_WORDS = 2**18  # hashes kept per process
_APOSTROPHES = "'’ʼ＇"
_IN_ASCII = dict.fromkeys(map(ord, "'")) | {
    code: " " for code in range(128) if code != ord("'") and not chr(code).isalnum()
}
_NO_SPACES = re.compile(  # scripts that put no space between words
    "[\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f"  # Burmese
    "\u1780-\u17ff"  # Khmer
    "\u3040-\u30ff"  # Hiragana, Katakana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"  # Han
)


def plain_words(text: str) -> list[str]:
    """Returns the plain words of a text; equal for "Don’t stop" and "DONT--stop"."""
    text = text.lower()
    if text.isascii():  # the same words without an expression
        return text.translate(_IN_ASCII).split()
    for apostrophe in _APOSTROPHES:
        text = text.replace(apostrophe, "")
    return _words().findall(_NO_SPACES.sub(r" \g<0> ", text).replace("_", " "))


def ngram_hashes(text: str, n: int) -> np.ndarray:
    """Returns a hash per n-gram of plain words, the same in every process: uint64 [max(0, W - n + 1)]."""
    words = plain_words(text)
    hashes_W = np.fromiter(map(_hash_of, words), np.uint64, len(words))
    num_ngrams = max(0, len(words) - n + 1)
    found = np.zeros(num_ngrams, dtype=np.uint64)
    for place in range(n):
        found *= _BASE
        found += hashes_W[place : place + num_ngrams]
    return _mixed(found)


@lru_cache(_KNOWN_WORDS)
def _hash_of(word: str) -> int:
    data = word.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _mixed(hashes: np.ndarray) -> np.ndarray:
    """Applies MurmurHash3's finaliser: every input bit reaches every output bit."""
    hashes ^= hashes >> np.uint64(33)
    hashes *= np.uint64(0xFF51AFD7ED558CCD)
    hashes ^= hashes >> np.uint64(33)
    hashes *= np.uint64(0xC4CEB9FE1A85EC53)
    hashes ^= hashes >> np.uint64(33)
    return hashes


@cache
def _words() -> re.Pattern[str]:
    """Returns the expression of a word: letters, digits and, which \\w leaves out, marks."""
    codes = range(2**16)
    marks = "".join(chr(code) for code in codes if unicodedata.category(chr(code))[0] == "M")
    return re.compile(rf"[\w{marks}]+")
