"""What the pipeline and the evaluations ask of a tokenizer, and what its files are called.

Implementations: `huggingface` (a tokenizer.json: byte-level BPE that was trained here, or one that
was loaded), `sentencepiece` (a .model file) and `raw_bytes`. `tokenizer` opens the right one of a
prepared folder, `hub` one that somebody else has made.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

TOKENIZER_FILE = "tokenizer.json"
MODEL_FILE = "tokenizer.model"
"""A SentencePiece model, in the place of tokenizer.json."""

CONFIG_FILE = "tokenizer_config.json"
"""Stands beside one of the two above where the end of a document is not `END_OF_DOCUMENT`: its
`eos_token` names it, as in the repositories of the Hugging Face hub."""

END_OF_DOCUMENT = "<|end_of_document|>"


class Tokenizer(Protocol):
    """Declares what the pipeline and the evaluations need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Returns the number of ids, the end of a document included."""
        ...

    @property
    def end_of_document_id(self) -> int:
        """Returns the id that ends a document; no text is encoded to it."""
        ...

    @property
    def end_of_document(self) -> str:
        """Returns how the tokenizer's own file spells the end of a document."""
        ...

    @property
    def files(self) -> Mapping[str, bytes]:
        """Returns the files that `load_tokenizer` makes the same tokenizer of, by name."""
        ...

    @property
    def sha256(self) -> str:
        """Returns the hex hash of the files: two tokenizers are the same when it is."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes texts: one array of ids each, of `token_dtype(vocab_size)`.

        No end of document is added.

        Raises:
            UnicodeEncodeError: a text holds half a surrogate pair, so it is no Unicode.
        """
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids to text.

        An end of document is left out, an incomplete character becomes U+FFFD.
        """
        ...


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the integers of tokens: two bytes wherever they suffice."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def main_file(tokenizer: Tokenizer) -> str:
    """Returns the name of the file that makes the tokenizer: tokenizer.json or tokenizer.model."""
    return next(name for name in tokenizer.files if name != CONFIG_FILE)


def hash_of_files(files: Mapping[str, bytes]) -> str:
    """Returns the hex sha256 of a tokenizer's files, in the order of their names.

    Of a single file it is that file's own.
    """
    return hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()
