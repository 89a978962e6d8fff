"""Near duplicates are found by their Jaccard similarity, and the first of them stays."""

import random
import sys
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius.data_pipeline.errors import PrepareError
from moebius.data_pipeline.make import near_duplicates
from moebius.data_pipeline.make.near_duplicates import NearDuplicateIndex, band_keys
from moebius.data_pipeline.make.words import ngram_hashes, plain_words
from moebius.data_pipeline.prepare_config import NearDuplicateConfig

CONFIG = NearDuplicateConfig()
needs_rensa = pytest.mark.skipif(
    find_spec("rensa") is None, reason="rensa is not installed (extra dedup)"
)


def document(seed: int, num_words: int = 400) -> list[str]:
    rng = random.Random(seed)
    return [f"w{rng.randrange(10**6)}" for _ in range(num_words)]


def planted(words: list[str], similarity: float) -> list[str]:
    """A copy whose 5-grams have about this Jaccard similarity with those of the original.

    Its last words are others: of n n-grams the first m are shared, m / (2n - m) = similarity.
    """
    num_ngrams = len(words) - CONFIG.ngram_words + 1
    shared = round(2 * num_ngrams * similarity / (1 + similarity))
    kept = shared + CONFIG.ngram_words - 1
    return words[:kept] + [f"{word}x" for word in words[kept:]]


def jaccard(one: list[str], other: list[str]) -> float:
    left, right = (
        set(ngram_hashes(plain_words(" ".join(words)), CONFIG.ngram_words).tolist())
        for words in (one, other)
    )
    return len(left & right) / len(left | right)


def choose(texts: list[str], config: NearDuplicateConfig = CONFIG) -> list[bool]:
    keys_DB = np.stack([band_keys(text, config) for text in texts])
    return NearDuplicateIndex().choose(keys_DB).tolist()


@needs_rensa
def test_a_planted_near_duplicate_is_found_and_a_loose_relative_is_not():
    """In 40 documents each: similarity 0.9 is found with probability 0.999, 0.5 with 0.005."""
    originals = [document(seed) for seed in range(40)]
    for similarity, is_found in ((0.9, True), (0.5, False)):
        copies = [planted(words, similarity) for words in originals]
        assert jaccard(originals[0], copies[0]) == pytest.approx(similarity, abs=0.01)
        stays = choose([" ".join(words) for words in [*originals, *copies]])
        assert stays == [True] * 40 + [not is_found] * 40


@needs_rensa
def test_how_many_are_found_is_what_the_formula_says():
    config = NearDuplicateConfig(threshold=0.7, num_hashes=120)
    pairs = [(document(seed), planted(document(seed), 0.7)) for seed in range(300)]
    keys = [[set(band_keys(" ".join(words), config).tolist()) for words in pair] for pair in pairs]
    found = sum(bool(one & other) for one, other in keys) / len(pairs)
    # three standard deviations of 300 throws
    assert found == pytest.approx(config.probability_of_match(0.7), abs=0.08)


@needs_rensa
def test_the_order_decides_who_stays():
    words = document(0)
    copy = planted(words, 0.95)
    texts = [" ".join(words), " ".join(document(1)), " ".join(copy)]
    assert choose(texts) == [True, True, False]
    assert choose(texts[::-1]) == [True, True, False]


@needs_rensa
def test_what_copies_of_a_text_differ_in_makes_no_difference():
    words = document(0, 50)
    printed = " — ".join(word.upper() for word in words)
    assert band_keys(" ".join(words), CONFIG).tolist() == band_keys(printed, CONFIG).tolist()


@needs_rensa
def test_short_documents():
    assert band_keys("# … !", CONFIG).tolist() == []
    assert choose(["two words", "Two words!", "three other words"]) == [True, False, True]


@needs_rensa
def test_keys_are_what_they_were():
    """Saved keys must mean the same tomorrow, and with another build of rensa."""
    keys = band_keys("the quick brown fox jumps over the lazy dog " * 3, CONFIG)
    assert len(keys) == 20
    assert keys[:2].tolist() == [3583026881307276241, 7631185169850284969]
    assert CONFIG.bands_and_rows == (20, 12)


def test_another_algorithm_is_refused(monkeypatch):
    near_duplicates._rensa.cache_clear()
    other = SimpleNamespace(RMinHash=SimpleNamespace(ALGORITHM_VERSION=3))
    monkeypatch.setitem(sys.modules, "rensa", other)
    with pytest.raises(PrepareError, match=r"needs rensa's algorithm 2.*has 3"):
        band_keys("some words", CONFIG)


def test_without_the_extra_the_error_names_it(monkeypatch):
    near_duplicates._rensa.cache_clear()
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(PrepareError, match=r"pip install 'moebius\[dedup\]'"):
        band_keys("some words", CONFIG)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 0.99])
@pytest.mark.parametrize("num_hashes", [16, 128, 240, 1024])
def test_bands_fit_and_find_three_of_four_at_the_threshold(threshold, num_hashes):
    config = NearDuplicateConfig(threshold=threshold, num_hashes=num_hashes)
    num_bands, num_rows = config.bands_and_rows
    assert num_bands * num_rows <= num_hashes
    assert config.probability_of_match(threshold) >= 0.75


# ---- the index


def first_stays(keys_DB: list[list[int]]) -> list[bool]:
    """The meaning of the index: one set, one document after the other."""
    entered: set[int] = set()
    stays = []
    for keys in keys_DB:
        stays.append(not entered.intersection(keys))
        if stays[-1]:
            entered.update(keys)
    return stays


@given(
    st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), max_size=30),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_the_index_decides_like_one_set_however_the_documents_are_grouped(keys_DB, cuts):
    index = NearDuplicateIndex()
    bounds = [0, *sorted(cuts), len(keys_DB)]
    found = []
    for start, stop in pairwise(bounds):
        group = np.array(keys_DB[start:stop], dtype=np.uint64).reshape(-1, 3)
        found += index.choose(group).tolist()
    assert found == first_stays(keys_DB)


def test_a_document_is_compared_with_those_that_stayed_only():
    """A is like B and B is like C, but A is not like C: B goes, so C is like nobody."""
    a, b, c = [1, 2, 3], [3, 4, 5], [5, 6, 7]
    keys_DB = np.array([a, b, c], dtype=np.uint64)
    assert NearDuplicateIndex().choose(keys_DB).tolist() == [True, False, True]


def test_the_index_takes_eight_bytes_per_key():
    keys_DB = np.random.default_rng(0).integers(0, 2**64, (3000, 20), dtype=np.uint64)
    index = NearDuplicateIndex()
    for group in np.array_split(keys_DB, 40):
        index.choose(group)
    assert index.num_bytes == keys_DB.nbytes
