"""Prompts and answers, from file to shard: every token, and whether it is learned."""

import json
from pathlib import Path

import pytest
from small_corpus import dropped
from token_stream import documents_of

from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.manifest import DatasetManifest
from moebius.data_pipeline.prepare_config import PrepareConfig, SourceConfig

END = 256
ASKED = [
    {"q": "How many? ", "a": "Two.", "id": "q-1"},
    {"q": "Où ? ", "a": "Là-bas, à côté.", "id": "q-2"},
    {"q": "", "a": "No prompt at all", "id": "q-3"},
    {"q": "Whose? ", "a": "".join(map(chr, range(45, 90))), "id": "q-4"},
    {"q": "".join(map(chr, range(120, 75, -1))), "a": "\n y", "id": "q-5"},
]


def _prepared(folder: Path, records: list[dict[str, str]], **options) -> DatasetManifest:
    path = folder / "asked.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = SourceConfig(
        name="asked", input=(str(path),), prompt_field="q", answer_field="a", id_field="id"
    )
    values = {"tokenizer": "bytes", "validation_fraction": 0.0, "batch_tokens": 64}
    return prepare(PrepareConfig(sources=(source,), **values | options), folder / "d")


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_token_is_marked_and_a_record_keeps_its_name(tmp_path, shuffle):
    """Expected by hand: bytes of prompt, bytes of answer, an end; the prompt is not learned."""
    source = _prepared(tmp_path, ASKED, shuffle_documents=shuffle).source("asked")
    assert source.has_loss_mask
    assert source.has_record_id
    expected = {}
    for record in ASKED:
        prompt, answer = record["q"].encode(), record["a"].encode()
        learned = [False] * len(prompt) + [True] * (len(answer) + 1)
        expected[record["id"]] = ([*prompt, *answer, END], learned)
    rows = documents_of(tmp_path / "d")
    assert {row["record_id"]: (row["tokens"], row["loss_mask"]) for row in rows} == expected


def test_a_repeat_is_of_both_parts_and_where_they_meet(tmp_path):
    records = [("ab", "c"), ("a", "bc"), ("ab", "c"), ("", "abc"), ("ab", "d"), ("x", "  ")]
    records.append(("another", "c"))
    manifest = _prepared(
        tmp_path, [{"q": q, "a": a, "id": str(n % 4)} for n, (q, a) in enumerate(records)]
    )
    found = [row["record_id"] for row in documents_of(tmp_path / "d")]
    assert found == ["0", "1", "3", "0", "2"], "ids may be equal"
    assert dropped(manifest) == {"duplicate": 1, "empty": 1}


def test_filters_look_at_both_parts(tmp_path, monkeypatch):
    (tmp_path / "filter_of_prompts.py").write_text(
        "def few(text):\n    return None if len(text.split()) >= 3 else 'too few words'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    records = [{"q": "one two ", "a": "three", "id": "1"}, {"q": "few ", "a": "words", "id": "2"}]
    manifest = _prepared(tmp_path, records, filters=("filter_of_prompts:few",))
    assert [row["record_id"] for row in documents_of(tmp_path / "d")] == ["1"]
    assert dropped(manifest) == {"too few words": 1}
