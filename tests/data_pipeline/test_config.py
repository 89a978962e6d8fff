"""The spec hash changes with what decides the bytes, and with nothing else."""

import pytest
from pydantic import ValidationError

from moebius.data_pipeline.config import DataConfig


@pytest.mark.parametrize("change", [{"directory": "/elsewhere"}, {"seq_len": 64}, {"seed": 5}])
def test_order_and_place_are_not_in_the_spec_hash(change):
    assert DataConfig(**change).spec_hash == DataConfig().spec_hash


@pytest.mark.parametrize(
    "change",
    [
        {"input": ("a.txt",)},
        {"validation_input": ("v.txt",)},
        {"validation_fraction": 0.02},
        {"text_field": "content"},
        {"source_field": "origin"},
        {"tokenizer": "bytes"},
        {"vocab_size": 4000},
        {"tokenizer_sample_bytes": 1000},
        {"batch_tokens": 1000},
        {"split_bytes": 1000},
    ],
)
def test_what_decides_the_bytes_is_in_the_spec_hash(change):
    assert DataConfig(**change).spec_hash != DataConfig().spec_hash


def test_what_does_not_apply_is_not_in_the_spec_hash():
    assert (
        DataConfig(tokenizer="bytes").spec_hash
        == DataConfig(tokenizer="bytes", tokenizer_sample_bytes=9).spec_hash
    )
    with_validation = DataConfig(validation_input=("v.txt",))
    assert (
        with_validation.spec_hash
        == with_validation.model_copy(update={"validation_fraction": 0.5}).spec_hash
    )


def test_num_token_ids():
    assert DataConfig().num_token_ids == 8000
    assert DataConfig(tokenizer="bytes").num_token_ids == 257


def test_a_vocabulary_for_bytes_is_refused_with_both_numbers():
    with pytest.raises(ValidationError, match=r"257 ids.*vocab_size=512"):
        DataConfig(tokenizer="bytes", vocab_size=512)


def test_unknown_keys_and_empty_input_are_refused():
    with pytest.raises(ValidationError, match="tokeniser"):
        DataConfig.model_validate({"tokeniser": "bpe"})
    with pytest.raises(ValidationError, match="input"):
        DataConfig(input=())
