"""What `moebius data` shows: prepared folders as tables and as JSON, and whether they are intact.

Names that come from data (sources, licences, reasons) are shown as `Text`: rich would take their
square brackets for markup.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ...data_pipeline.manifest import DatasetManifest, read_manifest
from ...data_pipeline.verify import (
    SPLITS,
    FoundFolder,
    count,
    data_folder,
    find_folders,
    stats,
    verify,
)
from ..progress import StartProgress


def print_json(values: Any) -> None:
    """Prints values as JSON on standard output."""
    json.dump(values, sys.stdout, indent=1)
    print()


def _table(*columns: str, left: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        is_left = name in left
        justify = "left" if is_left else "right"
        # numbers are never cut: names are folded instead
        table.add_column(name, justify=justify, no_wrap=not is_left, overflow="fold")
    return table


# ---- ls


def list_table(paths: Sequence[Path]) -> Table:
    """Returns a table with one line per prepared folder.

    Raises:
        ValueError: there is none.
    """
    table = _table(
        *("folder", "sources", "train tokens", "documents", "MiB", "tokenizer", "state"),
        left=("folder", "sources", "tokenizer", "state"),
    )
    for found in _found(paths):
        manifest = found.manifest
        if manifest is None:
            empty = ("",) * 5
            table.add_row(Text(str(found.path)), *empty, Text(found.problem, style="red"))
            continue
        train, validation = (count(manifest.of(split)) for split in SPLITS)
        tokenizer = manifest.header.tokenizer
        table.add_row(
            Text(str(found.path)),
            Text(", ".join(source.name for source in manifest.sources)),
            f"{train.num_tokens:,}",
            f"{train.num_documents:,}",
            f"{(train.num_bytes + validation.num_bytes) / 2**20:,.1f}",
            Text(f"{tokenizer.kind} {tokenizer.vocab_size:,}"),
            _state(manifest),
        )
    return table


def list_json(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Returns the same as values of JSON.

    Raises:
        ValueError: there is none.
    """
    listed = []
    for found in _found(paths):
        entry: dict[str, Any] = {"directory": str(found.path), "problem": found.problem}
        if (manifest := found.manifest) is not None:
            entry |= {
                "complete": manifest.complete,
                "sources": [source.name for source in manifest.sources],
                "tokenizer": manifest.header.tokenizer.model_dump(mode="json"),
                "spec_hash": manifest.spec_hash,
            } | {split: vars(count(manifest.of(split))) for split in SPLITS}
        listed.append(entry)
    return listed


def _found(paths: Sequence[Path]) -> list[FoundFolder]:
    found = [folder for path in paths for folder in find_folders(path)]
    if not found:
        names = ", ".join(map(str, paths))
        raise ValueError(f"no prepared data in {names}: name its folder, or run `moebius prepare`")
    return found


def _state(manifest: DatasetManifest) -> Text:
    if not manifest.complete:
        return Text(f"growing, {len(manifest.sealed)} eras so far", style="yellow")
    assert manifest.completion is not None
    if quarantined := len(manifest.completion.quarantined):
        return Text(f"complete without {quarantined} input splits", style="yellow")
    return Text("complete", style="green")


# ---- stats


def find_stats(path: Path, *, lengths: bool) -> dict[str, Any]:
    """Returns what a prepared folder, or that of a run, holds: values of JSON.

    Raises:
        ShardError: there is none, or it is damaged.
    """
    folder = data_folder(path)
    return stats(folder, read_manifest(folder), lengths=lengths)


def stats_tables(found: dict[str, Any]) -> Iterator[Table | Text]:
    """Yields the tables of `find_stats`."""
    tokenizer = found["tokenizer"]
    state = "complete" if found["complete"] else "growing"
    yield Text(
        f"{found['directory']}: {state}, {tokenizer['kind']} with {tokenizer['vocab_size']:,} ids"
    )
    yield _split_table(found["sources"])
    if any("document_tokens" in split for _, _, split in _splits(found["sources"])):
        yield _length_table(found["sources"])
    yield _era_table(found["sources"])
    if any(found["dropped"].values()):
        yield _dropped_table(found["dropped"])
    if found["quarantined"]:
        yield _quarantined_table(found["quarantined"])


def _splits(sources: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yields (source, split, its values) for every split that has documents."""
    for source in sources:
        for split, values in source["splits"].items():
            if values["num_documents"]:
                yield source, split, values


def _split_table(sources: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        *("source", "split", "tokens", "documents", "text MB", "bytes/token", "MiB"),
        left=("source",),
    )
    for source, split, values in _splits(sources):
        table.add_row(
            Text(source["name"]),
            split,
            f"{values['num_tokens']:,}",
            f"{values['num_documents']:,}",
            f"{values['num_text_bytes'] / 1e6:,.2f}",
            f"{values['bytes_per_token']:.3f}",
            f"{values['num_bytes'] / 2**20:,.1f}",
        )
    return table


def _length_table(sources: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        *("source", "split", "mean tokens", "least", "10 %", "half", "90 %", "99 %", "most"),
        left=("source",),
    )
    for source, split, values in _splits(sources):
        lengths = values["document_tokens"]
        numbers = (lengths["shortest"], *lengths["percentiles"].values(), lengths["longest"])
        table.add_row(
            Text(source["name"]),
            split,
            f"{lengths['mean']:,.1f}",
            *(f"{number:,}" for number in numbers),
        )
    return table


def _era_table(sources: Sequence[dict[str, Any]]) -> Table:
    table = _table(
        *("source", "eras", "shards", "tokens of the smallest", "largest", "licence"),
        left=("source", "licence"),
    )
    for source in sources:
        tokens = [era["train_tokens"] for era in source["eras"]]
        table.add_row(
            Text(source["name"]),
            f"{len(tokens):,}",
            f"{sum(era['num_shards'] for era in source['eras']):,}",
            f"{min(tokens, default=0):,}",
            f"{max(tokens, default=0):,}",
            Text(source["licence"] or "not stated"),
        )
    return table


def _dropped_table(dropped: dict[str, dict[str, int]]) -> Table:
    table = _table("source", "dropped because", "documents", left=("source", "dropped because"))
    for source, reasons in dropped.items():
        for reason, documents in sorted(reasons.items(), key=lambda item: -item[1]):
            table.add_row(Text(source), Text(reason), f"{documents:,}")
    return table


def _quarantined_table(quarantined: Sequence[dict[str, str]]) -> Table:
    table = _table(
        "source", "quarantined input", "error", left=("source", "quarantined input", "error")
    )
    for split in quarantined:
        table.add_row(Text(split["source"]), Text(split["input"]), Text(split["error"]))
    return table


# ---- verify


@dataclass(frozen=True)
class Verdict:
    """Says whether a folder is as it was written."""

    directory: Path
    words: str
    problems: tuple[str, ...]

    @property
    def is_intact(self) -> bool:
        """Returns whether nothing is wrong."""
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        """Returns the same as values of JSON."""
        return {
            "directory": str(self.directory),
            "intact": self.is_intact,
            "problems": list(self.problems),
        }


def verify_folder(path: Path, start_progress: StartProgress) -> Verdict:
    """Reads every byte of a prepared folder, or that of a run.

    Raises:
        ShardError: there is none, or its manifests are damaged.
    """
    folder = data_folder(path)
    manifest = read_manifest(folder)
    num_bytes = sum(entry.num_bytes for entry in manifest.shards)
    on_bytes = start_progress(f"reading {folder.name}", 2 * num_bytes)
    problems = tuple(verify(folder, manifest, on_bytes))
    state = "" if manifest.complete else " so far; it is still growing"
    words = (
        f"{folder}: intact ({len(manifest.shards):,} shards in {len(manifest.sealed):,} eras, "
        f"{num_bytes / 2**20:,.1f} MiB{state})"
    )
    return Verdict(folder, words, problems)
