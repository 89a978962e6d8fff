"""Reads lines with their place from a file's bytes, and documents from lines."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ..data_config import MAX_DOCUMENT_BYTES
from ..encodings import SAMPLE_BYTES, certain_encoding, conversion, decodes
from ..errors import InputError
from ..files import fault
from .compression import check_head, chunks, is_compressed, text_bytes
from .documents import Document, InputSplit, SplitRange
from .files import opened
from .records import NOT_JSON, NOT_UTF8, SHOWN_CHARS, RecordRules, document_of, shown

MAX_LINE_BYTES = 2 * MAX_DOCUMENT_BYTES
"""Longer lines are an error, because a few kB of .zst could otherwise take all memory. The limit
exceeds that of documents, because JSON escapes lengthen text."""


class Line(NamedTuple):
    """Holds a line with its newline, its first byte's offset, and its number if known."""

    offset: int
    number: int | None
    data: bytes


def whole_file(url: str, size: int, split_bytes: int) -> Iterator[SplitRange]:
    """Yields the only range of a compressed file, which has no entry points."""
    yield SplitRange(0, 1, text_bytes(size))


def split_lines(split: InputSplit) -> Iterator[Line]:
    """Yields the lines that begin in a split."""
    with opened(split.url, split.size) as file:
        offset, found = split.start, lines(chunks(file, split.url, split.kind), split)
        if offset:  # a line that reaches into this split belongs to the previous one
            file.seek(offset - 1)
            offset += len(next(found, b"")) - 1
        for line in _placed(found, offset):
            if line.offset >= split.stop and not is_compressed(split.kind):
                return
            yield line


def _placed(found: Iterable[bytes], offset: int = 0) -> Iterator[Line]:
    """Yields lines from an offset on; their numbers are known only from the beginning of a file."""
    is_numbered = offset == 0
    for number, data in enumerate(found, start=1):
        yield Line(offset, number if is_numbered else None, data)
        offset += len(data)


def lines(pieces: Iterable[bytes], split: InputSplit) -> Iterator[bytes]:
    """Yields lines with their newline, in time linear in their length."""
    pending: list[bytes] = []
    size = 0
    for number, piece in enumerate(pieces):
        if number == split.start == 0:
            _check_text(split, piece)
        pending.append(piece)
        size += len(piece)
        if b"\n" in piece:
            *whole, last = b"".join(pending).split(b"\n")
            pending, size = [last], len(last)
            for line in whole:
                yield line + b"\n"
        if size > MAX_LINE_BYTES:
            beyond = "unpacked " if is_compressed(split.kind) else ""
            raise InputError(
                f"{split.url}: a line has more than {MAX_LINE_BYTES:,} {beyond}bytes, the limit of "
                "data_pipeline/sources/lines.py: break the file into lines, or leave it out"
            )
    if rest := b"".join(pending):
        yield rest


def _check_text(split: InputSplit, head: bytes) -> None:
    """Raises an InputError with the remedy if a file's first bytes, unpacked, are not of lines."""
    check_head(split.url, head, is_unpacked=is_compressed(split.kind))
    if other := certain_encoding(head):
        raise InputError(f"{split.url}: not UTF-8 but {other}. {conversion(head)}")
    if b"\n" not in head and b"\r" in head.rstrip(b"\r") and decodes(head):
        raise InputError(
            f"{split.url}: its lines end with a carriage return alone. Convert the file first: "
            "tr '\\r' '\\n' < OLD > NEW"
        )


class Place(NamedTuple):
    """Formats a line's place lazily, because few places are ever shown."""

    split: InputSplit
    line: Line

    def __str__(self) -> str:
        return where(self.split, self.line)


def where(split: InputSplit, line: Line, byte: int = 0) -> str:
    """Returns file, byte and line number of a byte in a line, for messages."""
    unpacked = " (unpacked)" if is_compressed(split.kind) else ""
    number = f", line {line.number}" if line.number else ""
    return f"{split.url}, byte {line.offset + byte}{unpacked}{number}"


def decoded(split: InputSplit, line: Line, *, drop_faults: bool) -> tuple[str, str]:
    """Returns the text of a line, and its fault, "" if it is UTF-8; otherwise the text shows its bytes.

    Raises:
        InputError: it is not UTF-8, and `drop_faults` is off.
    """
    try:
        text = line.data.decode("utf-8")
    except UnicodeDecodeError as error:
        if drop_faults:
            return shown(line.data), NOT_UTF8
        raise InputError(
            f"{where(split, line, error.start)}: not UTF-8 (byte 0x{line.data[error.start]:02x}, "
            f"{error.reason}). {conversion(_sample(split, line))}; or drop such documents with "
            "prepare.encoding_faults=drop"
        ) from error
    return text.removeprefix("\ufeff"), ""  # a byte order mark, also of files that were joined


def _sample(split: InputSplit, line: Line) -> bytes:
    """Returns bytes that show the encoding of a file with a faulty line: its first ones, or the line's."""
    with opened(split.url) as file:
        head = next(chunks(file, split.url, split.kind), b"")
        _check_text(split, head)  # this split may be the first to be read
        if not decodes(head[:SAMPLE_BYTES]):
            return head[:SAMPLE_BYTES]
        if is_compressed(split.kind):
            return line.data[:SAMPLE_BYTES]
        file.seek(line.offset)
        return file.read(SAMPLE_BYTES)


def read_json_lines(split: InputSplit, rules: RecordRules) -> Iterator[Document]:
    """Reads the documents of a split of JSON lines, at about 100 MB/s/core."""
    row = 0
    for line in split_lines(split):
        text, fault = decoded(split, line, drop_faults=rules.drop_faults)
        if not fault and (not text or text.isspace()):
            continue
        record, place = {}, Place(split, line)
        try:
            record = {} if fault else _object(text, place)
        except InputError:
            if not rules.drop_faults:
                raise
            text, fault = text[:SHOWN_CHARS], NOT_JSON
        if fault:
            yield Document(text, split.file_name, row, fault=fault)
        else:
            yield document_of(record, row, rules, where=place, file_name=split.file_name)
        row += 1


def json_records(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the records of a whole file of JSON lines, each with its place for messages.

    Raises:
        InputError: the file or a line cannot be read; the message names its place.
    """
    whole = InputSplit("", url, url, 0, 0, 0, "both", 0)
    with opened(url) as file:
        for line in _placed(lines(chunks(file, url), whole)):
            if line.data.strip():
                place = where(whole, line)
                yield place, _object(line.data, place)


def _object(text: str | bytes, place: object) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not valid JSON ({fault(error)}); {_OBJECTS}") from error
    if not isinstance(record, dict):
        raise InputError(f"{place}: a JSON {type(record).__name__}; {_OBJECTS}")
    return record


_OBJECTS = (
    "each line must be one JSON object: repair the line, drop such lines with "
    "prepare.encoding_faults=drop (or 100, for at most so many), or make lines of a list with "
    "jq -c '.[]' FILE"
)

_DOCUMENT_CHARS = 8000
_DOCUMENT_MAX_CHARS = 4 * _DOCUMENT_CHARS


def read_text(split: InputSplit, rules: RecordRules) -> Iterator[Document]:
    """Reads the documents of a split of a text file; of one with a fault, the faulty line."""
    row = 0
    for found in _documents(split, rules):
        whole = "".join(text for text, _ in found), ""
        text, fault = next((line for line in found if line[1]), whole)
        for start in range(0, len(text), _DOCUMENT_MAX_CHARS):
            part = text[start : start + _DOCUMENT_MAX_CHARS]
            yield Document(part, split.file_name, row, fault=fault)
            row += 1


def _documents(split: InputSplit, rules: RecordRules) -> Iterator[list[tuple[str, str]]]:
    """Yields the lines of each document, with their faults; the last one may have none."""
    found: list[tuple[str, str]] = []
    size = 0
    for line in split_lines(split):
        text, fault = decoded(split, line, drop_faults=rules.drop_faults)
        found.append((text, fault))
        size += len(text)
        is_pause = size >= _DOCUMENT_CHARS and not text.strip()
        if is_pause or size >= _DOCUMENT_MAX_CHARS:
            yield found
            found, size = [], 0
    yield found
