"""`moebius prepare`: turns text into token shards, on this machine or as Ray tasks.

The configuration is a `PrepareConfig`, the section `prepare` of a run. Common keys have options; every key
can be given as `prepare.key=value`, or in the [prepare] table of a TOML file.
"""

import argparse
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
from ..console import console

if TYPE_CHECKING:
    from ...data_pipeline.make.pools import TaskPool
    from ...data_pipeline.prepare_config import PrepareConfig


def add_commands(commands: Commands) -> None:
    """Declares `moebius prepare` and its options."""
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
            "prepare --tokens train.bin --tokenizer tok/tokenizer.json --output shards",
            "prepare --input web --output shards prepare.filters=\"['my_filters:too_short']\"",
            "prepare --config mine.toml --output shards --workers 8 prepare.segment_tokens=1000000",
        ],
    )
    add_overrides(parser, metavar="prepare.key=value")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE.toml",
        help="file with a [prepare] table: sources, filters, tokenizer; a run's configuration "
        "works, too",
    )
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        metavar="TEXT",
        default=[],
        help=".txt, .md, .jsonl, .json (.gz, .zst), .parquet, .arrow: files, folders, globs, URLs; "
        "python:package.module:function; `embedded`, the default, is the prose that Python carries",
    )
    parser.add_argument(
        "--tokens",
        nargs="+",
        action="extend",
        metavar="FILE",
        default=[],
        help="files of ids that --tokenizer has made: .bin of Megatron-LM (with .idx), llm.c or "
        "nanoGPT, .npy, or a folder of Hugging Face datasets",
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
        "--workers", type=int, default=1, metavar="N", help="number of processes; 1: only this one"
    )
    parser.add_argument("--address", metavar="ADDRESS", help="run Ray tasks on this cluster")
    add_unauthenticated(parser)
    parser.add_argument(
        "--on-poison",
        choices=["auto", "fail", "quarantine"],
        default="auto",
        help="input that cannot be prepared: skip it, or fail; auto: skip what crashes, fail on "
        "errors that you can fix",
    )


def _prepare(options: argparse.Namespace) -> int:
    from ...cluster.report.live import show_preparation
    from ...data_pipeline.make.prepare import prepare
    from ...data_pipeline.verify import FoundFolder
    from .folders import print_folders

    if options.workers < 1:
        raise ValueError(f"--workers {options.workers}: must be at least 1")
    config, directory = prepare_config(options), options.output.absolute()
    if options.address is not None:
        from ...cluster.prepare_data import prepare_on_cluster

        allow_unauthenticated(options)
        given = {"address": options.address, "on_poison": options.on_poison}
        manifest = prepare_on_cluster(config, directory, console=console(), **given)
    else:
        with _pool(options.workers) as pool, show_preparation(console()) as on_progress:
            manifest = prepare(
                config, directory, pool=pool, on_progress=on_progress, on_poison=options.on_poison
            )
    print_folders([FoundFolder(options.output, manifest)])
    return 0


def prepare_config(options: argparse.Namespace) -> "PrepareConfig":
    """Returns the configuration: the file, changed by options, changed by single keys.

    Raises:
        ValueError: it is not valid.
    """
    from ...data_pipeline.prepare_config import TOKENS
    from ...train.config.resolve import resolve_prepare
    from ...train.recipes.smoke import RECIPES

    values: dict[str, Any] = {}
    overrides = list(options.overrides)
    # --input and --tokens consume all words that follow
    overrides += filter(_is_override, options.input + options.tokens)
    inputs = [word for word in options.input if not _is_override(word)]
    inputs += [TOKENS + word for word in options.tokens if not _is_override(word)]
    if inputs:
        values["input"] = inputs
    if options.tokenizer is not None:
        values["tokenizer"] = options.tokenizer
    return resolve_prepare(options.config, overrides, RECIPES, options=values)


def _is_override(word: str) -> bool:
    """Returns whether a word is meant as `key=value`, with or without its section."""
    from ...train.config.keys import known_keys
    from ...train.config.run_config import Config

    key, equals, _ = word.partition("=")
    known = {key for key, _ in known_keys(Config)}
    return bool(equals) and (key.startswith("prepare.") or {key, f"prepare.{key}"} & known != set())


def _pool(workers: int) -> "AbstractContextManager[TaskPool]":
    """Returns the pool that runs the tasks on this machine."""
    from ...data_pipeline.make.pools import LocalPool, SerialPool

    return LocalPool(workers) if workers > 1 else nullcontext(SerialPool())
