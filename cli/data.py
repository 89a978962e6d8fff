"""`moebius prepare`: text to token shards, on this machine or as Ray tasks; `moebius data`: what is
in them (data_report.py).
"""

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import RUNS, Commands, add_command
from .data_peek import add_order, add_peek

if TYPE_CHECKING:
    from ..data_pipeline.making.pools import TaskPool
    from ..data_pipeline.manifest import DatasetManifest


def add_commands(commands: Commands) -> None:
    """Declares `moebius prepare` and `moebius data` with its actions."""
    _add_prepare(commands)
    parser = add_command(
        commands,
        "data",
        _ls,
        "list, describe, show and verify prepared data, and say what comes when",
        examples=[
            "data ls",
            "data stats shards",
            "data peek shards",
            "data order runs/mine --step 120",
            "data verify shards",
        ],
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _add_ls(actions)
    _add_stats(actions)
    add_peek(actions)
    add_order(actions)
    _add_verify(actions)


def _add_prepare(commands: Commands) -> None:
    parser = add_command(
        commands,
        "prepare",
        _prepare,
        "turn text into token shards",
        examples=[
            'prepare --input "texts/*.txt" --output shards --workers 2',
            "prepare --input https://example.com/books.jsonl.zst --output shards",
        ],
    )
    parser.add_argument(
        "--input",
        nargs="+",
        metavar="TEXT",
        default=["embedded"],
        help=".txt, .jsonl (.gz, .zst), .parquet, .arrow: files, folders, globs or URLs; `embedded` is the prose "
        "that Python carries",
    )
    parser.add_argument(
        "--validation-input",
        nargs="+",
        metavar="TEXT",
        default=[],
        help="default: a share of --input",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder for shards and tokenizer"
    )
    parser.add_argument(
        "--tokenizer",
        default="bpe",
        metavar="NAME",
        help="bpe (trained on the text, default), bytes, or one that exists: a .json or .model "
        "file, its folder, or hf://owner/name",
    )
    parser.add_argument(
        "--end-of-document",
        default="",
        metavar="TOKEN",
        help="special token that ends a document, of a tokenizer that exists (its eos_token)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=None,
        metavar="N",
        help="of the BPE tokenizer (8000); of one that exists the most ids it may have",
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes; 1: this one alone"
    )
    parser.add_argument(
        "--ray",
        action="store_true",
        help="the workers are Ray tasks, of a cluster started for them",
    )
    parser.add_argument(
        "--address", metavar="ADDRESS", help="spread the work over this Ray cluster"
    )
    parser.add_argument(
        "--shuffle-documents",
        action="store_true",
        help="spread the documents over all shards (needs a second pass, and training cannot begin "
        "before it)",
    )
    parser.add_argument(
        "--on-poison",
        choices=["auto", "fail", "quarantine"],
        default="auto",
        help="input that cannot be prepared: leave it out and go on, or fail; auto: leave out what "
        "crashes, fail at what you can mend",
    )


def _prepare(options: argparse.Namespace) -> int:
    """Carries out `moebius prepare`."""
    from rich.console import Console

    from ..cluster.watch import show_preparation
    from ..data_pipeline.config import DataConfig
    from ..data_pipeline.making.prepare import prepare

    if options.workers < 1:
        raise ValueError(f"--workers {options.workers}: at least 1")
    values = {
        "input": options.input,
        "validation_input": options.validation_input,
        "tokenizer": options.tokenizer,
        "end_of_document": options.end_of_document,
        "directory": str(options.output.absolute()),
        "shuffle_documents": options.shuffle_documents,
    }
    if options.vocab_size is not None:
        values["vocab_size"] = options.vocab_size
    data = DataConfig.model_validate(values)
    if options.address is not None or options.ray:
        from ..cluster.submit import prepare_on_cluster

        manifest = prepare_on_cluster(
            data, address=options.address, workers=options.workers, on_poison=options.on_poison
        )
    else:
        with _pool(options.workers) as pool, show_preparation(Console()) as on_progress:
            manifest = prepare(
                data,
                data.directory,
                pool=pool,
                on_progress=on_progress,
                on_poison=options.on_poison,
                report=True,
            )
    _print_manifest(manifest, options.output)
    return 0


def _pool(workers: int) -> "AbstractContextManager[TaskPool]":
    """Returns where the tasks run, on this machine."""
    from ..data_pipeline.making.pools import LocalPool, SerialPool

    return LocalPool(workers) if workers > 1 else nullcontext(SerialPool())


def _print_manifest(manifest: "DatasetManifest", folder: Path) -> None:
    """Prints what was prepared: the vocabulary, and a line for each split."""
    print(f"{folder}: vocabulary of {manifest.vocab_size}")
    for split in ("train", "validation"):
        shards = [shard for shard in manifest.shards if shard.split == split]
        tokens = sum(shard.num_tokens for shard in shards)
        documents = sum(shard.num_documents for shard in shards)
        size = sum(shard.num_bytes for shard in shards)
        print(
            f"  {split}: {tokens:,} tokens of {documents:,} documents in {len(shards)} shards, "
            f"{size / 2**20:.1f} MiB"
        )
    for source in manifest.sources:
        eras = manifest.eras(source.name)
        print(f"  source {source.name}: {len(eras)} eras")
    if manifest.dropped:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in manifest.dropped.items())
        print(f"  dropped: {dropped}")
    mode = (
        "shuffled over all shards" if manifest.spec["shuffle_documents"] else "in the files' order"
    )
    print(f"  documents are {mode}")
    for entry in manifest.completion.quarantined if manifest.completion else ():
        print(f"  left out: {entry.source}, {entry.input}: {entry.error}")


# ---- moebius data


def _add_data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", type=Path, metavar="DATA|RUN", help="a prepared folder, or a run that reads one"
    )
    _add_json_argument(parser)


def _add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def _add_ls(actions: Commands) -> None:
    parser = add_command(
        actions,
        "ls",
        _ls,
        "list prepared folders: sources, tokens, whether they are complete",
        examples=["data ls", "data ls shards other/data", "data ls --json"],
    )
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="DIR",
        help="prepared folders, or folders of some, two levels deep (runs)",
    )
    _add_json_argument(parser)


def _ls(options: argparse.Namespace) -> int:
    """Carries out `moebius data ls`."""
    from .data_report import list_json, list_table, print_json

    paths = options.paths or [RUNS]
    if options.json:
        print_json(list_json(paths))
    else:
        _print_table(list_table(paths))
    return 0


def _add_stats(actions: Commands) -> None:
    parser = add_command(
        actions,
        "stats",
        _stats,
        "count tokens, documents and what was dropped, per source",
        examples=["data stats shards", "data stats runs/mine --lengths"],
    )
    _add_data_arguments(parser)
    parser.add_argument(
        "--lengths",
        action="store_true",
        help="read every document's length too (some 400 M tokens/s)",
    )


def _stats(options: argparse.Namespace) -> int:
    """Carries out `moebius data stats`."""
    from .data_report import find_stats, print_json, stats_tables

    found = find_stats(options.path, lengths=options.lengths)
    if options.json:
        print_json(found)
    else:
        for table in stats_tables(found):
            _print_table(table)
    return 0


def _add_verify(actions: Commands) -> None:
    parser = add_command(
        actions,
        "verify",
        _verify,
        "read every byte: manifests, tokenizer, every shard and every record batch",
        examples=["data verify shards"],
    )
    _add_data_arguments(parser)


def _verify(options: argparse.Namespace) -> int:
    """Carries out `moebius data verify`."""
    from rich.console import Console

    from .data_report import print_json, verify_folder
    from .progress import progress_bars

    with progress_bars(Console(stderr=True)) as start_progress:
        verdict = verify_folder(options.path, start_progress)
    if options.json:
        print_json(verdict.as_json())
        return 0 if verdict.is_intact else 1
    if verdict.problems:
        raise ValueError("\n".join(verdict.problems))
    print(verdict.words)
    return 0


def _print_table(table: object) -> None:
    from rich.console import Console

    Console().print(table)
