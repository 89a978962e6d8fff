"""Plain text: a file is many documents, cut where the text itself pauses.

A document ends at the first blank line after so many characters, and at a line end, or anywhere,
where there is no blank line.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from .documents import Document, InputSplit
from .lines import decoded, split_lines
from .records import RecordRules

_DOCUMENT_CHARS = 8000
_DOCUMENT_MAX_CHARS = 4 * _DOCUMENT_CHARS


@dataclass
class _Growing:
    """Collects the lines of one document."""

    parts: list[str] = field(default_factory=list)
    size: int = 0
    fault: str = ""
    faulty_line: str = ""

    def add(self, text: str, fault: str) -> None:
        self.parts.append(text)
        self.size += len(text)
        if fault and not self.fault:
            self.fault, self.faulty_line = fault, text

    def ends_with(self, line: str) -> bool:
        is_pause = self.size >= _DOCUMENT_CHARS and not line.strip()
        return is_pause or self.size >= _DOCUMENT_MAX_CHARS

    def texts(self) -> Iterator[str]:
        """Yields the document, in pieces where it is too long."""
        text = self.faulty_line if self.fault else "".join(self.parts)
        for start in range(0, len(text), _DOCUMENT_MAX_CHARS):
            yield text[start : start + _DOCUMENT_MAX_CHARS]


def read_text(split: InputSplit, rules: RecordRules) -> Iterator[Document]:
    """Reads the documents of a split of a text file.

    Raises:
        InputError: it cannot be read.
    """
    for row, (text, fault) in enumerate(_pieces(split, rules)):
        yield Document(text, split.file_name, row, fault=fault)


def _pieces(split: InputSplit, rules: RecordRules) -> Iterator[tuple[str, str]]:
    growing = _Growing()
    for line in split_lines(split):
        text, fault = decoded(split, line, drop_faults=rules.drop_faults)
        growing.add(text, fault)
        if growing.ends_with(text):
            yield from ((piece, growing.fault) for piece in growing.texts())
            growing = _Growing()
    yield from ((piece, growing.fault) for piece in growing.texts())
