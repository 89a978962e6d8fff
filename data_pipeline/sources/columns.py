"""Reads Parquet and Arrow: a record is a row, and only the needed columns are read.

If text is not UTF-8, its rows are read as bytes and decoded one by one, so that the error names the
row, or only that row is dropped. A missing value counts as an empty document.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..atomic import atomic_write
from ..errors import InputError
from .documents import Document, InputSplit, SplitRange
from .files import opened
from .records import NOT_UTF8, ORIGIN_FIELD, RecordRules, document_of, shown

_ROWS = 64  # per batch: enough for full speed, few enough for long documents


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows with equal keys as a Parquet file, atomically."""
    with atomic_write(path) as file:
        pq.write_table(pa.Table.from_pylist(rows), file)


def row_group_ranges(url: str, size: int, split_bytes: int) -> Iterator[SplitRange]:
    """Yields ranges of the row groups of a Parquet file."""
    with opened(url) as file, _columnar_errors(url):
        metadata = pq.ParquetFile(file).metadata
        sizes = [
            metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)
        ]
    start = filled = 0
    for group, group_bytes in enumerate(sizes):
        if filled and filled + group_bytes > split_bytes:
            yield SplitRange(start, group, filled)
            start, filled = group, 0
        filled += group_bytes
    yield SplitRange(start, len(sizes), filled)


def record_batch_ranges(url: str, size: int, split_bytes: int) -> Iterator[SplitRange]:
    """Yields ranges of the record batches of an Arrow file, or one range for a stream.

    It divides the number of batches evenly, because the footer does not give their sizes.
    """
    with opened(url) as file, _columnar_errors(url):
        reader = _arrow_reader(file)
        if not isinstance(reader, pa.ipc.RecordBatchFileReader):
            yield SplitRange(0, 1, size)
            return
        num_batches = reader.num_record_batches
    num_splits = max(1, min(num_batches, -(-size // split_bytes)))
    bounds = [num_batches * part // num_splits for part in range(num_splits + 1)]
    for start, stop in pairwise(bounds):
        yield SplitRange(start, stop, size // num_splits)


def read_parquet(split: InputSplit, rules: RecordRules) -> Iterator[Document]:
    """Reads the documents of a split's row groups of a Parquet file."""
    with opened(split.url, split.size) as file, _columnar_errors(split.url):
        parquet = pq.ParquetFile(file)
        columns = _columns(split.url, parquet.schema_arrow, rules)
        groups = range(split.start, split.stop)
        batches = parquet.iter_batches(_ROWS, row_groups=groups, columns=columns)
        yield from _documents(batches, split, rules)


def read_arrow(split: InputSplit, rules: RecordRules) -> Iterator[Document]:
    """Reads the documents of a split's record batches of an Arrow file, or of a whole stream."""
    with opened(split.url, split.size) as file, _columnar_errors(split.url):
        reader = _arrow_reader(file)
        columns = _columns(split.url, reader.schema, rules)
        is_file = isinstance(reader, pa.ipc.RecordBatchFileReader)
        whole = map(reader.get_batch, range(split.start, split.stop)) if is_file else reader
        yield from _documents(_small_batches(whole, columns), split, rules)


def _small_batches(whole: Any, columns: list[str]) -> Iterator[pa.RecordBatch]:
    for batch in whole:
        chosen = batch.select(columns)
        # Arrow trusts a file's offsets; validate as bytes, because invalid UTF-8 is reported later
        _as_bytes(chosen).validate(full=True)
        for start in range(0, chosen.num_rows, _ROWS):
            yield chosen.slice(start, _ROWS)


def _documents(
    batches: Iterator[pa.RecordBatch], split: InputSplit, rules: RecordRules
) -> Iterator[Document]:
    row = 0
    for batch in batches:
        for record in _records(batch):
            place = f"{split.label}, record {row}"
            yield _document(record, row, rules, place, split.file_name)
            row += 1


def _records(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Returns the rows of a batch, with text as bytes if any of it is not UTF-8."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        return _as_bytes(batch).to_pylist()


def _document(
    record: dict[str, Any], row: int, rules: RecordRules, where: str, file_name: str
) -> Document:
    for name, value in record.items():
        if isinstance(value, bytes):
            try:
                record[name] = value.decode("utf-8")
            except UnicodeDecodeError as error:
                if rules.drop_faults:
                    return Document(shown(value), file_name, row, fault=NOT_UTF8)
                raise InputError(
                    f"{where}: column {name!r} is not UTF-8 (byte 0x{value[error.start]:02x} at "
                    f"{error.start}, {error.reason}): repair the file, or drop such documents with "
                    "prepare.encoding_faults=drop"
                ) from error
        elif value is None and name != rules.fields.id_field:
            record[name] = ""
    return document_of(record, row, rules, where=where, file_name=file_name)


def _as_bytes(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns a view of a batch with text columns as bytes."""
    kinds = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    columns = [
        column.view(kinds[column.type]) if column.type in kinds else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _arrow_reader(file: IO[bytes]) -> Any:
    """Opens an Arrow file, or a stream, which other programs write with the same suffix."""
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    return pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)


def _columns(url: str, schema: pa.Schema, rules: RecordRules) -> list[str]:
    for name in rules.names:
        _check_column(url, schema, name, rules)
    wanted = [*rules.names, ORIGIN_FIELD] if ORIGIN_FIELD in schema.names else rules.names
    return list(dict.fromkeys(wanted))


def _check_column(url: str, schema: pa.Schema, name: str, rules: RecordRules) -> None:
    setting = rules.setting_of(name)
    if name not in schema.names:
        names = ", ".join(map(repr, schema.names))
        raise InputError(
            f"{url}: no column {name!r}; its columns are {names}: set {setting} to one of them"
        )
    column_type = schema.field(name).type
    is_text = pa.types.is_string(column_type) or pa.types.is_large_string(column_type)
    if is_text or (setting == "id_field" and pa.types.is_integer(column_type)):
        return
    wanted = "text or whole numbers" if setting == "id_field" else "text"
    raise InputError(
        f"{url}: column {name!r} holds {column_type}, not {wanted}: set {setting} to another"
    )


@contextmanager
def _columnar_errors(url: str) -> Iterator[None]:
    name = "Parquet" if url.endswith(".parquet") else "Arrow"
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(
            f"{url} is not a readable {name} file ({error}): check that it is whole"
        ) from error
