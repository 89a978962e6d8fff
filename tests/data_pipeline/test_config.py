"""The hash of `prepare` changes exactly with the settings that determine the bytes."""

from typing import Any

import pytest
from made_folder import header_of, source_entry

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.prepare_config import PrepareConfig


def _source(name: str = "text", **fields: Any) -> dict[str, Any]:
    return {"name": name, "input": ["embedded"]} | fields


def _two_sources(**changes: Any) -> dict[str, Any]:
    return {"sources": [_source("web"), _source("code")]} | changes


PREPARED_ALIKE = [
    ({}, {"sources": [_source(licence="PSF-2.0")]}),
    ({"validation_input": ("v.txt",)}, {"validation_fraction": 0.5}),
    ({"tokenizer": "hf://our/words"}, {"vocab_size": 50257}),
]
PREPARED_OTHERWISE = [
    {"input": ("a.txt",)},
    {"validation_input": ("v.txt",)},
    {"validation_fraction": 0.02},
    {"text_field": "content"},
    {"tokenizer": "bytes"},
    {"tokenizer": "./mine"},
    {"vocab_size": 4000},
    {"batch_tokens": 1000},
    {"split_bytes": 1000},
    {"segment_tokens": 1000},
    {"encoding_faults": "drop"},
    {"shuffle_documents": True},
    {"sources": [_source(id_field="id")]},
    {"sources": [_source(prompt_field="q", answer_field="a")]},
    {"sources": [_source("prose")]},
    {"tokenizer": "hf://our/words", "end_of_document": "</s>"},
]


def test_the_spec_hash_covers_exactly_what_decides_the_bytes() -> None:
    for values, change in PREPARED_ALIKE:
        plain, changed = (PrepareConfig.model_validate(one) for one in (values, values | change))
        assert plain.spec_hash == changed.spec_hash
    hashes = {PrepareConfig.model_validate(one).spec_hash for one in [{}, *PREPARED_OTHERWISE]}
    assert len(hashes) == 1 + len(PREPARED_OTHERWISE)


def test_input_is_short_for_one_source() -> None:
    (one,) = PrepareConfig(text_field="body").all_sources
    assert (one.name, one.input, one.text_field) == ("text", ("embedded",), "body")
    two = PrepareConfig.model_validate(_two_sources())
    assert [source.name for source in two.all_sources] == ["web", "code"]
    assert PrepareConfig.model_validate(two.model_dump()) == two


def test_an_embedding_needs_as_many_ids_as_the_tokenizer_may_have() -> None:
    assert PrepareConfig().num_token_ids == 8000
    assert PrepareConfig(tokenizer="bytes").num_token_ids == 257


def test_a_configuration_saved_with_a_policy_for_damage_remains_valid() -> None:
    values = {"seq_len": 32, "when_corrupt": "refetch", "max_skipped_batches": 3}
    assert DataConfig.model_validate(values) == DataConfig(seq_len=32)


@pytest.mark.parametrize(("bytes_of_a_sample", "is_same"), [(2**25, True), (2**20, False)])
def test_a_folder_of_0_2_is_prepared_alike(bytes_of_a_sample: int, is_same: bool) -> None:
    config = PrepareConfig(vocab_size=300)
    spec = config.spec | {"tokenizer_sample_bytes": bytes_of_a_sample, "source_field": "source"}
    spec["sources"] = [source | {"source_field": "source"} for source in config.spec["sources"]]
    header = header_of([source_entry("default")], spec=spec, segment_tokens=1, batch_tokens=1)
    assert config.describes(header) == is_same
