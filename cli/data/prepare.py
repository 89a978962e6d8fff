"""`moebius prepare`: text to token shards, on this machine or as Ray tasks.

A `PrepareConfig`, the section `prepare` of a run, says what is made. Its common keys have options;
every key can be given as `prepare.key=value`, or stand in the [prepare] table of a TOML file.
"""

import argparse
import re
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import (
    Commands,
    add_command,
    add_overrides,
    add_unauthenticated,
    allow_unauthenticated,
)

if TYPE_CHECKING:
    from ...data_pipeline.make.pools import TaskPool
    from ...data_pipeline.manifest import DatasetManifest
    from ...data_pipeline.prepare_config import PrepareConfig

_OVERRIDE = re.compile(r"prepare(\.\w+)+=")


def add_commands(commands: Commands) -> None:
    """Declares `moebius prepare`."""
    parser = add_command(
        commands,
        "prepare",
        _prepare,
        "turn text into token shards",
        examples=[
            'prepare --input "texts/*.txt" --output shards --workers 2',
            "prepare --input https://example.com/books.jsonl.zst --output shards",
            "prepare --input chats.jsonl --output shards prepare.prompt_field=question "
            "prepare.answer_field=answer",
            "prepare --input web --output shards prepare.filters.min_words=50 "
            "prepare.filters.quality=true prepare.near_duplicates={}",
            "prepare --config mine.toml --output shards --workers 8 prepare.era_tokens=1000000",
        ],
    )
    add_overrides(parser, metavar="prepare.key=value")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="its [prepare] table says what is made: sources, filters, tokenizer; a run's file will do",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        metavar="TEXT",
        default=[],
        help=".txt, .jsonl (.gz, .zst), .parquet, .arrow: files, folders, globs or URLs; "
        "python:package.module:function; `embedded`, the default, is the prose that Python carries",
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
        metavar="NAME",
        help="bpe (trained on the text, default), bytes, or one that exists: a .json or .model "
        "file, its folder, or hf://owner/name",
    )
    parser.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        help="special token that ends a document, of a tokenizer that exists (its eos_token)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
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
    add_unauthenticated(parser)
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

    from ...cluster.report.live import show_preparation
    from ...data_pipeline.make.prepare import prepare

    if options.workers < 1:
        raise ValueError(f"--workers {options.workers}: at least 1")
    config, directory = prepare_config(options), options.output.absolute()
    if options.address is not None or options.ray:
        from ...cluster.prepare_data import prepare_on_cluster

        allow_unauthenticated(options)
        manifest = prepare_on_cluster(
            config,
            directory,
            address=options.address,
            workers=options.workers,
            on_poison=options.on_poison,
        )
    else:
        with _pool(options.workers) as pool, show_preparation(Console()) as on_progress:
            manifest = prepare(
                config,
                directory,
                pool=pool,
                on_progress=on_progress,
                on_poison=options.on_poison,
                report=True,
            )
    _print_manifest(manifest, options.output)
    return 0


def prepare_config(options: argparse.Namespace) -> "PrepareConfig":
    """Returns what is to be made: the file, changed by options, changed by single keys.

    Raises:
        ValueError: it is not valid.
    """
    from ...train.config.resolve import resolve_prepare
    from ...train.recipes.smoke import RECIPES

    values: dict[str, Any] = {}
    overrides = list(options.overrides)
    for name in ("input", "validation_input"):  # they take all words that follow
        words = getattr(options, name)
        overrides += [word for word in words if _OVERRIDE.match(word)]
        values[name] = [word for word in words if not _OVERRIDE.match(word)]
    for name in ("tokenizer", "end_of_document", "vocab_size", "shuffle_documents"):
        values[name] = getattr(options, name)
    given = {name: value for name, value in values.items() if value not in (None, False, [])}
    return resolve_prepare(options.config, overrides, RECIPES, options=given)


def _pool(workers: int) -> "AbstractContextManager[TaskPool]":
    """Returns where the tasks run, on this machine."""
    from ...data_pipeline.make.pools import LocalPool, SerialPool

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
