"""Statistics of splits, merged in their order, are those of one long split."""

import json
import pickle
from dataclasses import asdict

from hypothesis import given, settings
from hypothesis import strategies as st

from moebius.data_pipeline.make.statistics import (
    MAX_EXAMPLES,
    NUM_LENGTHS,
    DocumentCounter,
    ScanStatistics,
)

DOCUMENTS = st.lists(
    st.tuples(st.text(max_size=20), st.sampled_from([None, "too short", "duplicate"])), max_size=12
)


def count(documents: list[tuple[str, str | None]]) -> ScanStatistics:
    counter = DocumentCounter()
    for text, reason in documents:
        counter.read(len(text.encode("utf-8", errors="surrogatepass")))
        if reason is not None:
            counter.drop(reason, text)
    return counter.statistics(seconds=len(documents))


@settings(max_examples=40)
@given(st.lists(DOCUMENTS, max_size=4))
def test_merged_statistics_are_those_of_all_documents_in_a_row(splits):
    merged = ScanStatistics()
    for documents in splits:
        merged = merged.merge(count(documents))
    whole = count([document for documents in splits for document in documents])
    assert merged == whole
    assert all(len(kept) <= MAX_EXAMPLES for kept in merged.examples.values())


def test_lengths_are_counted_by_powers_of_two():
    lengths = count([("", None), ("a", None), ("ab", None), ("abc", None), ("é" * 2, None)]).lengths
    assert lengths[:5] == (1, 1, 2, 1, 0)
    counter = DocumentCounter()
    counter.read(2**60)
    assert counter.statistics().lengths[NUM_LENGTHS - 1] == 1


def test_examples_are_the_first_and_short():
    counter = DocumentCounter()
    for number in range(5):
        counter.drop("long", f"{number} " + "word " * 1000, detail="set, item 3")
    kept = counter.statistics().examples["long"]
    assert [text[:16] for text in kept] == [f"[set, item 3] {n} " for n in range(3)]
    assert {len(text) for text in kept} == {160}


def test_statistics_travel():
    found = count([("some text", "duplicate"), ("more", None)])
    assert pickle.loads(pickle.dumps(found)) == found
    assert json.loads(json.dumps(asdict(found)))["dropped"] == {"duplicate": 1}
