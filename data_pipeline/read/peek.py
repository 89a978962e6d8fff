"""Decodes rows for people: the text of each document, its learned parts, and padding.

The text may come from strangers, so `visible` replaces characters that control a terminal, such as
escape sequences and bidirectional marks, by printable ones.
"""

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ..data_config import DataConfig
from ..errors import DataError, ShardError
from ..manifest import Split
from ..tokenizers.interface import Tokenizer
from .chunks import TokenRows
from .corruption import open_fetcher
from .rows import SplitReader
from .samples import OrderedSamples

_SHOWN_AS = {"\n": "↵\n", "\t": "␉"}
_CONTROL_PICTURES = 0x2400  # the picture of control character n is at this plus n
_DELETE = 0x7F
# control, format, unassigned, private use, surrogate, line and paragraph separators
_HIDDEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}


class DocumentPart(NamedTuple):
    """Holds a row's part of one document."""

    segments: list[tuple[str, bool]]  # stretches of text, and whether they are learned
    ends: bool  # whether the document ends in the row


@dataclass(frozen=True)
class DecodedRow:
    """Holds a row decoded to text."""

    place: str
    documents: tuple[DocumentPart, ...]
    num_padding: int


def peek_split(
    data: DataConfig, split: Split, count: int, tokenizer: Tokenizer
) -> list[DecodedRow]:
    """Decodes evenly spaced rows of a split, cut from the stream.

    Raises:
        ShardError: the split has no row, or a record batch is damaged.
    """
    reader = SplitReader(data.directory, split, seq_len=data.seq_len)
    if (total := reader.num_rows) == 0:
        raise ShardError(
            f"the {split} split of {data.directory} has no row of {data.seq_len + 1} tokens"
        )
    count = min(count, total)
    numbers = np.arange(count) * total // count
    rows = reader.read(numbers)
    places = [f"{split} row {number:,} of {total:,}" for number in numbers.tolist()]
    return [_decoded(place, rows, n, tokenizer) for n, place in enumerate(places)]


def peek_samples(data: DataConfig, samples: range, tokenizer: Tokenizer) -> list[DecodedRow]:
    """Decodes consecutive samples, by their numbers in the order of a run.

    Raises:
        DataError: a sample is damaged, or its segment is not sealed yet.
    """
    ordered = OrderedSamples(data, open_fetcher(data))
    if missing := ordered.prepare(samples.start, len(samples)):
        raise DataError(f"samples {samples.start} to {samples.stop - 1} cannot be read: {missing}")
    refs = ordered.order.refs_at(samples.start, len(samples))
    rows = ordered.read(refs)
    names = ordered.mixture.names
    columns = (refs.sources, refs.epochs, refs.segments, refs.rows)
    places = [
        f"sample {sample:,}: source {names[source]}, epoch {epoch}, segment {segment}, row {row:,}"
        for sample, source, epoch, segment, row in zip(
            samples, *(column.tolist() for column in columns), strict=True
        )
    ]
    return [_decoded(place, rows, n, tokenizer) for n, place in enumerate(places)]


def _decoded(place: str, rows: TokenRows, number: int, tokenizer: Tokenizer) -> DecodedRow:
    tokens = rows.tokens[number]
    learned = np.ones(len(tokens), dtype=bool)
    if rows.loss_mask is not None:  # it covers targets, so not a row's first token
        learned[1:] = rows.loss_mask[number]
        learned[0] = learned[1]
    num_padding = 0
    if rows.document_ids is not None:
        num_padding = int(np.count_nonzero(rows.document_ids[number] < 0))
    real = len(tokens) - num_padding
    parts = tuple(_document_parts(tokens[:real], learned[:real], tokenizer))
    return DecodedRow(place, parts, num_padding)


def _document_parts(
    tokens: np.ndarray, learned: np.ndarray, tokenizer: Tokenizer
) -> Iterator[DocumentPart]:
    """Yields the documents of a row, split after end-of-document tokens."""
    ends = (np.flatnonzero(tokens == tokenizer.end_of_document_id) + 1).tolist()
    if not ends or ends[-1] < len(tokens):
        ends.append(len(tokens))
    for begin, end in zip([0, *ends], ends, strict=False):
        runs = groupby(range(begin, end), key=learned.tolist().__getitem__)
        segments = [(tokenizer.decode(tokens[list(places)]), bool(known)) for known, places in runs]
        yield DocumentPart(segments, bool(tokens[end - 1] == tokenizer.end_of_document_id))


def visible(text: str) -> str:
    """Returns text whose characters are all printable, safe for a terminal.

    Lines end with ↵, control characters become their pictures (␛), other hidden ones their code
    points (<U+202E>).
    """
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character in _SHOWN_AS:
        return _SHOWN_AS[character]
    code = ord(character)
    if code < 0x20:
        return chr(_CONTROL_PICTURES + code)
    if code == _DELETE:
        return "␡"
    if unicodedata.category(character) in _HIDDEN:
        return f"<U+{code:04X}>"
    return character
