"""The values that formats, planning and tasks share: input splits and documents."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

Role = Literal["train", "validation", "both"]


@dataclass(frozen=True)
class InputSplit:
    """Names a part of the input that one task reads: units [start, stop) of a file.

    The unit is a byte (.txt, .jsonl), a row group (.parquet), a record batch (.arrow), a part of the
    embedded corpus, a function's split, or the whole file (compressed files, Arrow streams). A line
    belongs to the split in which it begins. `size`, that of the whole file, reveals changes.
    """

    source: str
    url: str
    kind: str  # the name of its format
    start: int
    stop: int
    size: int
    role: Role
    num_bytes: int  # of text, estimated
    stamp: str = ""  # of the file when it was found (`files.FoundFile`)

    @property
    def file_name(self) -> str:
        """Returns the file's name without folders, the default origin of its documents."""
        name = self.url.rsplit("/", 1)[-1]
        return name.encode(errors="backslashreplace").decode()  # a disk's names need not be Unicode

    @property
    def label(self) -> str:
        """Returns URL and range, for messages and the manifest."""
        return f"{self.url}[{self.start}:{self.stop}]"

    @property
    def local_label(self) -> str:
        """Returns file name and range, independent of the file's folder."""
        return f"{self.file_name}[{self.start}:{self.stop}]"


class SplitRange(NamedTuple):
    """Holds the units of one split, and the estimated bytes of their text."""

    start: int
    stop: int
    num_bytes: int


def byte_ranges(url: str, size: int, split_bytes: int) -> Iterator[SplitRange]:
    """Yields byte ranges of a file of lines; an empty file has one empty range."""
    for start, stop in pairwise([*range(0, max(size, 1), split_bytes), size]):
        yield SplitRange(start, stop, stop - start)


def even_ranges(count: int, num_bytes: int, split_bytes: int) -> Iterator[SplitRange]:
    """Yields ranges of equal numbers of units, whose own sizes are unknown."""
    num_splits = max(1, min(count, -(-num_bytes // split_bytes)))
    bounds = [count * part // num_splits for part in range(num_splits + 1)]
    for start, stop in pairwise(bounds):
        yield SplitRange(start, stop, num_bytes // num_splits)


@dataclass(frozen=True)
class Document:
    """Holds one document as read; `row` counts the records of its split.

    If a record has prompt and answer, `text` is the answer. A `fault` is the reason why a document has
    no valid text; `text` then shows its bytes. `tokens` are the ids of text that is not tokenised again.
    """

    text: str
    source: str
    row: int
    prompt: str = ""
    record_id: str = ""
    fault: str = ""
    tokens: np.ndarray | None = field(default=None, compare=False)

    @property
    def whole(self) -> str:
        """Returns prompt and answer as one text, for filters and decontamination."""
        return f"{self.prompt}\n{self.text}" if self.prompt else self.text
