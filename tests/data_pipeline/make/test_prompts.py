"""Prompts and answers, from file to batch: every token, and whether it is learned."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_corpus import dropped
from token_stream import documents_of

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.manifest import DatasetManifest
from moebius.data_pipeline.prepare_config import PrepareConfig, SourceConfig
from moebius.data_pipeline.read.loader import Batch, Loader

END = 256
ASKED = [
    {"q": "How many? ", "a": "Two.", "id": "q-1"},
    {"q": "Où ? ", "a": "Là-bas, à côté.", "id": "q-2"},
    {"q": "", "a": "No prompt at all", "id": "q-3"},
    {"q": "Whose? ", "a": "".join(map(chr, range(45, 90))), "id": "q-4"},
    {"q": "".join(map(chr, range(120, 75, -1))), "a": "\n y", "id": "q-5"},
]


def _write(path: Path, records: list[dict[str, str]]) -> tuple[str]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return (str(path),)


def _asked(folder: Path, records: list[dict[str, str]], **options) -> SourceConfig:
    return SourceConfig(
        name="asked",
        input=_write(folder / "asked.jsonl", records),
        prompt_field="q",
        answer_field="a",
        id_field="id",
        **options,
    )


def _config(*sources: SourceConfig, **options) -> PrepareConfig:
    values = {"tokenizer": "bytes", "validation_fraction": 0.0, "batch_tokens": 64}
    return PrepareConfig(sources=sources, **values | options)


def _expected(records: list[dict[str, str]]) -> dict[tuple[int, ...], list[bool]]:
    """Expected by hand: bytes of prompt, bytes of answer, an end; the prompt is not learned."""
    found = {}
    for record in records:
        prompt, answer = record["q"].encode(), record["a"].encode()
        found[(*prompt, *answer, END)] = [False] * len(prompt) + [True] * (len(answer) + 1)
    return found


def _batches(folder: Path, count: int, **options: Any) -> list[Batch]:
    options = {"seq_len": 15} | options
    read = DataConfig(directory=str(folder), **options)
    with Loader(read, micro_batch=1, global_batch=1) as loader:
        return [next(loader) for _ in range(count)]


def test_every_token_of_a_row_that_is_cut_anywhere_is_marked(tmp_path):
    config = _config(_asked(tmp_path, ASKED))
    prepare(config, tmp_path / "d")
    expected = _expected(ASKED)
    stream = [token for tokens in expected for token in tokens]
    learned = [mark for marks in expected.values() for mark in marks]
    num_rows = (len(stream) - 1) // 15  # neighbouring rows share a token
    rows = {
        tuple(stream[15 * n : 15 * n + 16]): learned[15 * n + 1 : 15 * n + 16]
        for n in range(num_rows)
    }
    batches = _batches(tmp_path / "d", num_rows)
    assert len(rows) == num_rows >= 10
    assert {tuple(batch.tokens[0, 0].tolist()) for batch in batches} == set(rows)
    for batch in batches:
        assert batch.loss_mask is not None
        assert batch.loss_mask[0, 0].tolist() == rows[tuple(batch.tokens[0, 0].tolist())]


def test_every_token_of_documents_that_are_fitted_into_rows_is_marked(tmp_path):
    config = _config(_asked(tmp_path, ASKED))
    prepare(config, tmp_path / "d")
    expected, seen = _expected(ASKED), set()
    for batch in _batches(tmp_path / "d", 3, packing="best_fit", seq_len=63):
        assert batch.loss_mask is not None
        assert batch.document_ids is not None
        tokens, ids = batch.tokens[0, 0], batch.document_ids[0, 0]
        mask = np.concatenate([[False], batch.loss_mask[0, 0]])  # a row's first token is no target
        assert not mask[ids < 0].any(), "padding is no target"
        for number in np.unique(ids[ids >= 0]):
            document = tuple(tokens[ids == number].tolist())
            marks = expected[document]
            if ids[0] == number:
                marks = [False, *marks[1:]]
            assert mask[ids == number].tolist() == marks
            seen.add(document)
    assert seen == set(expected)


def test_beside_a_source_without_prompts_all_of_which_is_learned(tmp_path):
    plain = SourceConfig(
        name="plain",
        input=_write(tmp_path / "plain.jsonl", [{"text": "p" * 40 + str(n)} for n in range(9)]),
    )
    config = _config(_asked(tmp_path, ASKED), plain)
    prepare(config, tmp_path / "d")
    kinds = set()
    for batch in _batches(tmp_path / "d", 12):
        assert batch.loss_mask is not None
        text = bytes(token for token in batch.tokens[0, 0].tolist() if token < END)
        if b"pppp" in text:
            kinds.add("plain")
            assert batch.loss_mask.all()
        elif not batch.loss_mask.all():
            kinds.add("asked")
    assert kinds == {"plain", "asked"}


def _prepared(tmp_path: Path, records: list[dict[str, str]], **options) -> DatasetManifest:
    return prepare(_config(_asked(tmp_path, records), **options), tmp_path / "d")


def test_a_records_own_name_is_kept_beside_its_tokens(tmp_path):
    _prepared(tmp_path, ASKED)
    found = {
        row["record_id"]: bytes(row["tokens"][:-1]).decode() for row in documents_of(tmp_path / "d")
    }
    assert found == {one["id"]: one["q"] + one["a"] for one in ASKED}


def test_equal_names_of_different_records_are_all_kept(tmp_path):
    _prepared(tmp_path, [{"q": "a", "a": "b", "id": "1"}, {"q": "c", "a": "d", "id": "1"}])
    assert [row["record_id"] for row in documents_of(tmp_path / "d")] == ["1", "1"]


def test_a_repeat_is_of_both_parts_and_where_they_meet(tmp_path):
    records = [("ab", "c"), ("a", "bc"), ("ab", "c"), ("", "abc"), ("ab", "d"), ("x", "  ")]
    records.append(("another", "c"))
    manifest = _prepared(
        tmp_path, [{"q": q, "a": a, "id": str(n)} for n, (q, a) in enumerate(records)]
    )
    assert [row["record_id"] for row in documents_of(tmp_path / "d")] == ["0", "1", "3", "4", "6"]
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


def test_what_is_no_unicode_is_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n{"text": "half \\ud83d"}\n')
    config = PrepareConfig(input=(str(path),), tokenizer="bytes", validation_fraction=0.0)
    with pytest.raises(InputError, match=r"a.jsonl, byte 30, line 2: not UTF-8"):
        prepare(config, tmp_path / "e")
    dropping = config.model_copy(update={"encoding_faults": "drop"})
    manifest = prepare(dropping, tmp_path / "d")
    assert dropped(manifest) == {"not UTF-8": 1, "not Unicode (lone surrogates)": 1}
    assert [row["n_bytes"] for row in documents_of(tmp_path / "d")] == [4]


def test_documents_that_are_spread_keep_prompt_and_name(tmp_path):
    _prepared(tmp_path, ASKED, shuffle_documents=True)
    rows = documents_of(tmp_path / "d")
    assert {tuple(row["tokens"]): row["loss_mask"] for row in rows} == _expected(ASKED)
    assert {row["record_id"] for row in rows} == {one["id"] for one in ASKED}
