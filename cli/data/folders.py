"""`moebius data`: lists prepared folders, shows their rows, and verifies every byte."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...data_pipeline.words import some_of
from ..arguments import RUNS, Commands, add_command
from ..console import console
from .peek import add_peek

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from ...data_pipeline.manifest import DatasetManifest
    from ...data_pipeline.verify import FoundFolder


_MOST_QUARANTINED = 10  # input splits shown


def add_commands(commands: Commands) -> None:
    """Declares `moebius data` with its actions."""
    parser = add_command(
        commands,
        "data",
        _ls,
        "list, show and verify prepared data",
        examples=["data ls", "data peek shards", "data verify shards"],
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_ls(actions)
    add_peek(actions)
    _add_verify(actions)


def _add_ls(actions: Commands) -> None:
    parser = add_command(
        actions,
        "ls",
        _ls,
        "list prepared folders: tokens and documents of each source, and what was dropped",
        examples=["data ls", "data ls shards other/data"],
    )
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="DATA",
        help=f"prepared folders, or folders that contain some, two levels deep ({RUNS})",
    )


def _ls(options: argparse.Namespace) -> int:
    from ...data_pipeline.verify import find_folders

    paths = options.paths or [RUNS]
    found = [folder for path in paths for folder in find_folders(path)]
    if not found:
        raise ValueError(
            f"no prepared data in {some_of(paths)}: name its folder, or run `moebius prepare`"
        )
    print_folders(found)
    return 0


def print_folders(found: "Sequence[FoundFolder]") -> None:
    """Prints each prepared folder's state and sources, and what was dropped from its input."""

    screen = console()
    for folder in found:
        screen.print(_heading(folder))
        if folder.manifest is not None:
            screen.print(_table(folder.manifest))
        for line in _losses(folder):
            screen.print(line)


def _heading(folder: "FoundFolder") -> "Text":
    """Returns a folder's path, state and tokenizer as `Text`: rich would read brackets in names as markup."""
    from rich.text import Text

    manifest = folder.manifest
    if manifest is None:
        return Text.assemble((str(folder.path), "bold"), ": ", (folder.problem, "red"))
    tokenizer = manifest.header.tokenizer
    return Text.assemble(
        (str(folder.path), "bold"),
        ": ",
        _state(manifest),
        f", tokenizer {tokenizer.kind} with {tokenizer.vocab_size:,} ids",
    )


def _state(manifest: "DatasetManifest") -> tuple[str, str]:
    """Returns how complete a folder is, and a style for it."""
    if manifest.completion is None:
        return "growing", "yellow"
    if quarantined := len(manifest.completion.quarantined):
        return f"complete without {quarantined} input splits", "yellow"
    return "complete", "green"


def _table(manifest: "DatasetManifest") -> "Table":
    """Returns a table with a line per source of a folder."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("source", overflow="fold")
    for name in ("train tokens", "documents", "held out", "segments", "bytes/token", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("licence", overflow="fold")
    for source in manifest.sources:
        licence = Text(source.licence or "–")
        table.add_row(Text(source.name), *_numbers(manifest, source.name), licence)
    return table


def _numbers(manifest: "DatasetManifest", source: str) -> tuple[str, ...]:
    segments = manifest.segments(source)
    shards = [shard for segment in segments for shard in segment.shards]
    train = [shard for shard in shards if shard.split == "train"]
    tokens = sum(shard.num_tokens for shard in shards)
    text_bytes = sum(shard.num_text_bytes for shard in shards)
    documents = sum(shard.num_documents for shard in train)
    held_out = sum(shard.num_documents for shard in shards) - documents
    return (
        f"{sum(shard.num_tokens for shard in train):,}",
        f"{documents:,}",
        f"{held_out:,}",
        f"{len(segments):,}",
        f"{text_bytes / max(1, tokens):.3f}",
        f"{sum(shard.num_bytes for shard in shards) / 2**20:,.1f}",
    )


def _losses(folder: "FoundFolder") -> "Iterator[Text]":
    """Yields which input is missing from a folder, by source and reason."""
    from rich.text import Text

    completion = folder.manifest and folder.manifest.completion
    if not completion:
        return
    for source, reasons in completion.dropped.items():
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
            yield Text(f"{folder.path}, {source}: {count:,} documents dropped: {reason}")
    for split in completion.quarantined[:_MOST_QUARANTINED]:
        yield Text(f"{folder.path}, {split.source}: {split.input} is left out: {split.error}")
    if (more := len(completion.quarantined) - _MOST_QUARANTINED) > 0:
        yield Text(f"{folder.path}: {more:,} more input splits are left out (last manifest)")


def _add_verify(actions: Commands) -> None:
    parser = add_command(
        actions,
        "verify",
        _verify,
        "read every byte: manifests, tokenizer, every shard and every record batch",
        examples=["data verify shards"],
    )
    parser.add_argument(
        "path", type=Path, metavar="DATA|RUN", help="a prepared folder, or a run that reads one"
    )


def _verify(options: argparse.Namespace) -> int:
    from ...data_pipeline.manifest import read_manifest
    from ...data_pipeline.verify import data_folder, verify
    from ..console import progress_bars

    folder = data_folder(options.path)
    manifest = read_manifest(folder)
    num_bytes = sum(entry.num_bytes for entry in manifest.shards)
    with progress_bars() as start_progress:
        on_bytes = start_progress(f"reading {folder.name}", 2 * num_bytes)
        problems = list(verify(folder, manifest, on_bytes))
    if problems:
        raise ValueError("\n".join(problems))
    state = "" if manifest.complete else " so far; it is still growing"
    print(
        f"{folder}: intact ({len(manifest.shards):,} shards in {len(manifest.sealed):,} segments, "
        f"{num_bytes / 2**20:,.1f} MiB{state})"
    )
    return 0
