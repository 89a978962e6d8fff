"""A tokenizer of UTF-8 bytes: 257 ids, no training, and every string survives decoding."""

import json
from collections.abc import Sequence

import numpy as np

from ..prepare_config import NUM_BYTE_IDS
from .interface import END_OF_DOCUMENT, TOKENIZER_FILE, Tokenizer

KIND = "bytes"
"""The `type` in its tokenizer.json, which no other library uses."""


class BytesTokenizer(Tokenizer):
    """Encodes text as its UTF-8 bytes, ids 0-255, and 256 for the end of a document."""

    vocab_size: int = NUM_BYTE_IDS
    end_of_document_id: int = NUM_BYTE_IDS - 1
    end_of_document: str = END_OF_DOCUMENT
    special_tokens: Sequence[str] = (END_OF_DOCUMENT,)

    @property
    def files(self) -> dict[str, bytes]:
        """Returns a tokenizer.json with the kind and the vocabulary size."""
        described = json.dumps({"type": KIND, "vocab_size": self.vocab_size})
        return {TOKENIZER_FILE: described.encode()}

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes each text to its UTF-8 bytes, as an array of uint16 ids."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids as UTF-8 bytes; ids above 255 are skipped, invalid bytes become U+FFFD."""
        array = np.asarray(ids, dtype=np.int64)
        data = array[(array >= 0) & (array < 256)].astype(np.uint8).tobytes()
        return data.decode("utf-8", errors="replace")
