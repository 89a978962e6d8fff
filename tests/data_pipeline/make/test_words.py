"""Hashed words agree with words as strings, wherever a text is cut."""

import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius.data_pipeline.make import decontaminate as words
from moebius.data_pipeline.make.decontaminate import ngram_hashes, plain_words

TEXT = st.text(
    alphabet=st.one_of(
        st.sampled_from("aAbB zZ'’-—.,\n\t 日本ไทย0١ẹ́ß…#İﬁ\u2003\u00a0"),
        st.characters(exclude_categories=("Cs",)),
    ),
    max_size=60,
)


def spelled_plain_words(text: str) -> list[str]:
    """Returns the plain words as strings, the reference for `plain_words`."""
    kinds = words._kinds()
    spaced = ""
    for character in text.lower():
        kind = kinds[ord(character)]
        if kind & words._ALONE:
            spaced += f" {character} "
        elif not kind & words._IGNORED:
            spaced += character if kind & words._IN_WORD else " "
    return [word for word in spaced.split(" ") if word]


@given(TEXT, TEXT)
def test_two_words_have_one_hash_exactly_when_they_are_spelled_alike(one, other):
    """Hashes of two texts agree at the same positions as the strings."""
    left, right = spelled_plain_words(one), spelled_plain_words(other)
    found_left, found_right = plain_words(one), plain_words(other)
    assert len(found_left) == len(left)
    same = np.equal.outer(found_left, found_right)
    assert same.tolist() == [[a == b for b in right] for a in left]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don’t STOP--now", "dont stop now"),
        ("“dont” stop\n— now!", "dont stop now"),
        ("naïve x2 3,14", "naïve x2 3 14"),
        ("東京 is 日本", "東 京 is 日 本"),
        ("…#*", ""),
        ("", ""),
    ],
)
def test_plain_words_leave_out_what_copies_of_a_text_differ_in(text, expected):
    assert spelled_plain_words(text) == expected.split()
    assert len(plain_words(text)) == len(expected.split())


@given(st.lists(st.sampled_from(["ab", "c", "d"]), max_size=40), st.integers(1, 6))
def test_ngrams_have_one_hash_exactly_when_their_words_are_the_same(spelled, n):
    hashes = ngram_hashes(plain_words(" ".join(spelled)), n)
    expected = [tuple(spelled[i : i + n]) for i in range(len(spelled) - n + 1)]
    assert len(hashes) == len(expected)
    first_of = {}
    for place, ngram in enumerate(expected):
        first_of.setdefault(ngram, place)
    numbers = dict(zip(hashes.tolist(), [first_of[ngram] for ngram in expected], strict=True))
    assert [numbers[value] for value in hashes.tolist()] == [first_of[ngram] for ngram in expected]
    assert len(numbers) == len(first_of)


@pytest.mark.parametrize("piece", [8, 64])
def test_a_long_text_gives_the_same_words_in_pieces(piece, monkeypatch):
    text = " ".join(f"word{i % 37} don’t {i}" for i in range(300))
    whole = plain_words(text), ngram_hashes(plain_words(text), 5)
    monkeypatch.setattr(words, "_PIECE_CHARS", piece)
    words._powers.cache_clear()
    cut = plain_words(text), ngram_hashes(plain_words(text), 5)
    words._powers.cache_clear()
    assert cut[0].tolist() == whole[0].tolist()
    assert cut[1].tolist() == whole[1].tolist()


def test_a_text_without_a_blank_is_cut_all_the_same():
    text = "a" * (2 * words._PIECE_CHARS + 5)
    assert len(plain_words(text)) == 3


def test_hashes_are_the_same_in_another_process():
    """Python's string hash differs between processes; these hashes must not."""
    asked = "from moebius.data_pipeline.make.decontaminate import *; print(plain_words('Don’t stop now').tolist())"
    told = subprocess.run(
        [sys.executable, "-c", asked], check=True, capture_output=True, text=True
    ).stdout
    expected = [9807850862557995691, 112106754867555267, 2630693056219477467]
    assert [int(value) for value in re.findall(r"\d+", told)] == expected
    assert plain_words("DONT stop… now").tolist() == expected
