"""`moebius data peek`: shows rows of a prepared folder, or of a training step, as text."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...data_pipeline.words import run_and_step, some_of
from ..arguments import Commands, add_command
from ..console import console

if TYPE_CHECKING:
    from rich.text import Text

    from ...data_pipeline.read.peek import DecodedRow, DocumentPart
    from ...train.config.run_config import Config

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
    from ...train.record.run_folder import stored_config

    if options.rows < 1:
        raise ValueError(f"--rows {options.rows}: must be at least 1")
    run, step = run_and_step(options.path, options.step)
    folder = data_folder(run)
    tokenizer = prepared_tokenizer(folder)
    if folder == run:
        if step is not None:
            raise ValueError(f"--step {step}: {folder} is not a run, so it has no steps")
        return peek_split(DataConfig(directory=str(folder)), options.split, options.rows, tokenizer)
    config = stored_config(run)
    _check_is_of_run(config, run, step)
    if step is None:
        return peek_split(config.data, options.split, options.rows, tokenizer)
    if not 1 <= step <= config.train.steps:
        raise ValueError(f"--step {step}: the run has steps 1 to {config.train.steps}")
    end = step * config.train.global_batch
    return peek_samples(config.data, range(end - config.train.global_batch, end), tokenizer)


def _check_is_of_run(config: "Config", run_dir: Path, step: int | None) -> None:
    """Refuses a folder with other data, or another order, than that of a run's checkpoint."""
    from ...data_pipeline.read.corruption import open_fetcher
    from ...data_pipeline.read.samples import OrderedSamples
    from ...distributed.checkpoint.format import list_checkpoints, read_meta

    saved = list_checkpoints(run_dir / "checkpoints")
    # the first after the step: data.override_position may have changed the data of later ones
    after = [one for one in saved if step is not None and one.step >= step] or saved[-1:]
    position = read_meta(after[0].path).meta.get("data") if after else None
    if position and (
        differing := OrderedSamples(config.data, open_fetcher(config.data)).differences(position)
    ):
        raise ValueError(
            f"{config.data.directory} is not as it was when {run_dir} read it "
            f"({some_of(differing, between='; ')}): `moebius data peek {config.data.directory}` shows what is "
            "there now"
        )


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
