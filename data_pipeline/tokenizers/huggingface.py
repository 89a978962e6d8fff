"""A tokenizer.json: our own byte-level BPE, or any that the `tokenizers` library can load.

The library defines the ids. If `fast` can show that tiktoken gives the same ids, tiktoken encodes, at 6
instead of 0.7 M tokens/s/core; otherwise the log gives the reason once.

With byte-level BPE, both engines encode text longer than `MAX_PIECE_CHARS` in pieces (`cut_text`).
Others (Unigram, WordPiece, SentencePiece's BPE in a tokenizer.json) encode whole texts, because cutting
would change their ids.
"""

import base64
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import tokenizers

from ..errors import InputError
from ..read.token_store import token_dtype
from ..words import some_of
from .fast import (
    FastEncoder,
    UnsuitableError,
    boundaries_of,
    fast_encoder,
    is_of_library,
    plain_library,
)
from .interface import CONFIG_FILE, END_OF_DOCUMENT, TOKENIZER_FILE, Tokenizer

MAX_PIECE_CHARS = 2**16
MAX_ID = 2**24
"""The library keeps a table of as many entries as the greatest id; published ones end at 2**18."""

logger = logging.getLogger(__name__)

# One process per input split uses all cores. The library's threads would compete for them, and it
# warns at every later fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class HuggingFaceTokenizer(Tokenizer):
    """Encodes and decodes as a tokenizer.json says."""

    def __init__(self, text_json: str, *, end_of_document: str = END_OF_DOCUMENT):
        """Loads a tokenizer from the text of its tokenizer.json.

        Args:
            text_json: the file's text.
            end_of_document: the special token that ends a document.

        Raises:
            ValueError: it is not a tokenizer.json, lacks the token, or text can spell the token.
        """
        self._json = text_json
        self._library = _parsed(text_json)
        described = json.loads(self._library.to_str())
        self._boundaries = boundaries_of(described)
        self.special_tokens: list[str] = [
            one["content"] for one in described["added_tokens"] if one["special"]
        ]
        self.end_of_document = end_of_document
        self.end_of_document_id = self._checked_end()
        self.vocab_size: int = 1 + max(self._library.get_vocab(with_added_tokens=True).values())
        self._dtype = token_dtype(self.vocab_size)
        self._fast = _proven_encoder(text_json)

    @property
    def files(self) -> dict[str, bytes]:
        """Returns tokenizer.json, and the end-of-document token's name if it is not ours."""
        files = {TOKENIZER_FILE: self._json.encode()}
        if self.end_of_document != END_OF_DOCUMENT:
            files[CONFIG_FILE] = json.dumps({"eos_token": self.end_of_document}).encode()
        return files

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes each text to an array of ids, with no end of document added."""
        before = self._boundaries
        pieces = [[text] if before is None else cut_text(text, before=before) for text in texts]
        flat = [piece for of_text in pieces for piece in of_text]
        encoded = iter(self._encode(flat))
        return [np.concatenate([next(encoded) for _ in of_text]) for of_text in pieces]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decodes ids to text, without special tokens."""
        plain = np.asarray(ids, dtype=np.int64).tolist()
        return self._library.decode(plain, skip_special_tokens=True)

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        if self._fast is None:
            return self._encode_with_library(texts)
        arrays = []
        for text in texts:
            # a longer text could not be cut into pieces
            ids = self._fast.encode(text) if len(text) <= MAX_PIECE_CHARS else None
            if ids is None:
                arrays += self._encode_with_library([text])
            else:
                arrays.append(ids.astype(self._dtype, copy=False))
        return arrays

    def _encode_with_library(self, texts: list[str]) -> list[np.ndarray]:
        for text in texts:
            text.encode()  # raises a clearer error than the library for half a surrogate pair
        try:
            encoded = self._library.encode_batch_fast(texts, add_special_tokens=False)
        except BaseException as error:
            if not is_of_library(error):
                raise
            raise InputError(
                f"the tokenizer cannot encode a text that begins {texts[0][:60]!r} or one beside it "
                f"({error}): check that the tokenizer's words are those of this data"
            ) from error
        return [np.array(one.ids, dtype=self._dtype) for one in encoded]

    def _checked_end(self) -> int:
        """Returns the id of the end of a document."""
        end, special = self.end_of_document, self.special_tokens
        index = self._library.token_to_id(end)
        if index is None:
            raise ValueError(
                f"the tokenizer has no token {end!r} to end a document with; its special tokens "
                f"are {some_of(map(repr, special), repr(end))}: name one of them as "
                "prepare.end_of_document"
            )
        if end not in special or self._spells(end, index):
            raise ValueError(
                f"the tokenizer's {end!r} is not a special token, so text that spells it would end a "
                f"document: its special tokens are {some_of(map(repr, special), repr(end))}"
            )
        return index

    def _spells(self, text: str, index: int) -> bool:
        """Returns whether a text's ids include `index`."""
        try:
            return index in self._library.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            if not is_of_library(error):
                raise
            return False  # a word tokenizer raises it for an unknown word


def _parsed(text_json: str) -> tokenizers.Tokenizer:
    try:
        return plain_library(text_json)
    except BaseException as error:
        if not is_of_library(error):
            raise
        raise ValueError(f"the `tokenizers` library cannot load it: {error}") from error


def check_file(described: Mapping[str, Any]) -> None:
    """Checks the parts of a tokenizer.json that can make the Rust library end the process.

    Raises:
        ValueError: an id is none, or a table is not as long as it says; the message names the key.
    """
    model, added = described.get("model"), described.get("added_tokens") or []
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise ValueError(f"{TOKENIZER_FILE}: added_tokens is {added!r:.60}, not a list of tokens")
    ids = list(vocab.items()) if isinstance(vocab, dict) else []
    ids += [(token.get("content"), token.get("id")) for token in added]
    for token, index in ids:
        if type(index) is not int or not 0 <= index < MAX_ID:
            raise ValueError(
                f"{TOKENIZER_FILE}: gives {token!r:.60} the id {index!r:.40}: ids are whole numbers "
                f"from 0 to {MAX_ID - 1:,}"
            )
    if not all(map(_is_whole, _tables(described.get("normalizer")))):
        raise ValueError(f"{TOKENIZER_FILE}: the precompiled_charsmap of normalizer is damaged")


def _tables(normalizer: Any) -> Iterator[Any]:
    """Yields the tables of characters in a normaliser."""
    if isinstance(normalizer, dict):
        if normalizer.get("type") == "Precompiled":
            yield normalizer.get("precompiled_charsmap")
        steps = normalizer.get("normalizers")
        for step in steps if isinstance(steps, list) else ():
            yield from _tables(step)


def _is_whole(table: Any) -> bool:
    """Returns whether a table is as long as its first four bytes say."""
    try:
        data = base64.b64decode(table)
    except (ValueError, TypeError):
        return False
    return int.from_bytes(data[:4], "little") <= len(data) - 4


@lru_cache(maxsize=4)
def _proven_encoder(text_json: str) -> FastEncoder | None:
    """Returns tiktoken's encoder if its ids are proven equal; else logs why and returns None.

    The result is cached, because a process opens the same tokenizer for every input split.
    """
    try:
        return fast_encoder(text_json)
    except UnsuitableError as reason:
        if json.loads(text_json)["model"].get("type") == "WordLevel":
            return None  # a dictionary look-up is as fast
        logger.warning(
            "encoding with `tokenizers`, several times slower than tiktoken, which might give other "
            "ids: %s",
            reason,
        )
        return None


def cut_text(text: str, *, before: str, max_chars: int = MAX_PIECE_CHARS) -> list[str]:
    """Cuts a text into pieces to be encoded one by one, in linear time.

    tiktoken's regular expression fails on a run of some 10 million blanks, and both libraries become
    ten times slower on a "word" of as many letters. A piece ends, if possible, in front of the last
    blank in reach that follows a non-blank. A byte-level tokenizer splits there anyway (a blank begins
    a word, but never continues one), so the ids are those of the uncut text. Only a stretch of more
    than `max_chars` characters without such a place is cut elsewhere, at exactly `max_chars`.

    Args:
        text: a text of any length.
        before: the blank characters in front of which a cut keeps the ids.
        max_chars: the greatest length of a piece, at least 1.
    """
    pieces = []
    start = 0
    while len(text) - start > max_chars:
        stop = _last_boundary(text, start, start + max_chars, before) or start + max_chars
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


def _last_boundary(text: str, start: int, stop: int, before: str) -> int | None:
    """Returns the last place in (start, stop] where one of `before` follows a non-blank."""
    while stop > start:
        place = max(text.rfind(character, start + 1, stop + 1) for character in before)
        if place < 0:
            return None
        if not text[place - 1].isspace():
            return place
        # skips the whole run of blanks at once: one by one would take quadratic time
        stop = start + len(text[start:place].rstrip())
        if stop > start and text[stop] in before:
            return stop
        stop -= 1
    return None


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> HuggingFaceTokenizer:
    """Trains byte-level BPE with at most `vocab_size` ids; it takes about 20 s for 32 MB.

    The ids are the end of document, 256 bytes, and merges by frequency, so no text is unknown and every
    string survives decoding. Digits are split one by one, so numbers are read alike at any length. The
    same texts in the same order give the same tokenizer.json, byte for byte.
    """
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers
    bpe.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair seen once is no pattern
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(split.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(bpe.to_str())
