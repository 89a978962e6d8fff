"""Long texts are cut where byte-level BPE has a boundary, or else anywhere."""

import time
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.data_pipeline.tokenizers.huggingface import MAX_PIECE_CHARS, cut_text, train_bpe

BLANKS = " \n\t\r\u3000\x1c\x85"
TEXTS = st.text(st.sampled_from("ab5.'" + BLANKS), max_size=120)
BPE = train_bpe(["a b  ab 5 a. b' . aab\nabb \n\n 'a bab"] * 20, vocab_size=290)


def _boundaries(text, before):
    return [
        place
        for place in range(1, len(text))
        if text[place] in before and not text[place - 1].isspace()
    ]


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, before=st.sampled_from([" ", " \n"]), max_chars=st.integers(1, 20))
def test_every_piece_ends_at_the_last_boundary_in_reach_or_is_full(text, before, max_chars):
    pieces = cut_text(text, before=before, max_chars=max_chars)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= max_chars
    boundaries, start = _boundaries(text, before), 0
    for place in accumulate(map(len, pieces[:-1])):
        in_reach = [one for one in boundaries if start < one <= start + max_chars]
        assert place == (in_reach[-1] if in_reach else start + max_chars)
        start = place


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, max_chars=st.integers(8, 30))
def test_the_ids_are_those_of_the_uncut_text_where_boundaries_are_near(text, max_chars):
    ends = [0, *_boundaries(text, " \n"), len(text)]
    if any(stop - start > max_chars for start, stop in pairwise(ends)):
        return
    pieces = cut_text(text, before=" \n", max_chars=max_chars)
    ids = [one for piece in BPE.encode_batch(pieces) for one in piece.tolist()]
    assert ids == BPE.encode_batch([text])[0].tolist()


@pytest.mark.parametrize("text", ["a" * 10**7, " " * 10**7, " \t" * 10**6, "a \t" * 10**6])
def test_a_long_text_is_cut_in_linear_time(text):
    """It takes a thousandth of the time of checking a run's blanks one by one."""
    started = time.process_time()
    pieces = cut_text(text, before=" ")
    assert time.process_time() - started < 5
    assert len(pieces) <= 1.1 * len(text) / MAX_PIECE_CHARS + 1
