"""Expands input into splits, in sorted order, and reads them: the table of readable formats.

A split is a file, or a part of a large one: a byte range (.txt, .jsonl), row groups (.parquet) or
record batches (.arrow). A compressed file or an Arrow stream is one split, because it has no entry
points. A folder stands for its readable files; the others are counted. The embedded corpus and functions define their own
splits. A new format needs a module beside this one and a line in the table.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ...plugins import PYTHON
from ..errors import InputError
from ..prepare_config import TOKENS, PrepareConfig, SourceConfig
from ..tokenizers.interface import Tokenizer
from ..words import some_of
from .columns import read_arrow, read_parquet, record_batch_ranges, row_group_ranges
from .compression import PACKED
from .documents import Document, InputSplit, Role, SplitRange, byte_ranges
from .embedded import EMBEDDED, embedded_ranges, embedded_size, read_embedded
from .files import FoundFile, find_files
from .function import function_ranges, function_size, read_function
from .lines import read_json_lines, read_text, whole_file
from .records import RecordRules
from .tokens import read_token_file, token_files, token_ranges


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


_OF_LINES = {".txt": (read_text, False), ".jsonl": (read_json_lines, True)}
FILE_FORMATS = {
    f"{kind}{packed}": Format(whole_file if packed else byte_ranges, read, has_fields=has_fields)
    for kind, (read, has_fields) in _OF_LINES.items()
    for packed in ("", *PACKED)
} | {
    ".parquet": Format(row_group_ranges, read_parquet),
    ".arrow": Format(record_batch_ranges, read_arrow),
}
"""Formats by the kind of a file, the suffix that its name would usually have."""

_SUFFIXES = {
    ".txt": (".txt", ".text", ".md", ".markdown", ".rst"),
    ".jsonl": (".jsonl", ".ndjson", ".json"),
    ".parquet": (".parquet", ".pq"),
    ".arrow": (".arrow", ".feather"),
}
READABLE = (
    f"{', '.join(one for many in _SUFFIXES.values() for one in many)} (also {', '.join(PACKED)})"
)

_FORMATS = FILE_FORMATS | {
    EMBEDDED: Format(embedded_ranges, read_embedded, embedded_size, has_fields=False),
    PYTHON: Format(function_ranges, read_function, function_size),
    TOKENS: Format(token_ranges, read_token_file, has_fields=False),
}


def kind_of(url: str, forced: str = "") -> str | None:
    """Returns the format of a file by its name, in any case, or the forced one; None if unknown."""
    name = (url.partition("?")[0] if "://" in url else url).lower()
    packed = next((suffix for suffix in PACKED if name.endswith(suffix)), "")
    plain = name.removesuffix(packed)
    kinds = (kind for kind, suffixes in _SUFFIXES.items() if plain.endswith(suffixes))
    kind = f".{forced}" if forced else next(kinds, "")
    return kind + packed if kind + packed in FILE_FORMATS else None


def plan_splits(
    config: PrepareConfig,
    tell: Callable[[str], None] = lambda news: None,
    *,
    lenient: bool = False,
) -> tuple[InputSplit, ...]:
    """Lists all input splits, source after source.

    Validation comes first in each source, so that text in both is not trained on. `tell` is called
    with what a folder or glob holds and is not read. With `lenient`, a damaged file is one split.

    Raises:
        InputError: some input does not exist.
    """
    return tuple(
        split
        for source in config.all_sources
        for patterns, role in _sides(source)
        for split in _plan(source, patterns, role, config, tell, lenient)
    )


def _sides(source: SourceConfig) -> Iterator[tuple[Sequence[str], Role]]:
    yield source.validation_input, "validation"
    yield source.input, "train" if source.validation_input else "both"


def _plan(
    source: SourceConfig,
    patterns: Sequence[str],
    role: Role,
    config: PrepareConfig,
    tell: Callable[[str], None],
    lenient: bool,
) -> Iterator[InputSplit]:
    seen: set[str] = set()
    for pattern in patterns:
        for (url, size, stamp), kind in _expand(pattern, config.format, tell):
            if url in seen:
                continue
            seen.add(url)
            if not _FORMATS[kind].has_fields:
                _check_fields(source, url)
            for start, stop, num_bytes in _ranges(kind, url, size, config.split_bytes, lenient):
                yield InputSplit(source.name, url, kind, start, stop, size, role, num_bytes, stamp)


def _ranges(
    kind: str, url: str, size: int, split_bytes: int, lenient: bool
) -> Iterable[SplitRange]:
    """Returns the ranges of a file; of one that cannot be opened, one range, whose reading fails."""
    try:
        return list(_FORMATS[kind].ranges(url, size, split_bytes))
    except InputError:
        if not lenient:
            raise
        return [SplitRange(0, 1, size)]


def _expand(
    pattern: str, forced: str, tell: Callable[[str], None]
) -> Iterator[tuple[FoundFile, str]]:
    """Yields all input that one name stands for, each with its kind."""
    if pattern.startswith(TOKENS):
        yield from ((file, TOKENS) for file in token_files(pattern.removeprefix(TOKENS)))
        return
    other = PYTHON if pattern.startswith(PYTHON) else pattern
    if (form := _FORMATS.get(other)) is not None and form.size is not None:
        yield FoundFile(pattern, form.size(pattern)), other
        return
    advice = f"readable are {READABLE}; prepare.format={forced or 'jsonl'} reads others as that"
    found, left_out = find_files(pattern, lambda url: kind_of(url, forced) is not None)
    words = some_of(f"{count:,} {what}" for what, count in left_out.most_common())
    if not found:
        raise InputError(
            f"input {pattern!r} is a folder without readable files: {words} ({advice})"
        )
    if left_out:
        total = left_out.total() + len(found)
        tell(f"input {pattern!r}: {left_out.total():,} of {total:,} left out: {words} ({advice})")
    for file in found:
        kind = kind_of(file.url, forced)
        if kind is None:
            raise InputError(f"input {file.url!r} has an unknown suffix: {advice}")
        yield file, kind


def _check_fields(source: SourceConfig, url: str) -> None:
    """Checks that the configuration names no fields of input without records."""
    asked = {"prompt_field": source.prompt_field, "id_field": source.id_field}
    if wanted := [f"{key}={name!r}" for key, name in asked.items() if name]:
        raise InputError(
            f"{url} has no fields, but source {source.name!r} sets {' and '.join(wanted)}: name only "
            "files with fields, such as DIR/*.jsonl, or make it a source of its own"
        )


def read_documents(
    split: InputSplit,
    source: SourceConfig,
    *,
    encoding_faults: Literal["error", "drop"] | int = "error",
    tokenizer: Tokenizer | None = None,
) -> Iterator[Document]:
    """Reads the documents of one split, in order.

    Args:
        split: the split.
        source: names the fields of its records.
        encoding_faults: "error" raises on invalid Unicode and lines that are not JSON; otherwise they
            are documents with a `fault`.
        tokenizer: checks and decodes the ids of token files.

    Raises:
        InputError: something cannot be read; the message names its place.
    """
    rules = RecordRules(source, encoding_faults != "error", tokenizer)
    return _FORMATS[split.kind].read(split, rules)
