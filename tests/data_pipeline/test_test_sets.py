"""Test sets: prompts and answers, encoded as training documents are."""

import json
from typing import Any

import numpy as np
import pytest

from moebius.data_pipeline.data_config import DataConfig, SourceConfig, TestSet
from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.test_sets import read_test_sets
from moebius.data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from moebius.data_pipeline.tokenizers.tokenizer import save_tokenizer

FIELDS: dict[str, Any] = {"prompt_field": "q", "answer_field": "a"}


def config(folder, *sets, **changes):
    values = {"tokenizer": "bytes", "directory": str(folder), "test_sets": sets, **FIELDS}
    return DataConfig(**values | changes)


@pytest.fixture
def questions(tmp_path):
    save_tokenizer(tmp_path, BytesTokenizer())
    records = [{"q": "2+2=", "a": "4"}, {"q": "1+2=", "a": "3"}, {"q": "x", "a": ""}]
    file = tmp_path / "sums.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return file


def test_an_item_is_prompt_answer_and_end(tmp_path, questions):
    one = TestSet(name="sums", input=(str(questions),), max_items=2)
    found = read_test_sets(config(tmp_path, one).model_dump_json())
    assert list(found) == ["sums"]
    assert [item.tokens.tolist() for item in found["sums"]] == [[*b"2+2=4", 256], [*b"1+2=3", 256]]
    assert [(item.num_prompt, item.tokens.dtype) for item in found["sums"]] == [(4, np.int64)] * 2


def test_no_test_sets_need_no_folder(tmp_path):
    assert read_test_sets(config(tmp_path / "nothing").model_dump_json()) == {}


def test_an_item_without_an_answer_and_an_empty_set_are_errors(tmp_path, questions):
    (tmp_path / "empty.jsonl").write_text("\n")
    for name, message in (
        (questions, "'sums', sums.jsonl, record 2: a prompt of 1 tokens and an answer of 0"),
        (tmp_path / "empty.jsonl", r"'sums': .*empty.jsonl has no items"),
        (tmp_path / "not_there.jsonl", "not_there.jsonl"),
    ):
        one = TestSet(name="sums", input=(str(name),))
        with pytest.raises(InputError, match=message):
            read_test_sets(config(tmp_path, one).model_dump_json())


def test_settings_that_cannot_be_meant_are_refused():
    one = TestSet(name="sums", input=("a.jsonl",))
    sources = tuple(
        SourceConfig(name=name, input=("x",), **fields)
        for name, fields in (("with", FIELDS), ("without", {}))
    )
    cases: list[tuple[dict[str, Any], str]] = [
        ({"test_sets": (one,)}, "test_sets without prompt_field and answer_field"),
        ({"test_sets": (one, one), **FIELDS}, "several test sets are named 'sums'"),
        ({"test_sets": (one,), "sources": sources}, "sources with different prompt_field"),
        ({"targets": "paired", "seq_len": 33}, "rows are pairs of an input and its label"),
    ]
    for values, message in cases:
        with pytest.raises(ValueError, match=message):
            DataConfig(**values)


def test_test_sets_and_targets_leave_the_prepared_bytes_as_they_are():
    one = TestSet(name="sums", input=("a.jsonl",))
    plain = DataConfig(**FIELDS)
    assert DataConfig(**FIELDS, test_sets=(one,), targets="paired").spec_hash == plain.spec_hash
