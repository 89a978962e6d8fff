"""The English prose that every Python carries, as input (`data_pipeline/sources/english.py`)."""

from collections.abc import Iterator

from .documents import Document, InputSplit, SplitRange
from .english import NUM_PARTS, embedded_part
from .records import RecordRules

EMBEDDED = "embedded"
"""The name of this input."""

_PART_BYTES = 500_000


def embedded_size(url: str) -> int:
    """Returns the number of parts of the embedded corpus."""
    return NUM_PARTS


def embedded_ranges(url: str, size: int, split_bytes: int) -> Iterator[SplitRange]:
    """Yields one range per part."""
    for part in range(size):
        yield SplitRange(part, part + 1, _PART_BYTES)


def read_embedded(split: InputSplit, rules: RecordRules) -> Iterator[Document]:
    """Reads the documents of one part."""
    for row, text in embedded_part(split.start):
        yield Document(text, EMBEDDED, row)
