"""Decisions about documents, compared with a slow loop; later documents never change earlier ones."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.data_pipeline.make.choose import Chooser, ExactIndex
from moebius.data_pipeline.make.tasks import (
    _RECORD,
    DUPLICATE,
    FIRST_REASON,
    TRAIN,
    VALIDATION,
    Scanned,
)
from moebius.data_pipeline.make.units import Unit
from moebius.data_pipeline.prepare_config import PrepareConfig, SourceConfig
from moebius.data_pipeline.sources.documents import InputSplit, Role

HALF = 2**63
HASHES = st.tuples(
    st.sampled_from([0, 1, 5, HALF, HALF + 1, 2**64 - 1]), st.sampled_from([0, 1, 2**64 - 1])
)


@settings(max_examples=50, deadline=None)
@given(batches=st.lists(st.lists(HASHES, max_size=20), max_size=8))
def test_what_was_there_before_is_known(batches):
    """Hashes with equal first halves but different second halves are two documents."""
    index, seen = ExactIndex(), set()
    for batch in batches:
        high, low = np.array(batch, dtype=np.uint64).reshape(-1, 2).T
        found = index.add(high, low).tolist()
        expected = []
        for one in batch:
            expected.append(one in seen)
            seen.add(one)
        assert found == expected
    assert sum(len(high) for high, _ in index._runs) == len(seen)


def unit(source: str = "text", number: int = 0, role: Role = "both") -> Unit:
    split = InputSplit(source, "/a.txt", ".txt", 0, 9, 9, role, 9)
    return Unit(source, number, (split,))


def scanned(*documents: tuple[int, int], reasons: tuple[str, ...] = ()) -> Scanned:
    """Returns documents with the given first halves of hashes and fates."""
    records = [(high, high, 10, fate) for high, fate in documents]
    return Scanned(np.array(records, dtype=_RECORD), reasons)


def chooser(fraction: float = 0.5, *sources: str) -> Chooser:
    named = tuple(SourceConfig(name=name, input=("x",)) for name in sources or ("text",))
    return Chooser(PrepareConfig(sources=named, validation_fraction=fraction))


def test_small_hashes_are_held_out_and_repeats_are_not_even_of_validation():
    one = chooser()
    fates = one.choose(unit(), scanned((HALF - 1, TRAIN), (HALF, TRAIN), (HALF - 1, TRAIN)))
    assert fates.tolist() == [VALIDATION, TRAIN, DUPLICATE]
    again = one.choose(unit(number=1), scanned((HALF, TRAIN), (3, TRAIN)))
    assert again.tolist() == [DUPLICATE, VALIDATION]
    counts = one.counts["text"]
    assert dict(counts.chosen) == {"train": 1, "validation": 2}
    assert dict(counts.dropped) == {"duplicate": 2}


def test_what_was_dropped_is_no_document_that_others_repeat():
    one = chooser()
    first = scanned((HALF, FIRST_REASON + 1), (HALF, FIRST_REASON), reasons=("empty", "too long"))
    assert one.choose(unit(), first).tolist() == [FIRST_REASON + 1, FIRST_REASON]
    assert one.choose(unit(number=1), scanned((HALF, TRAIN))).tolist() == [TRAIN]
    assert dict(one.counts["text"].dropped) == {"empty": 1, "too long": 1}
    train = chooser(0.99).choose(unit(role="train"), scanned((1, TRAIN)))
    assert train.tolist() == [TRAIN], "a validation file is beside it"


def test_small_data_holds_out_its_smallest_hash_once_it_has_two_documents():
    one = chooser(1e-9, "a", "b")
    assert one.choose(unit("a"), scanned((HALF, TRAIN))).tolist() == [TRAIN], "not its only one"
    assert one.choose(unit("a", 1), scanned((HALF + 1, TRAIN))).tolist() == [VALIDATION]
    second = one.choose(unit("b"), scanned((HALF + 9, TRAIN), (HALF + 7, TRAIN), (HALF + 8, TRAIN)))
    assert second.tolist() == [TRAIN, VALIDATION, TRAIN], "each source its own"
    assert one.choose(unit("b", 1), scanned((5000 + HALF, TRAIN))).tolist() == [TRAIN]


@settings(max_examples=40, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=6), min_size=1, max_size=6),
    fraction=st.sampled_from([0.0, 1e-9, 0.3, 0.9]),
)
def test_what_comes_later_changes_nothing(batches, fraction):
    def decide(some: list[list[int]]) -> list[list[int]]:
        one = chooser(fraction)
        return [
            one.choose(unit(number=n), scanned(*((high, TRAIN) for high in batch))).tolist()
            for n, batch in enumerate(some)
        ]

    whole = decide(batches)
    for count in range(len(batches)):
        assert decide(batches[:count]) == whole[:count]
