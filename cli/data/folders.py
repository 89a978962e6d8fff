"""`moebius data`: what is in prepared folders (data_report.py, data_peek.py)."""

import argparse
from pathlib import Path

from ..arguments import RUNS, Commands, add_command
from .peek import add_order, add_peek


def add_commands(commands: Commands) -> None:
    """Declares `moebius data` with its actions."""
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

    from ..progress import progress_bars
    from .data_report import print_json, verify_folder

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
