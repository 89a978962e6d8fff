"""`moebius data peek`: shows rows of a prepared folder, or of a training step, as text."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...plugins import run_and_step
from ..arguments import Commands, add_command
from ..console import console

if TYPE_CHECKING:
    from rich.text import Text

    from ...data_pipeline.read.peek import DecodedRow, DocumentPart

_ROWS = 3
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


def add_peek(actions: Commands) -> None:
    """Declares `moebius data peek` and its options."""
    parser = add_command(
        actions,
        "peek",
        _peek,
        "show rows as text: documents, their ends, what is learned, padding",
        examples=[
            "data peek shards",
            "data peek shards --split validation --rows 1",
            "data peek runs/mine@120",
        ],
    )
    parser.add_argument(
        "path", type=Path, metavar="DATA|RUN[@T]", help="a prepared folder, or a run that reads one"
    )
    parser.add_argument("--split", choices=["train", "validation"], default="train")
    parser.add_argument(
        "--rows",
        type=int,
        default=_ROWS,
        metavar="N",
        help=f"number of rows, spread over the split (default: {_ROWS})",
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="T",
        help="show every sample of this step of the run, from 1, as RUN@T does",
    )


def _peek(options: argparse.Namespace) -> int:

    screen = console()
    for line in _lines(_rows(options)):
        screen.print(line, soft_wrap=True, highlight=False)
    return 0


def _rows(options: argparse.Namespace) -> "list[DecodedRow]":
    from ...data_pipeline.data_config import DataConfig
    from ...data_pipeline.read.peek import peek_samples, peek_split
    from ...data_pipeline.tokenizers.tokenizer import prepared_tokenizer
    from ...data_pipeline.verify import data_folder
    from ...train.config.run_config import Config

    if options.rows < 1:
        raise ValueError(f"--rows {options.rows}: must be at least 1")
    run, step = run_and_step(options.path, options.step)
    folder = data_folder(run)
    tokenizer = prepared_tokenizer(folder)
    if folder == run:
        if step is not None:
            raise ValueError(f"--step {step}: {folder} is not a run, so it has no steps")
        return peek_split(DataConfig(directory=str(folder)), options.split, options.rows, tokenizer)
    config = Config.load(run / "config.json")
    if step is None:
        return peek_split(config.data, options.split, options.rows, tokenizer)
    if not 1 <= step <= config.train.steps:
        raise ValueError(f"--step {step}: the run has steps 1 to {config.train.steps}")
    end = step * config.train.global_batch
    return peek_samples(config.data, range(end - config.train.global_batch, end), tokenizer)


def _lines(rows: "Sequence[DecodedRow]") -> "Iterator[Text]":
    from rich.text import Text

    number = 0
    for row in rows:
        yield Text(row.place, style="bold")
        for document in row.documents:
            yield _line(document, _COLOURS[number % len(_COLOURS)])
            number += 1
        if row.num_padding:
            yield Text(f"[{row.num_padding} places of padding]", style="dim")
        yield Text("")


def _line(document: "DocumentPart", colour: str) -> "Text":
    """Returns a document's text; dim brackets enclose text without loss."""
    from rich.text import Text

    from ...data_pipeline.read.peek import visible

    line = Text()
    for hidden, is_learned in document.segments:
        text = visible(hidden)
        if is_learned:
            line.append(text, style=colour)
        elif text:
            line.append(f"⟦{text}⟧", style=f"{colour} dim")
    if document.ends:
        line.append("■", style=f"{colour} reverse")
    return line
