"""Reads Parquet and Arrow: a record is a row, and only the needed columns are read.

Text may be of any type that holds it: strings, views, bytes that are UTF-8, dictionaries
(categories) and runs of these. If it is not UTF-8, its rows are read as bytes and decoded one by one,
so that the error names the row, or only that row is dropped. A missing value counts as an empty
document.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..atomic import atomic_write
from ..errors import InputError
from ..retries import is_of_connection
from ..words import some_of
from .compression import check_head
from .documents import Document, InputSplit, SplitRange, even_ranges
from .files import opened
from .records import NOT_UTF8, ORIGIN_FIELD, RecordRules, document_of, shown

_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
_TEXTS = {*_BYTES, *_BYTES.values()}
_IDS, _MASK = "input_ids", "attention_mask"  # as transformers' tokenizers name them
_ROWS = 64  # per batch: enough for full speed, few enough for long documents


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes rows with equal keys as a Parquet file, atomically."""
    with atomic_write(path) as file:
        pq.write_table(pa.Table.from_pylist(rows), file)


def row_group_ranges(url: str, size: int, split_bytes: int) -> Iterator[SplitRange]:
    """Yields ranges of the row groups of a Parquet file."""
    with opened(url) as file, _columnar_errors(url, "Parquet"):
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

    The footer does not give the sizes of the batches.
    """
    with opened(url) as file, _columnar_errors(url, "Arrow"):
        reader = _arrow_reader(file)
        if not isinstance(reader, pa.ipc.RecordBatchFileReader):
            yield SplitRange(0, 1, size)
            return
        num_batches = reader.num_record_batches
    yield from even_ranges(num_batches, size, split_bytes)


def read_parquet(split: InputSplit, rules: RecordRules) -> Iterator[Document]:
    """Reads the documents of a split's row groups of a Parquet file."""
    with opened(split.url, split.size) as file, _columnar_errors(split.url, "Parquet"):
        parquet = pq.ParquetFile(file)
        columns = _columns(split.url, parquet.schema_arrow, rules)
        groups = range(split.start, split.stop)
        batches = parquet.iter_batches(_ROWS, row_groups=groups, columns=columns)
        yield from _documents(batches, split, rules)


def read_arrow(split: InputSplit, rules: RecordRules) -> Iterator[Document]:
    """Reads the documents of a split's record batches of an Arrow file, or of a whole stream."""
    with opened(split.url, split.size) as file, _columnar_errors(split.url, "Arrow"):
        reader = _arrow_reader(file)
        columns = _columns(split.url, reader.schema, rules)
        yield from _documents(_small_batches(reader, split, columns), split, rules)


def token_rows(split: InputSplit) -> Iterator[np.ndarray]:
    """Yields the ids of each row, without what its `attention_mask` leaves out as padding.

    Raises:
        InputError: there is no column `input_ids` of lists of whole numbers, or it has nulls.
    """
    with opened(split.url, split.size) as file, _columnar_errors(split.url, "Arrow"):
        reader = _arrow_reader(file)
        kinds = {field.name: field.type for field in reader.schema}
        if not pa.types.is_integer(getattr(kinds.get(_IDS), "value_type", pa.null())):
            there = some_of(f"{name!r} ({kind!s:.80})" for name, kind in kinds.items())
            raise InputError(
                f"{split.url}: no column {_IDS!r} with lists of whole numbers; its columns are {there}: "
                f"save dataset.rename_column(NAME, {_IDS!r}), or read its text with --input"
            )
        columns = [name for name in (_IDS, _MASK) if name in kinds]
        for batch in _small_batches(reader, split, columns):
            for row in zip(*batch.columns, strict=True):
                if not all(one.is_valid and not one.values.null_count for one in row):
                    names = " or ".join(map(repr, columns))
                    raise InputError(f"{split.label}: column {names} has nulls: drop these rows")
                ids, *mask = (one.values.to_numpy(zero_copy_only=False) for one in row)
                yield ids[mask[0] != 0] if mask else ids


def _small_batches(reader: Any, split: InputSplit, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Yields some rows at a time of a split's batches, or of a whole stream."""
    is_file = isinstance(reader, pa.ipc.RecordBatchFileReader)
    whole = map(reader.get_batch, range(split.start, split.stop)) if is_file else reader
    for batch in whole:
        chosen = batch.select(columns)
        # Arrow trusts a file's offsets; validate as bytes, because invalid UTF-8 is reported later
        for column in chosen.columns:
            _as_bytes(column).validate(full=True)
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
    """Returns the rows of a small batch, with text as bytes in columns that are not all UTF-8."""
    columns = [_values(_plain(column)) for column in batch.columns]
    return [dict(zip(batch.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: pa.Array) -> list[Any]:
    try:
        values = column.to_pylist()
        if pa.types.is_fixed_size_binary(column.type):  # padded with nulls, by NumPy for example
            return [value and value.rstrip(b"\0") for value in values]
        return values
    except UnicodeDecodeError:
        return _as_bytes(column).to_pylist()


def _plain(column: pa.Array) -> pa.Array:
    """Returns a column without extensions, dictionaries and runs."""
    kind = column.type
    if isinstance(column, pa.ExtensionArray):
        return _plain(column.storage)
    if pa.types.is_dictionary(kind):
        return _plain(column.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return _plain(pc.call_function("run_end_decode", [column]))
    return column


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
    return document_of(record, row, rules, where=where, file_name=file_name)


def _as_bytes(column: pa.Array) -> pa.Array:
    """Returns a column whose text, also that of a dictionary or of runs, is bytes."""
    kind = column.type
    if isinstance(column, pa.ExtensionArray):
        return _as_bytes(column.storage)
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(
            column.indices, _as_bytes(column.dictionary), safe=False
        )
    if pa.types.is_run_end_encoded(kind):
        return pa.RunEndEncodedArray.from_arrays(column.run_ends, _as_bytes(column.values))
    return column.view(_BYTES[kind]) if kind in _BYTES else column


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
    texts = [field.name for field in schema if _held(field.type) in _TEXTS]
    nested = [field.name for field in schema if pa.types.is_nested(_held(field.type))]
    if (same := schema.names.count(name)) > 1:
        raise InputError(f"{url}: {same} columns are called {name!r}: give them different names")
    if name not in schema.names:
        raise InputError(
            f"{url}: no column {name!r}; {rules.advice(name, schema.names, texts, nested, 'columns')}"
        )
    held, is_id = _held(schema.field(name).type), rules.setting_of(name) == "id_field"
    if held in _TEXTS or pa.types.is_fixed_size_binary(held) or pa.types.is_null(held):
        return
    if is_id and pa.types.is_integer(held):
        return
    wanted = "text or whole numbers" if is_id else "text"
    raise InputError(
        f"{url}: column {name!r} holds {held!s:.200}, not {wanted}; "
        f"{rules.advice(name, schema.names, texts, nested, 'columns')}"
    )


def _held(kind: pa.DataType) -> pa.DataType:
    """Returns the type of a column's values without extensions, dictionaries and runs."""
    if isinstance(kind, pa.BaseExtensionType):
        return _held(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _held(kind.value_type)
    return kind


@contextmanager
def _columnar_errors(url: str, name: str) -> Iterator[None]:
    """Turns what Arrow raises about a file, which is of many classes, into an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) and not isinstance(error, pa.ArrowException):
            raise
        is_of_arrow = type(error) is OSError and error.errno is None  # else of the file system
        if is_of_connection(error) and not is_of_arrow:
            raise
        with opened(url) as file:
            check_head(url, file.read(64))
        raise InputError(
            f"{url} is not a readable {name} file ({type(error).__name__}: {error!s:.300}): check "
            "that it is whole"
        ) from error
