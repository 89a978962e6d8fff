"""The sections `data` and `prepare` refuse nonsense; the hash of `prepare` changes exactly with the
settings that determine the bytes.
"""

from typing import Any

import pytest

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.prepare_config import PrepareConfig


def _source(name: str = "text", **fields: Any) -> dict[str, Any]:
    return {"name": name, "input": ["embedded"]} | fields


def _two_sources(**changes: Any) -> dict[str, Any]:
    return {"sources": [_source("web"), _source("code")]} | changes


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"sources": [_source(licence="PSF-2.0")]}, True),
        ({"input": ("a.txt",)}, False),
        ({"validation_input": ("v.txt",)}, False),
        ({"validation_fraction": 0.02}, False),
        ({"text_field": "content"}, False),
        ({"tokenizer": "bytes"}, False),
        ({"tokenizer": "./mine"}, False),
        ({"vocab_size": 4000}, False),
        ({"batch_tokens": 1000}, False),
        ({"split_bytes": 1000}, False),
        ({"segment_tokens": 1000}, False),
        ({"encoding_faults": "drop"}, False),
        ({"shuffle_documents": True}, False),
        ({"sources": [_source(id_field="id")]}, False),
        ({"sources": [_source(prompt_field="q", answer_field="a")]}, False),
        ({"sources": [_source("prose")]}, False),
    ],
)
def test_the_spec_hash_covers_what_decides_the_bytes(change: dict[str, Any], same: bool) -> None:
    found = PrepareConfig.model_validate(change).spec_hash
    assert (found == PrepareConfig().spec_hash) == same


@pytest.mark.parametrize(
    ("values", "change", "same"),
    [
        ({"validation_input": ("v.txt",)}, {"validation_fraction": 0.5}, True),
        ({"tokenizer": "hf://our/words"}, {"vocab_size": 50257}, True),
        ({"tokenizer": "hf://our/words"}, {"end_of_document": "</s>"}, False),
    ],
)
def test_the_spec_hash_ignores_settings_that_do_not_apply(
    values: dict[str, Any], change: dict[str, Any], same: bool
) -> None:
    plain, changed = (PrepareConfig.model_validate(one) for one in (values, values | change))
    assert (plain.spec_hash == changed.spec_hash) == same


def test_input_is_short_for_one_source() -> None:
    (one,) = PrepareConfig(text_field="body").all_sources
    assert (one.name, one.input, one.text_field) == ("text", ("embedded",), "body")
    two = PrepareConfig.model_validate(_two_sources())
    assert [source.name for source in two.all_sources] == ["web", "code"]
    assert PrepareConfig.model_validate(two.model_dump()) == two


def test_an_embedding_needs_as_many_ids_as_the_tokenizer_may_have() -> None:
    assert PrepareConfig().num_token_ids == 8000
    assert PrepareConfig(tokenizer="bytes").num_token_ids == 257


@pytest.mark.parametrize("old", ["fail", "refetch"])
def test_a_configuration_saved_with_a_policy_for_damage_remains_valid(old: str) -> None:
    values = {"seq_len": 32, "when_corrupt": old, "max_skipped_batches": 3}
    assert DataConfig.model_validate(values) == DataConfig(seq_len=32)
