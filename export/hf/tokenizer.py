"""Converts the run's tokenizer for AutoTokenizer: the same ids, with the end of document as `eos`.

A tokenizer.json of the `tokenizers` library is used unchanged, except for a template that adds
tokens of its own to every text, which the model was not trained with. Bytes become a tokenizer.json
with 256 one-byte words. A SentencePiece model is converted and its ids compared
(sentencepiece_json.py).

`split_special_tokens` is set, as in training: text that spells the end of a document stays text.
"""

import json
from collections.abc import Sequence
from typing import Any

import tokenizers

from ...data_pipeline.tokenizers.fast import byte_of_character
from ...data_pipeline.tokenizers.interface import CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from ...data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from ...data_pipeline.tokenizers.sentencepiece import SentencePieceTokenizer
from .sentencepiece_json import convert


def tokenizer_files(
    tokenizer: Tokenizer, max_length: int, texts: Sequence[str] = ()
) -> dict[str, str]:
    """Returns tokenizer.json and tokenizer_config.json.

    Args:
        tokenizer: of the run.
        max_length: tokens of the longest input.
        texts: of the run's data, for which a converted SentencePiece model must give the same ids.

    Raises:
        ConfigError: a converted SentencePiece model gives other ids.
    """
    end = tokenizer.end_of_document
    if isinstance(tokenizer, SentencePieceTokenizer):
        library = convert(tokenizer, texts)
        text, end = library.to_str(), library.id_to_token(tokenizer.end_of_document_id)
    elif isinstance(tokenizer, BytesTokenizer):
        text = _bytes_json(tokenizer)
    else:
        text = _without_template(tokenizer.files[TOKENIZER_FILE].decode())
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": max_length,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    return {TOKENIZER_FILE: text, CONFIG_FILE: json.dumps(described, indent=2) + "\n"}


def _without_template(text: str) -> str:
    """Returns a tokenizer.json that adds no tokens of its own to a text."""
    library = tokenizers.Tokenizer.from_str(text)
    if not library.encode("", add_special_tokens=True).ids:
        return text
    described: dict[str, Any] = json.loads(text)
    described["post_processor"] = None
    return json.dumps(described, ensure_ascii=False)


def _bytes_json(tokenizer: BytesTokenizer) -> str:
    """Returns a tokenizer.json whose words are the 256 bytes, with their values as ids."""
    end = tokenizer.end_of_document_id
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_of_character(), merges=[]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens([tokenizer.end_of_document])
    assert library.token_to_id(tokenizer.end_of_document) == end, "the id after the bytes"
    return library.to_str()
