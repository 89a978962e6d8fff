"""From file names, globs and URLs to documents.

1. `plan_splits` expands what the user gave into input splits: one file, or a byte range (.txt,
   .jsonl), row groups (.parquet) or record batches (.arrow) of a large one, in sorted order. A
   compressed .txt or .jsonl is one split, for there is no way into its middle, and so is an Arrow
   stream. A folder is all files in it that can be read.
2. `read_documents` reads one split. It is a pure function of the split and the file, so it can run
   on any machine.

Files are opened through fsspec: a URL (s3://, gs://, hf://, https://) works where its package is
installed. Every error names the file and, inside it, the byte and the line. Reading and parsing
JSON lines takes about 100 MB/s/core.
"""

import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import IO, Any, Literal

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from ..config import DataConfig, SourceConfig
from ..corpus import NUM_PARTS, embedded_part
from ..errors import InputError

EMBEDDED = "embedded"
Kind = Literal[
    "embedded",
    "txt",
    "txt.gz",
    "txt.zst",
    "jsonl",
    "jsonl.gz",
    "jsonl.zst",
    "parquet",
    "arrow",
]
Role = Literal["train", "validation", "both"]

_SUFFIXES: dict[str, Kind] = {
    ".txt": "txt",
    ".txt.gz": "txt.gz",
    ".txt.zst": "txt.zst",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_COMPRESSED = (".gz", ".zst")
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "sftp": "paramiko",
}
_CHUNK_BYTES = 2**20
_EMBEDDED_PART_BYTES = 500_000
_COMPRESSION_RATIO = 4  # of text, about
# A .txt is cut into documents at the first blank line after so many characters,
_TEXT_DOCUMENT_CHARS = 8000
# and at a line end, or anywhere, where there is no blank line.
_TEXT_DOCUMENT_MAX_CHARS = 4 * _TEXT_DOCUMENT_CHARS


@dataclass(frozen=True)
class InputSplit:
    """Names a part of the input that one task reads: units [start, stop) of a file.

    The unit is a byte (.txt, .jsonl), a row group (.parquet), a record batch (.arrow), a part of the
    embedded corpus, or the file (what is compressed, an Arrow stream). A line belongs to the split
    in which it begins. `size` is the whole file's, to notice that it has changed. `number` counts
    the splits of a source, `source` is its name.
    """

    source: str
    number: int
    url: str
    kind: Kind
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


@dataclass(frozen=True)
class Document:
    """Holds one document as it was found; `row` counts the records of its split.

    Where a record is a prompt and its answer, `text` is the answer. A `fault` says why there is no
    text to read, in words that many documents share.
    """

    text: str
    source: str
    row: int
    prompt: str = ""
    record_id: str = ""
    fault: str = ""


def plan_splits(config: DataConfig) -> tuple[InputSplit, ...]:
    """Lists all input splits, source after source.

    In a source validation comes first: what is in both is validated on, not trained on.

    Raises:
        InputError: something is not there.
    """
    return tuple(
        replace(split, number=number)
        for source in config.all_sources
        for number, split in enumerate(_plan_source(source, config.split_bytes))
    )


def _plan_source(source: SourceConfig, split_bytes: int) -> Iterator[InputSplit]:
    train_role: Role = "train" if source.validation_input else "both"
    yield from _plan(source.name, source.validation_input, "validation", split_bytes)
    yield from _plan(source.name, source.input, train_role, split_bytes)


def read_documents(split: InputSplit, *, text_field: str, source_field: str) -> Iterator[Document]:
    """Reads the documents of one split in file order.

    Raises:
        InputError: something cannot be read; with its file, byte and line.
    """
    if split.kind == "embedded":
        records = ((row, text, EMBEDDED) for row, text in embedded_part(split.start))
    elif split.kind.startswith("txt"):
        records = ((row, text, None) for row, text in enumerate(_text_documents(split)))
    elif split.kind in ("parquet", "arrow"):
        records = _columnar_records(split, text_field, source_field)
    else:
        records = _json_records(split, text_field, source_field)
    for row, text, source in records:
        yield Document(text, source or split.file_name, row)


# ---- planning


def _plan(
    source: str, patterns: Sequence[str], role: Role, split_bytes: int
) -> Iterator[InputSplit]:
    seen: set[str] = set()
    for pattern in patterns:
        for url, kind, size in _expand(pattern):
            if url not in seen:
                seen.add(url)
                for start, stop, num_bytes in _ranges(url, kind, size, split_bytes):
                    yield InputSplit(source, 0, url, kind, start, stop, size, role, num_bytes)


def _expand(pattern: str) -> Iterator[tuple[str, Kind, int]]:
    """Yields (url, kind, size) of every file of a name, glob or URL, sorted by name."""
    if pattern == EMBEDDED:
        yield EMBEDDED, "embedded", NUM_PARTS
        return
    fs, path = _filesystem(pattern)
    try:
        paths = [path] if fs.exists(path) else sorted(str(p) for p in fs.glob(path) if fs.isfile(p))
        if not paths:
            raise InputError(_nothing_there(pattern))
        if len(paths) == 1 and fs.isdir(paths[0]):
            paths = _readable_files(fs, paths[0], pattern)
        for found in paths:
            url = found if _is_local(fs) else str(fs.unstrip_protocol(found))
            yield url, _kind(url), _size(fs, found, url)
    except OSError as error:
        raise InputError(
            f"input {pattern!r} cannot be listed ({_reason(error)}): check the name and your access"
        ) from error


def _readable_files(fs: Any, folder: str, pattern: str) -> list[str]:
    """Returns the files below a folder whose ending is known, sorted; hidden ones are left out."""
    prefix = f"{folder.rstrip('/')}/"
    inside = {str(path): str(path).removeprefix(prefix).split("/") for path in fs.find(folder)}
    paths = [
        path
        for path, parts in inside.items()
        if path.endswith(tuple(_SUFFIXES)) and not any(part.startswith(".") for part in parts)
    ]
    if not paths:
        raise InputError(
            f"input {pattern!r} is a folder without files that are read: {len(inside)} files, none "
            f"of which ends in {', '.join(_SUFFIXES)}"
        )
    return sorted(paths)


def _filesystem(url: str) -> tuple[Any, str]:
    protocol = url.split("://", 1)[0] if "://" in url else "file"
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _PACKAGES.get(protocol, protocol)
        raise InputError(
            f"input {url!r} needs a package for {protocol}://: pip install {package}"
        ) from error
    except OSError as error:  # the archive of zip://member::archive is opened here
        raise InputError(
            f"input {url!r} cannot be opened ({_reason(error)}): check the name and your access"
        ) from error
    except zipfile.BadZipFile as error:
        raise InputError(f"input {url!r} cannot be opened: {error}") from error
    except ValueError as error:
        raise InputError(
            f"input {url!r} cannot be opened: {error}; for a local file leave out {protocol}://"
        ) from error


def _size(fs: Any, path: str, url: str) -> int:
    size = fs.info(path)["size"]
    if size is None:
        raise InputError(
            f"{url}: the server does not tell the file's size: download the file and give its name"
        )
    return int(size)


def _is_local(fs: Any) -> bool:
    return "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,))


def _nothing_there(pattern: str) -> str:
    if any(character in pattern for character in "*?["):
        return (
            f"input {pattern!r} matches no file: check the folder and the ending (and quote the "
            "glob in a shell)"
        )
    return (
        f"input {pattern!r} does not exist: check the name, or give input=embedded for the corpus "
        "that is built in"
    )


def _kind(url: str) -> Kind:
    for suffix, kind in _SUFFIXES.items():
        if url.endswith(suffix):
            return kind
    raise InputError(
        f"input {url!r} has an ending that is not read: give one of {', '.join(_SUFFIXES)}"
    )


def _ranges(url: str, kind: Kind, size: int, split_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields start, stop and the estimated bytes of text of every split of a file."""
    if kind == "embedded":
        for part in range(NUM_PARTS):
            yield part, part + 1, _EMBEDDED_PART_BYTES
    elif kind == "parquet":
        yield from _row_group_ranges(url, split_bytes)
    elif kind == "arrow":
        yield from _record_batch_ranges(url, size, split_bytes)
    elif kind.endswith(_COMPRESSED):
        yield 0, 1, _COMPRESSION_RATIO * size
    else:
        for start, stop in pairwise([*range(0, max(size, 1), split_bytes), size]):
            yield start, stop, stop - start


def _row_group_ranges(url: str, split_bytes: int) -> Iterator[tuple[int, int, int]]:
    with _opened(url) as file, _columnar_errors(url):
        metadata = pq.ParquetFile(file).metadata
        sizes = [
            metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)
        ]
    start = filled = 0
    for group, group_bytes in enumerate(sizes):
        if filled and filled + group_bytes > split_bytes:
            yield start, group, filled
            start, filled = group, 0
        filled += group_bytes
    yield start, len(sizes), filled


def _record_batch_ranges(url: str, size: int, split_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Cuts an Arrow file evenly by its number of batches, for their sizes are not in its footer."""
    with _opened(url) as file, _columnar_errors(url):
        reader = _arrow_reader(file)
        if not isinstance(reader, pa.ipc.RecordBatchFileReader):
            yield 0, 1, size
            return
        num_batches = reader.num_record_batches
    num_splits = max(1, min(num_batches, -(-size // split_bytes)))
    bounds = [num_batches * part // num_splits for part in range(num_splits + 1)]
    for start, stop in pairwise(bounds):
        yield start, stop, size // num_splits


# ---- bytes to lines


@contextmanager
def _opened(url: str, expected_size: int | None = None) -> Iterator[IO[bytes]]:
    fs, path = _filesystem(url)
    try:
        size = _size(fs, path, url)
        if expected_size is not None and size != expected_size:
            raise InputError(
                f"{url} had {expected_size} bytes when preparation began and has {size} now: "
                "prepare again into an empty folder, from files that nobody writes to"
            )
        with fs.open(path, "rb") as file:
            yield file
    except OSError as error:
        raise InputError(
            f"{url} cannot be read ({_reason(error)}): check that it exists and that you may read "
            "it"
        ) from error


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _split_lines(split: InputSplit) -> Iterator[tuple[int, int | None, bytes]]:
    """Yields (byte offset, line number where known, line) of the lines that begin in the split."""
    with _opened(split.url, split.size) as file:
        if split.kind.endswith(_COMPRESSED):
            offset, lines = 0, _lines(_decompressed(file, split.url))
        else:
            offset, lines = split.start, _lines(_chunks(file))
            if offset:  # the line that reaches into this split belongs to the one before
                file.seek(offset - 1)
                offset += len(next(lines, b"")) - 1
        for number, line in enumerate(lines, start=1):
            if not split.kind.endswith(_COMPRESSED) and offset >= split.stop:
                return
            yield offset, number if split.start == 0 else None, line
            offset += len(line)


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _decompressed(file: IO[bytes], url: str) -> Iterator[bytes]:
    """Decompresses zstd frames or gzip members, one after the other.

    One that ends too early is an error, which the libraries' own readers hide.
    """
    name, member, start = ("gzip", "member", lambda: zlib.decompressobj(wbits=31))
    if url.endswith(".zst"):
        name, member = "zstd", "frame"
        start = zstandard.ZstdDecompressor().decompressobj
    frame: Any = start()
    pending = False
    for chunk in _chunks(file):
        while chunk:
            try:
                text = frame.decompress(chunk)
            except (zstandard.ZstdError, zlib.error) as error:
                raise InputError(
                    f"{url} is not valid {name} ({error}): it is damaged, fetch it again"
                ) from error
            if text:
                yield text
            pending, chunk = not frame.eof, b""
            if frame.eof:
                chunk = frame.unused_data
                frame = start()
    if pending:
        raise InputError(
            f"{url} ends in the middle of a {name} {member}: it is truncated, fetch it again"
        )


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields lines with their newline, of any length, in time linear in their length."""
    pending: list[bytes] = []
    for chunk in chunks:
        pending.append(chunk)
        if b"\n" in chunk:
            *lines, last = b"".join(pending).split(b"\n")
            pending = [last]
            for line in lines:
                yield line + b"\n"
    if rest := b"".join(pending):
        yield rest


def _where(split: InputSplit, offset: int, number: int | None) -> str:
    unpacked = " (unpacked)" if split.kind.endswith(_COMPRESSED) else ""
    return f"{split.url}, byte {offset}{unpacked}" + (f", line {number}" if number else "")


def _decoded(split: InputSplit, offset: int, number: int | None, line: bytes) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        where = _where(split, offset + error.start, number)
        raise InputError(
            f"{where}: not UTF-8 (byte 0x{line[error.start]:02x}, {error.reason}). "
            "Convert the file first, for example: iconv -f LATIN1 -t UTF-8 OLD > NEW"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


# ---- lines to records


def _text_documents(split: InputSplit) -> Iterator[str]:
    parts: list[str] = []
    size = 0
    for offset, number, line in _split_lines(split):
        text = _decoded(split, offset, number, line)
        parts.append(text)
        size += len(text)
        if (size >= _TEXT_DOCUMENT_CHARS and not text.strip()) or size >= _TEXT_DOCUMENT_MAX_CHARS:
            yield from _cut("".join(parts))
            parts, size = [], 0
    yield from _cut("".join(parts))


def _cut(text: str) -> Iterator[str]:
    for start in range(0, len(text), _TEXT_DOCUMENT_MAX_CHARS):
        yield text[start : start + _TEXT_DOCUMENT_MAX_CHARS]


def _json_records(
    split: InputSplit, text_field: str, source_field: str
) -> Iterator[tuple[int, str, str | None]]:
    row = 0
    for offset, number, line in _split_lines(split):
        text = _decoded(split, offset, number, line)
        if text.strip():
            record = _json_object(text, _where(split, offset, number))
            yield (
                row,
                _text_of(record, text_field, _where(split, offset, number)),
                _source_of(record, source_field),
            )
            row += 1


def _json_object(text: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"{where}: not valid JSON ({error}); each line must be one JSON object"
        ) from error
    if not isinstance(record, dict):
        raise InputError(
            f"{where}: a JSON {type(record).__name__}; each line must be one JSON object"
        )
    return record


def _text_of(record: dict[str, Any], text_field: str, where: str) -> str:
    if text_field not in record:
        fields = ", ".join(map(repr, record)) or "none"
        raise InputError(
            f"{where}: no field {text_field!r}; its fields are {fields}: set text_field to one of "
            "them"
        )
    text = record[text_field]
    if not isinstance(text, str):
        raise InputError(
            f"{where}: field {text_field!r} holds a {type(text).__name__}, not text: set text_field"
        )
    return text


def _source_of(record: dict[str, Any], source_field: str) -> str | None:
    source = record.get(source_field)
    return source if isinstance(source, str) else None


# ---- columns


@contextmanager
def _columnar_errors(url: str) -> Iterator[None]:
    name = "Parquet" if url.endswith(".parquet") else "Arrow"
    try:
        yield
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise InputError(
            f"{url} is not a readable {name} file ({error}): check that it is whole"
        ) from error


def _columnar_records(
    split: InputSplit, text_field: str, source_field: str
) -> Iterator[tuple[int, str, str | None]]:
    batches = _parquet_batches if split.kind == "parquet" else _arrow_batches
    row = 0
    with _opened(split.url, split.size) as file, _columnar_errors(split.url):
        for batch in batches(file, split, text_field, source_field):
            for record in batch.to_pylist():
                # A missing value is an empty document: dropped and counted like one.
                yield row, record[text_field] or "", _source_of(record, source_field)
                row += 1


def _parquet_batches(
    file: IO[bytes], split: InputSplit, text_field: str, source_field: str
) -> Iterator[pa.RecordBatch]:
    parquet = pq.ParquetFile(file)
    columns = _columns(split.url, parquet.schema_arrow, text_field, source_field)
    yield from parquet.iter_batches(64, row_groups=range(split.start, split.stop), columns=columns)


def _arrow_batches(
    file: IO[bytes], split: InputSplit, text_field: str, source_field: str
) -> Iterator[pa.RecordBatch]:
    reader = _arrow_reader(file)
    columns = _columns(split.url, reader.schema, text_field, source_field)
    is_file = isinstance(reader, pa.ipc.RecordBatchFileReader)
    whole = map(reader.get_batch, range(split.start, split.stop)) if is_file else reader
    for batch in whole:
        chosen = batch.select(columns)
        chosen.validate(full=True)  # Arrow believes the offsets that stand in a file
        for start in range(0, chosen.num_rows, 64):
            yield chosen.slice(start, 64)


def _arrow_reader(file: IO[bytes]) -> Any:
    """Opens an Arrow file, or the stream that other programs write under the same ending."""
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    return pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)


def _columns(url: str, schema: pa.Schema, text_field: str, source_field: str) -> list[str]:
    if text_field not in schema.names:
        names = ", ".join(map(repr, schema.names))
        raise InputError(
            f"{url}: no column {text_field!r}; its columns are {names}: set text_field to one of "
            "them"
        )
    column_type = schema.field(text_field).type
    if not (pa.types.is_string(column_type) or pa.types.is_large_string(column_type)):
        raise InputError(
            f"{url}: column {text_field!r} holds {column_type}, not text: set text_field to another"
        )
    if source_field in schema.names and source_field != text_field:
        return [text_field, source_field]
    return [text_field]
