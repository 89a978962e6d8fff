"""What is read: a part of the input that one task reads, and the documents that it gives.

Formats, planning and everything after them share these values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

Role = Literal["train", "validation", "both"]


@dataclass(frozen=True)
class InputSplit:
    """Names a part of the input that one task reads: units [start, stop) of a file.

    The unit is a byte (.txt, .jsonl), a row group (.parquet), a record batch (.arrow), a part of the
    embedded corpus or of what a function returns, or the file (what is compressed, an Arrow stream).
    A line belongs to the split in which it begins. `size` is the whole file's, to notice that it
    has changed. `number` counts the splits of a source, `source` is its name.
    """

    source: str
    number: int
    url: str
    kind: str  # the name of its format
    start: int
    stop: int
    size: int
    role: Role
    num_bytes: int  # about how much text

    @property
    def file_name(self) -> str:
        """Returns the file's name without folders: where documents come from that do not say."""
        return self.url.rsplit("/", 1)[-1]

    @property
    def label(self) -> str:
        """Returns URL and range, for messages and the manifest."""
        return f"{self.url}[{self.start}:{self.stop}]"

    @property
    def local_label(self) -> str:
        """Returns file name and range: the same wherever the file lies."""
        return f"{self.file_name}[{self.start}:{self.stop}]"


class SplitRange(NamedTuple):
    """Holds the units of one split, and about how many bytes of text they are."""

    start: int
    stop: int
    num_bytes: int


def byte_ranges(url: str, size: int, split_bytes: int) -> Iterator[SplitRange]:
    """Yields ranges of bytes of a file of lines; one of no bytes where it is empty."""
    for start, stop in pairwise([*range(0, max(size, 1), split_bytes), size]):
        yield SplitRange(start, stop, stop - start)


@dataclass(frozen=True)
class Document:
    """Holds one document as it was found; `row` counts the records of its split.

    Where a record is a prompt and its answer, `text` is the answer. A `fault` says why there is no
    text to read, in words that many documents share; then `text` shows what there is instead.
    """

    text: str
    source: str
    row: int
    prompt: str = ""
    record_id: str = ""
    fault: str = ""

    @property
    def whole(self) -> str:
        """Returns prompt and answer as one text, for what looks at words."""
        return f"{self.prompt}\n{self.text}" if self.prompt else self.text
