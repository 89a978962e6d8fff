"""Words of a text as arrays of 64-bit hashes: what filters, near duplicates and decontamination
compare.

There are two kinds of words:

* `blank_words`: what stands between blank space, as it is written. The filters' words.
* `plain_words`: runs of letters, digits and marks in lower case, without apostrophes; everything
  else separates. Characters of scripts that put no space between words (Han, Kana, Thai, Lao, Khmer,
  Burmese) are a word each. What documents are compared by: dashes, quotes and line breaks differ
  between copies of a text.

No Python object is made per word. A text is an array of code points; the polynomial hash of every
prefix is one cumulative sum modulo 2**64, and that of any range of characters, or of any n words in
a row, is the difference of two of them, divided by a power (the base is odd, so it has an inverse).
Hashes are the same in every process and on every machine.

Cost (`benchmarks/data_stages.py`): either kind 80-90 MB/s/core for documents of 9 kB, 25 for those
of 1 kB; a text of any length needs about 50 MB and 12 bytes per word.
"""

import sys
import unicodedata
from collections.abc import Iterator
from functools import cache

import numpy as np

from ..prepare_config import MAX_NGRAM

_PIECE_CHARS = 2**20  # text that is looked at in one go: bounds the memory of a long document
_BASE = 0x9E3779B97F4A7C55  # odd, so that it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 2**64)

# What a code point is, as bits.
_BLANK, _LETTER, _IN_WORD, _ALONE, _IGNORED = (np.uint8(1 << bit) for bit in range(5))
_APOSTROPHES = "'’ʼ＇"
_LAST_ASSIGNED = 0x40000  # beyond are private use and selectors: separators
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
    """Returns the hash of every plain word, uint64 [W]: equal for "Don’t stop" and "DONT--stop"."""
    return _joined([_plain_words_of(piece) for piece in _pieces(text.lower())], np.uint64)


def spelled_plain_words(text: str) -> list[str]:
    """Returns the plain words as strings: the meaning of `plain_words`, 40 times slower."""
    kinds = _kinds()
    words, word = [], ""
    for character in text.lower():
        kind = kinds[ord(character)]
        if kind & _IGNORED:
            continue
        if kind & _ALONE or not kind & _IN_WORD:
            words += [word] if word else []
            word = ""
        if kind & _ALONE:
            words.append(character)
        elif kind & _IN_WORD:
            word += character
    return [*words, word] if word else words


def ngram_hashes(hashes_W: np.ndarray, n: int) -> np.ndarray:
    """Returns the hash of every n words in a row: uint64 [max(0, W - n + 1)].

    `n` is at most MAX_NGRAM.
    """
    assert n <= MAX_NGRAM, (n, MAX_NGRAM)
    if n == 1:
        return hashes_W
    inverses = _powers()[1]
    pieces = []
    for start in range(0, max(0, len(hashes_W) - n + 1), _PIECE_CHARS):
        prefixes = _prefixes(hashes_W[start : start + _PIECE_CHARS + n - 1])
        ranges = prefixes[n:] - prefixes[:-n]
        ranges *= inverses[: len(ranges)]
        pieces.append(_mixed(ranges))
    return _joined(pieces, np.uint64)


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
    """Returns the code points, of one byte each where that is enough."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), dtype=np.uint8)
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def _runs(inside: np.ndarray, alone: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns start and stop of every run of True; where `alone` is True, a run has one element."""
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
    """Returns a hash of values[start:stop] for every range, wherever in `values` it lies."""
    prefixes = _prefixes(values)
    return _mixed((prefixes[stops] - prefixes[starts]) * _powers()[1][starts])


def _prefixes(values: np.ndarray) -> np.ndarray:
    """Returns the polynomial of values[:i] at the base for every i, modulo 2**64."""
    prefixes = np.empty(len(values) + 1, dtype=np.uint64)
    prefixes[0] = 0
    np.multiply(values, _powers()[0][: len(values)], out=prefixes[1:], dtype=np.uint64)
    return np.cumsum(prefixes, out=prefixes)


def _mixed(hashes: np.ndarray) -> np.ndarray:
    """Spreads differences in any bit over all bits: the finaliser of MurmurHash3."""
    hashes ^= hashes >> np.uint64(33)
    hashes *= np.uint64(0xFF51AFD7ED558CCD)
    hashes ^= hashes >> np.uint64(33)
    hashes *= np.uint64(0xC4CEB9FE1A85EC53)
    hashes ^= hashes >> np.uint64(33)
    return hashes


def _pieces(text: str) -> Iterator[str]:
    """Cuts a long text behind blanks; where there are none for a million characters, anywhere."""
    start = 0
    while len(text) - start > _PIECE_CHARS:
        stop = text.rfind(" ", start, start + _PIECE_CHARS) + 1 or start + _PIECE_CHARS
        yield text[start:stop]
        start = stop
    yield text[start:]


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    if len(arrays) == 1:
        return arrays[0]
    return np.concatenate([np.empty(0, dtype=dtype), *arrays])


# ---- tables, made when first used


@cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """Returns base**i and base**-i modulo 2**64, for as many as a piece needs: 2 * 8 MB."""
    length = _PIECE_CHARS + MAX_NGRAM  # n-grams reach beyond their piece by n - 1 words
    tables = np.empty((2, length), dtype=np.uint64)
    for table, factor in zip(tables, (_BASE, _INVERSE), strict=True):
        table[0] = 1
        table[1:] = factor
        np.cumprod(table, out=table)
    return tables[0], tables[1]


@cache
def _kinds() -> np.ndarray:
    """Returns the bits of every code point, uint8: 1.1 MB, made in 0.2 s."""
    kinds = np.zeros(sys.maxunicode + 1, dtype=np.uint8)
    for code in range(_LAST_ASSIGNED):
        character = chr(code)
        category = unicodedata.category(character)
        if category[0] == "L":
            kinds[code] = _LETTER | _IN_WORD
        elif category[0] in "NM":
            kinds[code] = _IN_WORD
        elif character.isspace():
            kinds[code] = _BLANK
    for first, last in _NO_SPACES:
        scripts = kinds[first : last + 1]
        scripts[(scripts & _IN_WORD) != 0] |= _ALONE
    for character in _APOSTROPHES:
        kinds[ord(character)] = _IGNORED
    return kinds
