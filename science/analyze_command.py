"""`moebius analyze`: what a trained model's routers and depth steps do, in pictures."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from moebius.cli.arguments import Commands, add_command, add_run_argument

if TYPE_CHECKING:
    from .analysis.analyse import Analysis

DEFAULT_TOKENS = 100_000


def add_commands(commands: Commands) -> None:
    """Declares `moebius analyze`."""
    text = "draw what a trained model's experts and depth steps do, from a checkpoint"
    parser = add_command(
        commands,
        "analyze",
        _analyze,
        text,
        examples=[
            "analyze runs/mine",
            "analyze runs/mine --tokens all --out pictures",
            "analyze runs/mine --step 2000 --json",
            'analyze runs/mine --item " the" --item " king"',
        ],
    )
    add_run_argument(parser)
    parser.add_argument(
        "--step", type=int, metavar="N", help="of which checkpoint; default: the newest"
    )
    parser.add_argument("--split", choices=["validation", "train"], default="validation")
    parser.add_argument(
        "--tokens",
        type=_number_of_tokens,
        default=DEFAULT_TOKENS,
        metavar="N|all",
        help=f"how many, in whole rows spread over the split; default: {DEFAULT_TOKENS:,}",
    )
    parser.add_argument(
        "--item",
        action="append",
        default=[],
        metavar="TEXT",
        help="a token whose experts are drawn by themselves; may be given several times; default: "
        "some of the most frequent",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="for page, pictures and data; default: RUN/analysis/step_N",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON, for scripts"
    )


def _number_of_tokens(text: str) -> int | None:
    """Reads the value of --tokens; None: all."""
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor `all`") from None


def _analyze(options: argparse.Namespace) -> int:
    """Carries out `moebius analyze`."""
    from .analysis.write import PAGE, as_json, check_folder, write_analysis

    if options.out is not None:
        check_folder(options.out)
    analysis = _analysis(options)
    folder = options.out or options.run_dir / "analysis" / f"step_{analysis.step:08d}"
    check_folder(folder)
    pictures = write_analysis(analysis, folder)
    if options.json:
        found = as_json(analysis) | {"page": str(folder / PAGE), "pictures": pictures}
        print(json.dumps(found, indent=2))
        return 0
    drawn = sum("png" in picture for picture in pictures)
    print(
        f"step {analysis.step}, {analysis.split}: {drawn} picture{'s' * (drawn != 1)} of {analysis.num_tokens:,} tokens "
        f"(loss {analysis.loss:.4f}) in {folder / PAGE}"
    )
    for picture in pictures:
        if picture["absent"]:
            print(f"  {picture['title']}: not drawn. {picture['absent']}")
    return 0


def _analysis(options: argparse.Namespace) -> "Analysis":
    """Counts, with a bar where somebody watches."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from .analysis.analyse import analyse

    console = Console(stderr=True)
    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)

        def advance(more: int, total: int) -> None:
            progress.update(task, advance=more, total=total)

        return analyse(
            options.run_dir,
            step=options.step,
            split=options.split,
            num_tokens=options.tokens,
            item_texts=options.item,
            on_rows=advance,
        )
