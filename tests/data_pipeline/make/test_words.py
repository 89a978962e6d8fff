"""Hashes of n-grams agree exactly when their plain words do, in every process."""

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebius.data_pipeline.make.decontaminate import ngram_hashes, plain_words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don’t STOP--now", "dont stop now"),
        ("Don't STOP--now_then", "dont stop now then"),
        ("“dont” stop\n— now!", "dont stop now"),
        ("naïve x2 3,14", "naïve x2 3 14"),
        ("e\u0301 हिन्दी ẹ́", "e\u0301 हिन्दी ẹ́"),
        ("東京 is 日本", "東 京 is 日 本"),
        ("\U00020000\U00020001", "\U00020000 \U00020001"),
        ("…#*", ""),
        ("", ""),
    ],
)
def test_plain_words_leave_out_what_copies_of_a_text_differ_in(text, expected):
    assert plain_words(text) == expected.split()


@given(st.text(st.characters(max_codepoint=127), max_size=60))
def test_ascii_text_has_the_words_that_it_has_beside_other_characters(text):
    assert plain_words(f"{text} é") == [*plain_words(text), "é"]


@given(st.lists(st.sampled_from(["ab", "c", "d"]), max_size=40), st.integers(1, 6))
def test_ngrams_have_one_hash_exactly_when_their_words_are_the_same(spelled, n):
    hashes = ngram_hashes(" ".join(spelled), n).tolist()
    expected = [tuple(spelled[i : i + n]) for i in range(len(spelled) - n + 1)]
    assert len(hashes) == len(expected)
    assert len(set(zip(hashes, expected, strict=True))) == len(set(hashes)) == len(set(expected))


def test_hashes_are_the_same_in_another_process():
    """Python's string hash differs between processes; these hashes must not."""
    asked = "from moebius.data_pipeline.make.decontaminate import *; print(ngram_hashes('Don’t stop now', 2).tolist())"
    told = subprocess.run(
        [sys.executable, "-c", asked], check=True, capture_output=True, text=True
    ).stdout
    found = [int(value) for value in re.findall(r"\d+", told)]
    assert ngram_hashes("DONT stop… now", 2).tolist() == found
    assert len(found) == 2
