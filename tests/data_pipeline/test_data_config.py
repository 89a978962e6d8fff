"""The spec hash changes with what decides the bytes, and with nothing else."""

from typing import Any

import pytest
from pydantic import ValidationError

from moebius.data_pipeline.data_config import DataConfig


@pytest.mark.parametrize(
    "change",
    [
        {"directory": "/elsewhere"},
        {"seq_len": 64},
        {"seed": 5},
        {"packing": "best_fit"},
        {"document_attention": True},
        {"when_corrupt": "skip"},
        {"stages": [{"at_tokens": 0, "weights": {"text": 1.0}}]},
        {
            "sources": [
                {"name": "text", "input": ["embedded"], "weight": 3, "licence": "PSF-2.0"},
            ]
        },
        {"sources": [{"name": "text", "input": ["embedded"], "max_epochs": 2}]},
    ],
)
def test_order_and_place_are_not_in_the_spec_hash(change):
    assert DataConfig.model_validate(change).spec_hash == DataConfig().spec_hash


@pytest.mark.parametrize(
    "change",
    [
        {"input": ("a.txt",)},
        {"validation_input": ("v.txt",)},
        {"validation_fraction": 0.02},
        {"text_field": "content"},
        {"source_field": "origin"},
        {"tokenizer": "bytes"},
        {"tokenizer": "./mine"},
        {"vocab_size": 4000},
        {"tokenizer_sample_bytes": 1000},
        {"batch_tokens": 1000},
        {"split_bytes": 1000},
        {"era_tokens": 1000},
        {"encoding_faults": "drop"},
        {"shuffle_documents": True},
        {"sources": [{"name": "text", "input": ["embedded"], "id_field": "id"}]},
        {
            "sources": [
                {"name": "text", "input": ["embedded"], "prompt_field": "q", "answer_field": "a"}
            ]
        },
        {"sources": [{"name": "prose", "input": ["embedded"]}]},
    ],
)
def test_what_decides_the_bytes_is_in_the_spec_hash(change):
    assert DataConfig.model_validate(change).spec_hash != DataConfig().spec_hash


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


def _two_sources(**changes: Any) -> dict[str, Any]:
    sources = [{"name": "web", "input": ["w.txt"]}, {"name": "code", "input": ["c.txt"]}]
    return {"sources": sources} | changes


def test_what_does_not_apply_to_a_tokenizer_that_exists_is_not_in_the_spec_hash():
    plain = DataConfig(tokenizer="hf://our/words")
    assert plain.spec_hash == DataConfig(tokenizer="hf://our/words", vocab_size=50257).spec_hash
    with_end = DataConfig(tokenizer="hf://our/words", end_of_document="</s>")
    assert plain.spec_hash != with_end.spec_hash


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokenizer": "bpee"}, r"tokenizer='bpee': it is 'bpe', 'bytes', a .json or .model file"),
        ({"end_of_document": "</s>"}, r"end_of_document='</s>' is for a tokenizer that exists"),
        ({"tokenizer": "bytes", "end_of_document": "x"}, r"tokenizer='bytes' has its own"),
    ],
)
def test_a_tokenizer_that_cannot_be_is_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate(values)


def test_sources_are_listed_however_they_were_given():
    assert [source.name for source in DataConfig().all_sources] == ["text"]
    assert DataConfig().all_sources[0].input == ("embedded",)
    two = DataConfig.model_validate(_two_sources())
    assert [source.name for source in two.all_sources] == ["web", "code"]
    assert DataConfig.model_validate(two.model_dump()) == two


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (_two_sources(input=["a.txt"]), r"input=\['a.txt'\] and 2 sources.*set input=\[\]"),
        ({"input": []}, r"input=\[\] and 0 sources were given"),
        (_two_sources(validation_input=["v"]), r"validation_input=\['v'\] beside sources"),
        ({"sources": [{"name": "a", "input": ["x"]}] * 2}, "several sources are named 'a'"),
        ({"sources": [{"name": "A b", "input": ["x"]}]}, r"sources.0.name"),
        ({"sources": [{"name": "../x", "input": ["x"]}]}, r"sources.0.name"),
        ({"sources": [{"name": "a", "input": []}]}, r"sources.0.input"),
        ({"sources": [{"name": "a", "input": ["x"], "weight": 0}]}, r"weight"),
        ({"sources": [{"name": "a", "input": ["x"], "weight": "inf"}]}, r"weight"),
        (
            {"sources": [{"name": "a", "input": ["x"], "prompt_field": "q"}]},
            r"source 'a': prompt_field='q' and answer_field='' belong together",
        ),
        (
            _two_sources(stages=[{"at_tokens": 5, "weights": {"web": 1, "books": 1}}]),
            "stage at 5 tokens weighs books: the sources are code, web",
        ),
        (
            _two_sources(stages=[{"at_tokens": n, "weights": {"web": 1}} for n in (5, 5)]),
            r"stages begin at \[5, 5\] tokens",
        ),
        (
            _two_sources(stages=[{"at_tokens": 5, "weights": {"web": 0, "code": -1}}]),
            r"weights \{'web': 0.0, 'code': -1.0\}: each must be at least 0",
        ),
        (
            _two_sources(stages=[{"at_tokens": 5, "weights": {"web": "nan"}}]),
            r"each must be at least 0 and finite",
        ),
    ],
)
def test_what_makes_no_mixture_is_refused(values, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig.model_validate(values)


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
