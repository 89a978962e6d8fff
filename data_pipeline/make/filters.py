"""Length, quality and repetition: the reason why a document is left out, or None.

The rules are those of Gopher (Rae et al. 2021, "Scaling Language Models: Methods, Analysis &
Insights from Training Gopher", arXiv:2112.11446, appendix A.1): "Quality filtering" for lengths,
words, symbols, lines and stop words, "Repetition removal" and its Table A1 for repetition. All
thresholds are the published ones and can be set; each group is off until it is asked for. Published
is for English web pages: look at what a rule drops (`report.md` shows examples) before trusting it
with something else.

Where the paper leaves a choice:

* A word is what stands between blank space. Lengths are in characters; a fraction of characters is
  of all characters in words.
* Of equal lines, paragraphs and n-grams the first one is no duplicate. Characters that several
  n-grams cover count once.
* The most frequent n-gram is one that occurs at least twice; of several, the first.

A text is looked at once and cheap rules come first. Words are hashed, never held as strings
(`words.py`).

Cost (`benchmarks/data_stages.py`, MB/s of one core of a busy machine, documents of 9 kB that stay):
quality 60, repetition 23, all rules 17; 4 on documents of 1 kB, where the calls themselves take the
time.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np

from ..prepare_config import STOP_WORDS, FilterConfig
from .words import BlankWords, blank_words, hash_of_word, ngram_hashes

_BULLETS = ("•", "‣", "▶", "●", "○", "■", "□", "-", "*", "–", "—")
_ELLIPSES = ("…", "...")
_NUM_BUCKETS = 4096


def reason_to_drop(text: str, config: FilterConfig) -> str | None:
    """Returns the first rule that a document breaks, or None where it stays.

    A pure function of its two arguments, on any machine.
    """
    if reason := _wrong_chars(text, config):
        return reason
    if not (config.limits_words or config.quality or config.repetition):
        return None
    words = blank_words(text)
    return next(_broken_rules(text, words, config), None)


def _broken_rules(text: str, words: BlankWords, config: FilterConfig) -> Iterator[str]:
    """Yields what is wrong, cheap rules first; nobody asks for the second."""
    yield from _wrong_words(words, config)
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    if config.quality:
        yield from _wrong_quality(text, lines, words, config)
    if config.repetition:
        yield from _wrong_repetition(text, lines, words, config)


# ---- length


def _wrong_chars(text: str, config: FilterConfig) -> str | None:
    if len(text) < config.min_chars:
        return "length: too few characters"
    if config.max_chars is not None and len(text) > config.max_chars:
        return "length: too many characters"
    return None


def _wrong_words(words: BlankWords, config: FilterConfig) -> Iterator[str]:
    if len(words.lengths_W) < config.min_words:
        yield "length: too few words"
    if config.max_words is not None and len(words.lengths_W) > config.max_words:
        yield "length: too many words"


# ---- quality


def _wrong_quality(
    text: str, lines: Sequence[str], words: BlankWords, config: FilterConfig
) -> Iterator[str]:
    num_words = len(words.lengths_W)
    if not num_words:
        yield "quality: no words"
        return
    mean_chars = int(words.lengths_W.sum()) / num_words
    if mean_chars < config.min_mean_word_chars:
        yield "quality: words too short"
    if mean_chars > config.max_mean_word_chars:
        yield "quality: words too long"
    if text.count("#") > config.max_symbols_per_word * num_words:
        yield "quality: too many #"
    if sum(map(text.count, _ELLIPSES)) > config.max_symbols_per_word * num_words:
        yield "quality: too many ellipses"
    if words.num_with_letters < config.min_words_with_letters * num_words:
        yield "quality: too few words with letters"
    if sum(line.startswith(_BULLETS) for line in lines) > config.max_bullet_lines * len(lines):
        yield "quality: too many lines begin with a bullet"
    if sum(line.endswith(_ELLIPSES) for line in lines) > config.max_ellipsis_lines * len(lines):
        yield "quality: too many lines end with an ellipsis"
    if _num_stop_words(words.hashes_W, config.min_stop_words) < config.min_stop_words:
        yield "quality: too few stop words"


def _num_stop_words(hashes_W: np.ndarray, enough: int) -> int:
    """Counts the different stop words, up to `enough`; the first words nearly always suffice."""
    found = 0
    for stop_word in _stop_word_hashes():
        if found >= enough:
            break
        found += bool((hashes_W == stop_word).any())
    return found


@cache
def _stop_word_hashes() -> tuple[np.uint64, ...]:
    return tuple(map(hash_of_word, STOP_WORDS))


# ---- repetition


def _wrong_repetition(
    text: str, lines: Sequence[str], words: BlankWords, config: FilterConfig
) -> Iterator[str]:
    if not len(words.lengths_W):
        return
    repeated, repeated_chars = _repeated(lines)
    if repeated > config.max_duplicate_lines:
        yield "repetition: duplicate lines"
    if repeated_chars > config.max_duplicate_line_chars:
        yield "repetition: characters in duplicate lines"
    paragraphs = [paragraph for paragraph in map(str.strip, text.split("\n\n")) if paragraph]
    repeated, repeated_chars = _repeated(paragraphs)
    if repeated > config.max_duplicate_paragraphs:
        yield "repetition: duplicate paragraphs"
    if repeated_chars > config.max_duplicate_paragraph_chars:
        yield "repetition: characters in duplicate paragraphs"
    yield from _too_frequent_ngrams(words, config.max_top_ngram_chars)
    yield from _too_many_duplicate_ngrams(words, config.max_duplicate_ngram_chars)


def _repeated(parts: Sequence[str]) -> tuple[float, float]:
    """Returns how many of the parts, and of their characters, were there before."""
    unique = set(parts)
    if len(unique) == len(parts):
        return 0.0, 0.0
    num_chars = sum(map(len, parts))
    return 1 - len(unique) / len(parts), 1 - sum(map(len, unique)) / num_chars


def _too_frequent_ngrams(words: BlankWords, limits: Sequence[tuple[int, float]]) -> Iterator[str]:
    """Compares the share of the most frequent n-gram with the limit for each n.

    An (n + 1)-gram is no more frequent than its first n words, and no longer than n + 1 times the
    longest word: in prose this settles all n at the first one, without sorting.
    """
    most = len(words.lengths_W)
    for n, limit in sorted(limits):
        if _at_most(words, n, most) <= limit:
            continue
        ngrams = ngram_hashes(words.hashes_W, n)
        most = _most_in_a_bucket(ngrams)
        if _at_most(words, n, most) > limit and _top_ngram_chars(words, n, ngrams) > limit:
            yield f"repetition: the most frequent {n}-gram"


def _most_in_a_bucket(ngrams: np.ndarray) -> int:
    """Returns a bound of how often one n-gram occurs: 0 where there is none."""
    buckets = (ngrams & np.uint64(_NUM_BUCKETS - 1)).astype(np.int64)
    return int(np.bincount(buckets, minlength=1).max())


def _at_most(words: BlankWords, n: int, num_ngrams: int) -> float:
    """Returns a bound of the share of characters that so many n-grams cover."""
    if num_ngrams == 0:
        return 0.0
    return num_ngrams * n * int(words.lengths_W.max()) / int(words.lengths_W.sum())


def _top_ngram_chars(words: BlankWords, n: int, ngrams: np.ndarray) -> float:
    values, counts = np.unique(ngrams, return_counts=True)
    if counts.max() < 2:
        return 0.0
    most_frequent = values[counts == counts.max()]
    first = np.flatnonzero(np.isin(ngrams, most_frequent))[0]
    return _covered_chars(words, np.flatnonzero(ngrams == ngrams[first]), n)


def _too_many_duplicate_ngrams(
    words: BlankWords, limits: Sequence[tuple[int, float]]
) -> Iterator[str]:
    """Compares the share of repeated n-grams with the limit for each n.

    What repeated (n + 1)-grams cover, repeated n-grams cover as well: once the share lies below all
    limits that are left, no larger n can break one.
    """
    ascending = sorted(limits)
    for place, (n, limit) in enumerate(ascending):
        smallest_left = min(limit for _, limit in ascending[place:])
        share = _duplicate_ngram_chars(words, n, enough=smallest_left)
        if share > limit:
            yield f"repetition: duplicate {n}-grams"
        if share <= smallest_left:
            return


def _duplicate_ngram_chars(words: BlankWords, n: int, *, enough: float) -> float:
    """Returns the share of characters in repeated n-grams; or less, where it is below `enough`."""
    ngrams = ngram_hashes(words.hashes_W, n)
    ordered = np.sort(ngrams)
    num_repeated = int(np.count_nonzero(ordered[1:] == ordered[:-1]))
    if _at_most(words, n, num_repeated) <= enough:
        return 0.0
    is_repeated = np.ones(len(ngrams), dtype=bool)
    is_repeated[np.unique(ngrams, return_index=True)[1]] = False
    return _covered_chars(words, np.flatnonzero(is_repeated), n)


def _covered_chars(words: BlankWords, starts: np.ndarray, n: int) -> float:
    """Returns the share of characters in the words that n-grams at `starts` cover."""
    edges = np.zeros(len(words.lengths_W) + 1, dtype=np.int32)
    edges[starts] += 1  # no start occurs twice
    edges[starts + n] -= 1
    covered = np.cumsum(edges[:-1]) > 0
    return int(words.lengths_W[covered].sum()) / int(words.lengths_W.sum())
