"""Each filter rule drops what it names and keeps what lies on its threshold; shares of characters
agree with a slow count.
"""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from small_corpus import sentences

from moebius.data_pipeline.make import filters
from moebius.data_pipeline.make.filters import reason_to_drop
from moebius.data_pipeline.make.words import blank_words, ngram_hashes
from moebius.data_pipeline.prepare_config import FilterConfig

PROSE = (
    "The committee met on a cold morning to hear that the river had risen, and that nobody in the "
    "lower town would have bread before noon.\n\nOld Tomkins, who kept the mill, said he could be "
    "ready with forty sacks if somebody found him a cart and two strong horses.\n\nIt took an hour "
    "of argument before they agreed to send for the carrier at Oxley."
)
ALL = FilterConfig(min_words=50, max_words=100_000, quality=True, repetition=True)


def test_nothing_is_dropped_by_default():
    assert not FilterConfig().is_on
    for text in ["", "#", "a " * 1000, *sentences(0, 5)]:
        assert reason_to_drop(text, FilterConfig()) is None


def test_prose_passes_all_rules():
    assert ALL.is_on
    assert reason_to_drop(PROSE, ALL) is None


@pytest.mark.parametrize(
    ("values", "text", "reason"),
    [
        ({"min_chars": 4}, "abc", "length: too few characters"),
        ({"max_chars": 3}, "abcd", "length: too many characters"),
        ({"min_words": 3}, "two words", "length: too few words"),
        ({"max_words": 2}, "three short words", "length: too many words"),
        ({"quality": True}, " \n ", "quality: no words"),
        ({"quality": True}, "it is as so to be of an", "quality: words too short"),
        ({"quality": True}, "incomprehensibilities notwithstanding", "quality: words too long"),
        ({"quality": True}, f"{PROSE} {'# ' * 10}", "quality: too many #"),
        ({"quality": True}, f"{PROSE} {'… ... ' * 6}", "quality: too many ellipses"),
        ({"quality": True}, f"{PROSE} {'1234 ' * 20}", "quality: too few words with letters"),
        (
            {"quality": True},
            "- the lines of small apples and of pears\n" * 20,
            "quality: too many lines begin with a bullet",
        ),
        (
            {"quality": True},
            PROSE + "".join(f"\nthe other road that leads to town {n}..." for n in range(4)),
            "quality: too many lines end with an ellipsis",
        ),
        ({"quality": True}, "apples oranges pears plums quinces", "quality: too few stop words"),
        (
            {"repetition": True},
            "one\ntwo\none\nthree\none\nfour four four words more",
            "repetition: duplicate lines",
        ),
        (
            {"repetition": True},
            "a\nb\nc\nd\ne\nf\ng\nthis line is long and stands here twice\n"
            "this line is long and stands here twice",
            "repetition: characters in duplicate lines",
        ),
        (
            {"repetition": True, "max_duplicate_lines": 1, "max_duplicate_line_chars": 1},
            "one\n\ntwo\n\none\n\nthree words more\n\none",
            "repetition: duplicate paragraphs",
        ),
        (
            {"repetition": True, "max_duplicate_lines": 1, "max_duplicate_line_chars": 1},
            "a\n\nb\n\nc\n\nd\n\ne\n\nf\n\nthis line is long and stands here twice\n\n"
            "this line is long and stands here twice",
            "repetition: characters in duplicate paragraphs",
        ),
        (
            {"repetition": True},
            "buy now " * 3 + "the seven different other words that come here once",
            "repetition: the most frequent 2-gram",
        ),
        (
            {"repetition": True},
            f"{PROSE} {PROSE[:90]}",
            "repetition: duplicate 5-grams",
        ),
    ],
)
def test_each_rule_drops_what_it_names(values, text, reason):
    assert reason_to_drop(text, FilterConfig(**values)) == reason


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"min_chars": 3, "max_chars": 3}, "abc"),
        ({"min_words": 2, "max_words": 2}, "two words"),
        ({"quality": True, "min_stop_words": 0}, "two abc 123 def ghi"),  # 4 of 5 with letters
        ({"quality": True, "min_stop_words": 0}, "abc"),  # three characters a word
        ({"quality": True}, "the and " * 5 + "# abcdefghij"),  # at most one symbol per ten words
        ({"repetition": True}, "one\ntwo\nsix\nten\none\n" + "\n".join("abcdefghijk")),
    ],
)
def test_what_lies_on_a_threshold_stays(values, text):
    assert reason_to_drop(text, FilterConfig(**values)) is None


def test_thresholds_can_be_set():
    assert reason_to_drop("buy now " * 50, FilterConfig(repetition=True)) is not None
    loose = FilterConfig(repetition=True, max_top_ngram_chars=(), max_duplicate_ngram_chars=())
    assert reason_to_drop("buy now " * 50, loose) is None


@pytest.mark.parametrize(
    "values",
    [
        {"min_words": -1},
        {"max_duplicate_lines": 1.5},
        {"rules": 1},
        {"max_top_ngram_chars": [[0, 0.5]]},
    ],
)
def test_thresholds_that_cannot_be_are_refused(values):
    with pytest.raises(ValidationError):
        FilterConfig(**values)


# ---- shares of characters against a slow count

WORDS = st.lists(st.sampled_from(["a", "bb", "ccc", "dddd"]), min_size=1, max_size=30)


def top_share(spelled: list[str], n: int) -> float:
    ngrams = [tuple(spelled[i : i + n]) for i in range(len(spelled) - n + 1)]
    if not ngrams or (most := Counter(ngrams).most_common(1)[0])[1] < 2:
        return 0.0
    return share_of(spelled, [i for i, ngram in enumerate(ngrams) if ngram == most[0]], n)


def duplicate_share(spelled: list[str], n: int) -> float:
    ngrams = [tuple(spelled[i : i + n]) for i in range(len(spelled) - n + 1)]
    return share_of(spelled, [i for i, ngram in enumerate(ngrams) if ngram in ngrams[:i]], n)


def share_of(spelled: list[str], starts: list[int], n: int) -> float:
    covered = {word for start in starts for word in range(start, start + n)}
    return sum(len(spelled[word]) for word in covered) / sum(map(len, spelled))


@given(WORDS, st.integers(2, 6))
def test_shares_of_ngrams_are_those_of_a_slow_count(spelled, n):
    words = blank_words(" ".join(spelled))
    found = 0.0
    if len(spelled) >= n:
        found = filters._top_ngram_chars(words, n, ngram_hashes(words.hashes_W, n))
    assert found == pytest.approx(top_share(spelled, n))
    found = filters._duplicate_ngram_chars(words, n, enough=0.0)
    assert found == pytest.approx(duplicate_share(spelled, n))


@given(WORDS, st.sampled_from([0.05, 0.2, 0.5, 0.9]))
def test_bounds_never_save_a_document_that_a_rule_drops(spelled, limit):
    """Short cuts leave out most of the work; what they decide is what the slow counts decide."""
    tops = ((2, limit), (3, limit), (4, limit))
    duplicates = tuple((n, limit * (1.1 - 0.01 * n)) for n in range(5, 11))
    config = FilterConfig(
        repetition=True,
        max_duplicate_lines=1.0,
        max_duplicate_line_chars=1.0,
        max_duplicate_paragraphs=1.0,
        max_duplicate_paragraph_chars=1.0,
        max_top_ngram_chars=tops,
        max_duplicate_ngram_chars=duplicates,
    )
    expected = [
        *(f"the most frequent {n}-gram" for n, most in tops if top_share(spelled, n) > most),
        *(f"duplicate {n}-grams" for n, most in duplicates if duplicate_share(spelled, n) > most),
    ]
    found = reason_to_drop(" ".join(spelled), config)
    assert found == (f"repetition: {expected[0]}" if expected else None)


@given(st.lists(st.sampled_from(["one", "two", "three"]), min_size=1, max_size=12))
def test_the_first_of_equal_lines_is_no_duplicate(lines):
    repeats = [line for place, line in enumerate(lines) if line in lines[:place]]
    found = filters._repeated(lines)
    assert found[0] == pytest.approx(len(repeats) / len(lines))
    assert found[1] == pytest.approx(sum(map(len, repeats)) / sum(map(len, lines)))


def test_an_endless_repetition_is_found_in_time():
    """Two million words, all alike: every short cut fails, and it takes a second."""
    text = "spam " * 2_000_000
    assert reason_to_drop(text, FilterConfig(quality=True)) == "quality: too few stop words"
    top = reason_to_drop(text, FilterConfig(repetition=True))
    assert top == "repetition: the most frequent 2-gram"
    alone = FilterConfig(repetition=True, max_top_ngram_chars=())
    assert reason_to_drop(text, alone) == "repetition: duplicate 5-grams"


def test_the_reason_does_not_depend_on_what_was_asked_before():
    texts = [PROSE, *sentences(1, 20), "buy now " * 60]
    forwards = [reason_to_drop(text, ALL) for text in texts]
    backwards = [reason_to_drop(text, ALL) for text in reversed(texts)]
    assert forwards == backwards[::-1]
    assert len(set(itertools.chain(forwards))) > 1
