"""Implements `moebius analyze`: pictures of a trained model's routers and depth steps."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .analysis.analyse import Analysis

DEFAULT_TOKENS = 100_000


def main(words: Sequence[str]) -> int:
    """Draws the pictures of a checkpoint (entry point of the group moebius.commands).

    Raises:
        ValueError: the run, its checkpoint or its data cannot be read.
    """
    options = _parser().parse_args(words)
    from .pictures.write import as_json, check_folder, write_analysis

    if options.out is not None:
        check_folder(options.out)
    analysis = _analysis(options)
    folder = options.out or analysis.run_dir / "analysis" / f"step_{analysis.step:08d}"
    check_folder(folder)
    pictures = write_analysis(analysis, folder)
    if options.json:
        print(json.dumps(as_json(analysis) | {"pictures": pictures}, indent=2))
        return 0
    drawn = sum("png" in picture for picture in pictures)
    print(
        f"step {analysis.step}, {analysis.split}: {drawn} picture{'s' * (drawn != 1)} of "
        f"{analysis.num_tokens:,} tokens (loss {analysis.loss:.4f}) in {folder}"
    )
    for picture in pictures:
        if picture["absent"]:
            print(f"  {picture['title']}: not drawn. {picture['absent']}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moebius analyze",
        description="Draws what a trained model's experts and depth steps do, from a checkpoint.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN[@STEP]", help="a run, or its checkpoint")
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
    text = "a token to draw by itself, may be given several times; default: some frequent ones"
    parser.add_argument("--item", action="append", default=[], metavar="TEXT", help=text)
    text = "for pictures and data; default: RUN/analysis/step_N"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser


def _number_of_tokens(text: str) -> int | None:
    """Parses the value of --tokens; None: all."""
    if text == "all":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor `all`") from None


def _analysis(options: argparse.Namespace) -> "Analysis":
    """Counts, with a progress bar in a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    from .analysis.analyse import analyse

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("rows", total=None)
        return analyse(
            options.run_dir,
            step=options.step,
            split=options.split,
            num_tokens=options.tokens,
            item_texts=options.item,
            on_rows=lambda more, total: progress.update(bar, advance=more, total=total),
        )
