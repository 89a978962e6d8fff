"""Reads one split: a pure function of the split and its input, so it can run on any machine."""

from collections.abc import Iterator
from typing import Literal

from ..prepare_config import SourceConfig
from .documents import Document, InputSplit
from .formats import format_of
from .records import RecordRules


def read_documents(
    split: InputSplit,
    source: SourceConfig,
    *,
    encoding_faults: Literal["error", "drop"] = "error",
) -> Iterator[Document]:
    """Reads the documents of one split in the order of its input.

    Args:
        split: what is read.
        source: names the fields of its records.
        encoding_faults: what is done with text that is no Unicode; "drop" yields it as a document
            with a `fault`.

    Raises:
        InputError: something cannot be read; with its place.
    """
    rules = RecordRules(source, drop_faults=encoding_faults == "drop")
    return format_of(split.kind).read(split, rules)
