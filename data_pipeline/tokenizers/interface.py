"""The tokenizer interface and the names of tokenizer files.

Implementations: `huggingface` (a tokenizer.json), `sentencepiece` (a .model file) and `raw_bytes`.
`tokenizer` opens that of a prepared folder, `hub` an existing one.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

TOKENIZER_FILE = "tokenizer.json"
MODEL_FILE = "tokenizer.model"
"""A SentencePiece model, instead of tokenizer.json."""

CONFIG_FILE = "tokenizer_config.json"
"""Lies beside one of the two above if documents do not end with `END_OF_DOCUMENT`; its `eos_token`
names their end, as on the Hugging Face hub."""

END_OF_DOCUMENT = "<|end_of_document|>"


def named_token(config: Mapping[str, Any], key: str) -> str:
    """Returns a token that a tokenizer_config.json names, as a string or an object; "" for none.

    Raises:
        ValueError: it is something else.
    """
    token = config.get(key)
    token = (token.get("content") if isinstance(token, dict) else token) or ""
    if not isinstance(token, str):
        raise ValueError(f"{CONFIG_FILE}: {key} is {token!r:.60}, not a token")
    return token


class Tokenizer(Protocol):
    """Declares what the pipeline and the evaluations need from a tokenizer; a base class."""

    vocab_size: int
    """The number of ids, the end of a document included."""

    end_of_document_id: int
    """The id that ends a document; no text is encoded to it."""

    end_of_document: str
    """The token that ends a document, as the tokenizer's file spells it."""

    special_tokens: Sequence[str]
    """The tokens that no text is encoded to, as the tokenizer's file spells them."""

    @property
    def files(self) -> Mapping[str, bytes]:
        """Returns the files, by name, from which `load_tokenizer` makes the same tokenizer."""
        ...

    @property
    def sha256(self) -> str:
        """Returns the hex SHA-256 of the files in the order of their names, which identifies it."""
        files = self.files
        return hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes each text to an array of ids of `token_dtype(vocab_size)`, without an end.

        Raises:
            UnicodeEncodeError: a text holds half a surrogate pair.
        """
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids to text without ends of documents; incomplete characters become U+FFFD."""
        ...


def main_file(tokenizer: Tokenizer) -> str:
    """Returns the name of the tokenizer's main file: tokenizer.json or tokenizer.model."""
    return next(name for name in tokenizer.files if name != CONFIG_FILE)
