"""Which documents are in a step, and in which steps a document is: both directions against the
tokens that a run reads, for mixtures, stages, epochs and both packings.
"""

import json
import random
from dataclasses import replace

import pytest
from made_folder import END, MadeFolder, documents

from moebius.data_pipeline.data_config import Stage
from moebius.data_pipeline.document_order import RunOrder
from moebius.data_pipeline.errors import DataError, ShardError
from moebius.data_pipeline.read.corruption import SkipList, SkippedRow

S = 16
GLOBAL_BATCH = 8
STEPS = 30  # some epochs of each source
STAGES = (Stage(at_tokens=100 * S, weights={"a": 1.0, "c": 3.0}),)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> MadeFolder:
    """Two eras of one source, one of two others; long documents, and one has prompts."""
    folder = MadeFolder(tmp_path_factory.mktemp("made"), ("a", "b", "c"), frozenset({"c"}))
    folder.seal("a", documents(0, 20), documents(7, 3), shards=2)
    folder.seal("a", documents(1, 9, longest=9))
    folder.seal("b", documents(2, 12, longest=90))
    folder.seal("c", documents(3, 14, prompts=True))
    return folder.complete()


def opened(made: MadeFolder, *, steps: int = STEPS, skip_folder=None, **options) -> RunOrder:
    data = made.config(seq_len=S, **options)
    return RunOrder(data, global_batch=GLOBAL_BATCH, num_steps=steps, skip_folder=skip_folder)


def no_progress(num_bytes: int) -> None:
    """Nobody watches."""


def seen_by(order: RunOrder) -> dict[str, list[int]]:
    """Document -> samples, by looking at every sample of the run."""
    seen: dict[str, list[int]] = {}
    for row in order.rows_of(range(order.num_samples)):
        for part in order.parts_of(row):
            seen.setdefault(part.document.place, []).append(row.sample)
    return {place: sorted(set(samples)) for place, samples in seen.items()}


@pytest.mark.parametrize(
    ("packing", "stages"), [("concat", ()), ("concat", STAGES), ("best_fit", STAGES)]
)
def test_both_directions_agree_with_the_tokens(made, packing, stages):
    with opened(made, packing=packing, stages=stages, weights={"a": 2.0}) as order:
        rows, read = order.read(range(order.num_samples))
        assert rows == order.rows_of(range(order.num_samples))
        assert {row.epoch for row in rows} >= {0, 1, 2}
        for row, tokens in zip(rows, read.tokens.tolist(), strict=True):
            expected = [
                token
                for part in order.parts_of(row)
                for token in made.documents[row.source][row.era][part.document.number].tokens[
                    part.first : part.first + part.num_tokens
                ]
            ]
            assert tokens[: len(expected)] == expected
            assert set(tokens[len(expected) :]) <= {END}, "what is left is padding"
            assert row.step == row.sample // GLOBAL_BATCH + 1
        seen = seen_by(order)
        for source, eras in made.documents.items():
            for era, of_era in enumerate(eras):
                for number in range(len(of_era)):
                    place = f"{source}/{era}/{number}"
                    document = order.documents.find(place, no_progress)
                    found = order.sightings(document, most_epochs=999)
                    samples = [one for epoch in found.epochs for one in epoch.samples]
                    assert sorted(samples) == seen.get(place, [])
                    assert found.is_final
                    for epoch in found.epochs:
                        steps = {one // GLOBAL_BATCH + 1 for one in epoch.samples}
                        assert sorted(steps) == list(epoch.steps)


def test_a_document_has_several_names(made):
    with opened(made) as order:
        searched = []
        record = order.documents.find("a/1/4", searched.append)
        assert not searched, "a place is found at once"
        for name in (record.doc_id, record.doc_id.upper(), record.doc_id[:11]):
            assert order.documents.find(name, searched.append) == record
        assert 0 < sum(searched) <= 3 * order.documents.num_bytes()
        only = order.documents.find("b:11", no_progress)
        assert (only.source, only.number, only.label) == ("b", 11, "b")
        with pytest.raises(DataError, match="'a:2' names 3 documents, a/0/2 "):
            order.documents.find("a:2", no_progress)


def test_a_record_id_names_a_document_even_one_that_looks_like_another_name(tmp_path):
    names = ["books/Emma#001", "a:3", "abcdef", ""]
    named = [replace(one, record_id=name) for one, name in zip(documents(0, 4), names, strict=True)]
    made = MadeFolder(tmp_path, ("b", "a"), with_record_ids=frozenset({"a"}))
    made.seal("b", documents(9, 4)).seal("a", named).complete()
    with opened(made) as order:
        for number, name in enumerate(names[:1] + names[2:3]):
            found = order.documents.find(name, no_progress)
            assert (found.source, found.record_id, found.number) == ("a", name, 2 * number)
        with pytest.raises(DataError, match=r"'a:3' names 2 documents, a/0/1 .*, a/0/3 "):
            order.documents.find("a:3", no_progress)


def test_what_is_unknown_or_beyond_the_run_is_told(made, tmp_path):
    with opened(made) as order:
        for name in ("0123456789abcdef", "nobody:7", "b:99", "?", "zz"):
            with pytest.raises(DataError, match=r"no document '.*' among the 55 of the train spl"):
                order.documents.find(name, no_progress)
        with pytest.raises(DataError, match="era 1 of source 'a' has 9 train documents"):
            order.documents.find("a/1/9", no_progress)
        with pytest.raises(ShardError, match="has no source 'd'"):
            order.documents.find("d/0/0", no_progress)
        with pytest.raises(ShardError, match="has 2 eras of source 'a', none of number 2"):
            order.documents.find("a/2/0", no_progress)
        for step in (0, STEPS + 1):
            with pytest.raises(DataError, match=rf"step {step} is none of the run's 30"):
                order.samples_of_step(step)
        with pytest.raises(DataError, match="samples 240 to 240 are not all of the run's 240"):
            order.rows_of(range(240, 241))


def test_a_run_that_ends_before_says_when_a_longer_one_would(made):
    with opened(made) as longer, opened(made, steps=1) as short:
        seen = seen_by(longer)
        in_short = seen_by(short)
        never = sorted(seen.keys() - in_short.keys())
        assert never
        for place in never:
            document = short.documents.find(place, no_progress)
            found = short.sightings(document, most_epochs=9)
            assert not found.epochs
            assert found.next_sample == seen[place][0]


def test_a_folder_that_grows_answers_as_it_will_when_complete(tmp_path):
    folder = MadeFolder(tmp_path / "made").seal("text", documents(0, 20))
    with opened(folder) as order:
        rows = sum(order.samples.count_eras("text", rows=0, eras=1).era_rows)
        early = order.rows_of(range(rows))
        with pytest.raises(DataError, match="not decided yet: era 1 of source 'text' is not seal"):
            order.rows_of(range(rows, rows + 1))
        document = order.documents.find("text/0/3", no_progress)
        before = order.sightings(document, most_epochs=9)
        assert not before.is_final
        assert len(before.epochs) == 1
    folder.seal("text", documents(1, 20)).complete()
    with opened(folder) as order:
        assert order.rows_of(range(rows)) == early
        after = order.sightings(document, most_epochs=9)
        assert after.is_final
        assert after.epochs[0] == before.epochs[0]
        assert len(after.epochs) > 1
        fewer = order.sightings(document, most_epochs=2)
        assert fewer.epochs == after.epochs[:2]
        assert fewer.epochs_left_out > 0


def test_rows_that_stand_in_for_damaged_ones_count(made, tmp_path):
    with opened(made) as order:
        victims = random.Random(1).sample(order.rows_of(range(order.num_samples)), 12)
    skipped = SkipList(tmp_path / "skipped")
    for row in victims:
        with opened(made) as order:
            others = order.samples.order.era_order("abc".index(row.source), row.epoch, row.era)
            other = int(others.others_of_window(others.position_of(row.row))[0])
        skipped.add_row(SkippedRow(row.source, row.epoch, row.era, row.row, row.sample, other))
    files = {path: path.read_bytes() for path in (tmp_path / "skipped").iterdir()}
    with opened(made, skip_folder=tmp_path / "skipped") as order:
        found = {row.sample: row for row in order.rows_of(range(order.num_samples))}
        assert {row.sample for row in found.values() if row.replaces is not None} == {
            row.sample for row in victims
        }
        for place, samples in seen_by(order).items():
            document = order.documents.find(place, no_progress)
            sightings = order.sightings(document, most_epochs=999)
            assert sorted(s for epoch in sightings.epochs for s in epoch.samples) == samples
    assert files == {path: path.read_bytes() for path in (tmp_path / "skipped").iterdir()}


def test_records_are_json(made):
    with opened(made) as order:
        document = order.documents.find("c/0/2", no_progress)
    said = json.loads(json.dumps(document.as_json()))
    assert said["place"] == "c/0/2"
    assert said["input"] == "c.train-00000.tok.arrow"
