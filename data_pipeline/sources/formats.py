"""The table of readable formats; a new one needs a module beside this one and a line here."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ...own_parts import PYTHON
from ..errors import InputError
from ..prepare_config import SourceConfig
from .columns import read_arrow, read_parquet, record_batch_ranges, row_group_ranges
from .documents import Document, InputSplit, SplitRange, byte_ranges
from .embedded import EMBEDDED, embedded_ranges, embedded_size, read_embedded
from .function import function_ranges, function_size, read_function
from .lines import read_json_lines, read_text, whole_file
from .records import RecordRules


@dataclass(frozen=True)
class Format:
    """Defines how one kind of input is cut into splits, and how a split is read."""

    # from URL, size of the file and prepare.split_bytes
    ranges: Callable[[str, int, int], Iterator[SplitRange]]
    # must be pure: the same split gives the same documents on any machine
    read: Callable[[InputSplit, RecordRules], Iterator[Document]]
    # for input that is not a file: its size in its own units
    size: Callable[[str], int] | None = None
    has_fields: bool = True


FILE_FORMATS = {
    ".txt": Format(byte_ranges, read_text, has_fields=False),
    ".txt.gz": Format(whole_file, read_text, has_fields=False),
    ".txt.zst": Format(whole_file, read_text, has_fields=False),
    ".jsonl": Format(byte_ranges, read_json_lines),
    ".jsonl.gz": Format(whole_file, read_json_lines),
    ".jsonl.zst": Format(whole_file, read_json_lines),
    ".parquet": Format(row_group_ranges, read_parquet),
    ".arrow": Format(record_batch_ranges, read_arrow),
}
"""Formats by the suffix of a file's name."""

OTHER_FORMATS = {
    EMBEDDED: Format(embedded_ranges, read_embedded, embedded_size, has_fields=False),
    PYTHON: Format(function_ranges, read_function, function_size),
}
"""Formats of input that is not a file, by the prefix of its name."""

SUFFIXES = tuple(FILE_FORMATS)


def kind_of(url: str) -> str:
    """Returns the key of a file's format.

    Raises:
        InputError: no format has this suffix.
    """
    for suffix in SUFFIXES:
        if url.endswith(suffix):
            return suffix
    raise InputError(f"input {url!r} has an unknown suffix: give one of {', '.join(SUFFIXES)}")


def format_of(kind: str) -> Format:
    """Returns a format by its key."""
    return FILE_FORMATS[kind] if kind in FILE_FORMATS else OTHER_FORMATS[kind]


def read_documents(
    split: InputSplit,
    source: SourceConfig,
    *,
    encoding_faults: Literal["error", "drop"] = "error",
) -> Iterator[Document]:
    """Reads the documents of one split, in order.

    Args:
        split: the split.
        source: names the fields of its records.
        encoding_faults: "error" raises on invalid Unicode; "drop" yields a document with a `fault`.

    Raises:
        InputError: something cannot be read; the message names its place.
    """
    rules = RecordRules(source, drop_faults=encoding_faults == "drop")
    return format_of(split.kind).read(split, rules)
