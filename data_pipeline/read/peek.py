"""Rows decoded for people: the text of each document in a row, what of it is learned, padding.

Text of strangers goes to a terminal here, so what would steer it (control characters, marks that
turn the direction of writing) is replaced by what shows that it is there.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..data_config import DataConfig
from ..document_index import DocumentIndex
from ..document_order import RowPart, RunOrder, SampleRow, parts_between
from ..errors import ShardError
from ..manifest import Split
from ..tokenizers.interface import Tokenizer
from .corruption import open_fetcher
from .rows import Prepared, RowReader, Rows

_SHOWN_AS = {"\n": "↵\n", "\t": "␉"}
_CONTROL_PICTURES = 0x2400  # the picture of control character n is at this plus n
_DELETE = 0x7F
# control, format (directions of writing, zero width), of no meaning, private, half a pair, lines
_HIDDEN = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}


@dataclass(frozen=True)
class Segment:
    """Is a stretch of text whose tokens are all learned, or all read only."""

    text: str
    learned: bool


@dataclass(frozen=True)
class DecodedPart:
    """Is what a row holds of one document."""

    part: RowPart
    segments: tuple[Segment, ...]
    ends: bool  # the document's end is in the row

    def as_json(self) -> dict[str, Any]:
        """Returns it as values of JSON."""
        return self.part.as_json() | {
            "ends": self.ends,
            "segments": [asdict(segment) for segment in self.segments],
        }


@dataclass(frozen=True)
class DecodedRow:
    """Is a row as people read it."""

    source: str
    era: int
    row: int
    parts: tuple[DecodedPart, ...]
    num_padding: int
    damaged: bool = False
    sample: SampleRow | None = None  # None: it was read from the shards, in no order

    def as_json(self) -> dict[str, Any]:
        """Returns it as values of JSON."""
        return {
            "source": self.source,
            "era": self.era,
            "row": self.row,
            "sample": None if self.sample is None else asdict(self.sample),
            "damaged": self.damaged,
            "num_padding": self.num_padding,
            "documents": [part.as_json() for part in self.parts],
        }


def peek_order(order: RunOrder, samples: range, tokenizer: Tokenizer) -> list[DecodedRow]:
    """Decodes samples of a run, in a row.

    Raises:
        DataError: the run has no such sample, or it is not decided yet, or damaged.
    """
    places, rows = order.read(samples)
    return [
        _decoded(
            place.source, place.era, place.row, order.parts_of(place), rows, n, tokenizer, place
        )
        for n, place in enumerate(places)
    ]


def peek_shards(
    data: DataConfig, split: Split, count: int, tokenizer: Tokenizer
) -> list[DecodedRow]:
    """Decodes rows from all over one split of a folder, evenly spaced, cut from the stream.

    Raises:
        ShardError: the split holds no row, or a record batch is damaged.
    """
    prepared = Prepared(
        data.directory, split=split, seq_len=data.seq_len, read_batch=open_fetcher(data)
    )
    index = DocumentIndex(data.directory, lambda: prepared.manifest, split)
    names = [source.name for source in prepared.manifest.sources]
    try:
        sources, eras, rows = _spread(prepared, names, count)
        found = RowReader(prepared, names).read(sources, eras, rows)
        decoded = []
        for place, (number, era, row) in enumerate(
            zip(sources.tolist(), eras.tolist(), rows.tolist(), strict=True)
        ):
            (span,) = prepared.layout(names[number], era).spans_of(row)
            parts = list(parts_between(index, names[number], era, *span))
            decoded.append(_decoded(names[number], era, row, parts, found, place, tokenizer))
        return decoded
    finally:
        prepared.close()
        index.close()


def _spread(
    prepared: Prepared, names: Sequence[str], count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns source, era and row of evenly spaced rows of all sealed eras."""
    places = [
        (number, era, prepared.num_rows(name, era))
        for number, name in enumerate(names)
        for era in range(len(prepared.manifest.eras(name)))
    ]
    ends = np.cumsum([rows for _, _, rows in places], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    if total == 0:
        raise ShardError(
            f"the {prepared.split} split of {prepared.directory} has no row of "
            f"{prepared.seq_len + 1} tokens: lower data.seq_len={prepared.seq_len}"
        )
    chosen = np.arange(min(count, total)) * total // min(count, total)
    eras = np.searchsorted(ends, chosen, side="right")
    starts = np.concatenate([[0], ends[:-1]])
    table = np.array([(number, era) for number, era, _ in places], dtype=np.int64)
    return table[eras, 0], table[eras, 1], chosen - starts[eras]


def _decoded(
    source: str,
    era: int,
    row: int,
    parts: Sequence[RowPart],
    rows: Rows,
    place: int,
    tokenizer: Tokenizer,
    sample: SampleRow | None = None,
) -> DecodedRow:
    """Decodes row `place` of those that were read."""
    tokens = rows.tokens[place]
    learned = np.ones(len(tokens), dtype=bool)
    if rows.loss_mask is not None:  # of the targets: nothing is said of a row's first token
        learned[1:] = rows.loss_mask[place]
        learned[0] = learned[1]
    decoded, begin = [], 0
    for part in parts:
        span = slice(begin, begin + part.num_tokens)
        decoded.append(_decoded_part(part, tokens[span], learned[span], tokenizer))
        begin = span.stop
    damaged = bool(rows.damaged[place])
    return DecodedRow(source, era, row, tuple(decoded), len(tokens) - begin, damaged, sample)


def _decoded_part(
    part: RowPart, tokens: np.ndarray, learned: np.ndarray, tokenizer: Tokenizer
) -> DecodedPart:
    segments = []
    begin = 0
    for is_learned, run in groupby(learned.tolist()):
        end = begin + len(list(run))
        text = tokenizer.decode(tokens[begin:end])
        segments.append(Segment(text, is_learned))
        begin = end
    ends = part.first + part.num_tokens == part.document.num_tokens
    return DecodedPart(part, tuple(segments), ends)


def visible(text: str) -> str:
    """Returns text in which every character shows and none steers the terminal.

    Lines end with ↵, control characters are their pictures (␛), and other hidden ones their
    numbers (<U+202E>).
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
