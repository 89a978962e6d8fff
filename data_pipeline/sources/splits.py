"""Expands file names, globs and URLs into input splits, in sorted order.

A split is a file, or a part of a large one: a byte range (.txt, .jsonl), row groups (.parquet) or
record batches (.arrow). A compressed file or an Arrow stream is one split, because it has no entry
points. A folder stands for its readable files. The embedded corpus and functions define their own
splits.
"""

from collections.abc import Iterator, Sequence

from ..errors import InputError
from ..prepare_config import PrepareConfig, SourceConfig
from .documents import InputSplit, Role
from .files import find_files
from .formats import OTHER_FORMATS, SUFFIXES, format_of, kind_of


def plan_splits(config: PrepareConfig) -> tuple[InputSplit, ...]:
    """Lists all input splits, source after source.

    Validation comes first in each source, so that text in both is not trained on.

    Raises:
        InputError: some input does not exist.
    """
    return tuple(
        split for source in config.all_sources for split in _plan_source(source, config.split_bytes)
    )


def _plan_source(source: SourceConfig, split_bytes: int) -> Iterator[InputSplit]:
    train_role: Role = "train" if source.validation_input else "both"
    yield from _plan(source, source.validation_input, "validation", split_bytes)
    yield from _plan(source, source.input, train_role, split_bytes)


def _plan(
    source: SourceConfig, patterns: Sequence[str], role: Role, split_bytes: int
) -> Iterator[InputSplit]:
    seen: set[str] = set()
    for pattern in patterns:
        for url, kind, size in _expand(pattern):
            if url in seen:
                continue
            seen.add(url)
            if not format_of(kind).has_fields:
                _check_fields(source, url)
            for start, stop, num_bytes in format_of(kind).ranges(url, size, split_bytes):
                yield InputSplit(source.name, url, kind, start, stop, size, role, num_bytes)


def _expand(pattern: str) -> Iterator[tuple[str, str, int]]:
    """Yields (url, kind, size) of all input that one name stands for."""
    for kind, form in OTHER_FORMATS.items():
        if form.size is not None and _is_of(pattern, kind):
            yield pattern, kind, form.size(pattern)
            return
    for url, size in find_files(pattern, SUFFIXES):
        yield url, kind_of(url), size


def _check_fields(source: SourceConfig, url: str) -> None:
    """Checks that the configuration names no fields of input without records."""
    asked = {"prompt_field": source.prompt_field, "id_field": source.id_field}
    if wanted := [f"{key}={name!r}" for key, name in asked.items() if name]:
        raise InputError(
            f"{url} has no fields, but source {source.name!r} sets {' and '.join(wanted)}: convert it "
            "to .jsonl, .parquet or .arrow, or make it a source of its own"
        )


def _is_of(pattern: str, kind: str) -> bool:
    """Returns whether an input is of a kind: a name, or a prefix if it ends in ":"."""
    return pattern.startswith(kind) if kind.endswith(":") else pattern == kind
