"""`moebius data peek` and `order`: what is in the rows of a run or of a folder, and which documents
a run reads when.

A run folder, a recipe or a .toml file with single values changed, and a prepared folder alone are
taken alike: the last stands for the default settings with the folder's sources, whose seed, lengths
and batch can be changed like any others.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import Commands, add_command

if TYPE_CHECKING:
    from rich.text import Text

    from ...data_pipeline.document_order import RowPart, RunOrder, SampleRow, Sightings
    from ...data_pipeline.read.peek import DecodedPart, DecodedRow
    from ...train.config.run_config import Config

_ROWS = 3
_EPOCHS = 20
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
_SAMPLES_SHOWN = 8  # of one epoch's


def add_peek(actions: Commands) -> None:
    """Declares `moebius data peek`."""
    parser = add_command(
        actions,
        "peek",
        _peek,
        "show rows as text: documents, their ends, what is learned, padding",
        examples=[
            "data peek shards",
            "data peek shards --split validation --rows 1 data.seq_len=512",
            "data peek runs/mine --step 120",
            "data peek runs/mine --sample 1919 --json",
        ],
    )
    _add_path(parser)
    parser.add_argument("--split", choices=["train", "validation"], default="train")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help=f"the first N samples of a run; of a folder, N from all over it (default: {_ROWS})",
    )
    which.add_argument("--sample", type=int, metavar="G", help="one sample of a run, from 0 on")
    which.add_argument("--step", type=int, metavar="T", help="every sample of a step, from 1 on")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def add_order(actions: Commands) -> None:
    """Declares `moebius data order`."""
    parser = add_command(
        actions,
        "order",
        _order,
        "say which documents are in a step, or in which steps a document is",
        examples=[
            "data order runs/mine --step 12345",
            "data order runs/mine --document 4f3a91d2",
            "data order runs/mine --document books.jsonl:1207",
            "data order shards --step 3 data.seq_len=512 train.global_batch=64",
        ],
    )
    _add_path(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, metavar="T", help="which documents were in it")
    which.add_argument("--sample", type=int, metavar="G", help="the same of one sample")
    which.add_argument(
        "--document",
        metavar="X",
        help="when it is read: its id or the beginning of that, LABEL:ROW, its record id, or "
        "SOURCE/ERA/NUMBER",
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=_EPOCHS,
        metavar="N",
        help=f"of a document: in the first N passes over its source (default: {_EPOCHS})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def _add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="RUN|DIR|RECIPE|FILE.toml",
        help="a run, a prepared folder, or a configuration that names one (data.directory)",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="single values to change"
    )


# ---- which order


def _resolve(options: argparse.Namespace) -> "tuple[Config, Path | None]":
    """Returns the configuration that a path means, and the run folder if it is one.

    Raises:
        ValueError: it means none, or its data is not there.
    """
    from ...data_pipeline.verify import check_readable, is_data_folder
    from ...train.config.resolve import resolve
    from ...train.config.run_config import Config
    from ...train.recipes.smoke import RECIPES
    from ...train.record.run_folder import place_data
    from ..arguments import RUNS

    path = Path(options.path)
    named = dict(RECIPES)
    run = path if (path / "config.json").is_file() else None
    if run is not None:
        named[options.path] = lambda: Config.load(path / "config.json")
    elif is_data_folder(path):
        named[options.path] = lambda: _config_of_folder(path)
    elif path.is_dir():
        check_readable(path)  # says what is wrong with it
    elif options.path not in named and path.suffix != ".toml":
        raise ValueError(
            f"{path} is no run, no prepared folder and no recipe (`moebius models` lists those)"
        )
    config = place_data(resolve(options.path, options.overrides, named), RUNS)
    check_readable(Path(config.data.directory))
    return config, run


def _config_of_folder(folder: Path) -> "Config":
    """Returns the default configuration for a folder's sources."""
    from ...data_pipeline.data_config import DataConfig
    from ...data_pipeline.verify import config_of_folder
    from ...model.config.model_config import ModelConfig
    from ...train.config.run_config import Config

    prepare = config_of_folder(folder)
    return Config(
        model=ModelConfig(vocab_size=prepare.num_token_ids),
        data=DataConfig(directory=str(folder.absolute())),
        prepare=prepare,
    )


def _open_order(config: "Config", run: Path | None) -> "RunOrder":
    from ...data_pipeline.document_order import RunOrder
    from ...data_pipeline.read.skipped_samples import NOTHING
    from ...train.spikes.record import left_out_by, read_rollbacks

    return RunOrder(
        config.data,
        global_batch=config.train.global_batch,
        num_steps=config.train.steps,
        skip_folder=None if run is None else run / "skipped",
        left_out=NOTHING if run is None else left_out_by(read_rollbacks(run)),
    )


def _order_json(config: "Config") -> dict[str, Any]:
    """Returns the values that decide the order."""
    data = config.data
    return {
        "directory": data.directory,
        "seed": data.seed,
        "seq_len": data.seq_len,
        "packing": data.packing,
        "global_batch": config.train.global_batch,
        "steps": config.train.steps,
    }


def _order_words(config: "Config") -> str:
    said = _order_json(config)
    directory = said.pop("directory")
    return (
        f"{directory} in the order of {', '.join(f'{key} {value}' for key, value in said.items())}"
    )


# ---- peek


def _peek(options: argparse.Namespace) -> int:
    """Carries out `moebius data peek`."""
    from .data_report import print_json

    config, run = _resolve(options)
    rows, in_order = _peeked_rows(options, config, run)
    if options.json:
        order = {"order": _order_json(config) if in_order else None}
        print_json(order | {"rows": [row.as_json() for row in rows]})
        return 0
    words = _order_words(config) if in_order else f"{config.data.directory}, {options.split}"
    _print_lines(_peek_lines(words, rows))
    return 0


def _peeked_rows(
    options: argparse.Namespace, config: "Config", run: Path | None
) -> "tuple[list[DecodedRow], bool]":
    """Returns the rows that were asked for, and whether they are in the order of a run."""
    from ...data_pipeline.read.peek import peek_order, peek_shards
    from ...data_pipeline.read.token_store import prepared_tokenizer
    from ...data_pipeline.verify import is_data_folder

    count = _ROWS if options.rows is None else options.rows
    if count < 1:
        raise ValueError(f"--rows {count}: at least 1")
    one_place = options.sample is not None or options.step is not None
    if options.split == "validation" and one_place:
        raise ValueError("--sample and --step are of training: leave out --split validation")
    tokenizer = prepared_tokenizer(config.data.directory)
    alone = run is None and is_data_folder(Path(options.path)) and not one_place
    if alone or options.split == "validation":
        return peek_shards(config.data, options.split, count, tokenizer), False
    with _open_order(config, run) as order:
        return peek_order(order, _samples(options, order, count), tokenizer), True


def _samples(options: argparse.Namespace, order: "RunOrder", count: int) -> range:
    if options.step is not None:
        return order.samples_of_step(options.step)
    if options.sample is not None:
        return range(options.sample, options.sample + 1)
    return range(min(count, order.num_samples))


def _peek_lines(words: str, rows: "list[DecodedRow]") -> "Iterator[Text]":
    from rich.text import Text

    yield Text(words, style="dim")
    colours: dict[str, str] = {}
    for row in rows:
        yield Text("")
        yield _row_heading(row)
        for part in row.parts:
            # a document has one colour, and the next one another
            colour = colours.setdefault(
                part.part.document.place, _COLOURS[len(colours) % len(_COLOURS)]
            )
            yield from _part_lines(part, colour)
        if row.num_padding:
            yield Text(f"[{row.num_padding} places of padding]", style="dim")
        if row.damaged:
            yield Text("[a record batch of this row is damaged]", style="bold red")


def _row_heading(row: "DecodedRow") -> "Text":
    from rich.text import Text

    place = f"source {row.source}, era {row.era}, row {row.row}"
    if row.sample is None:
        return Text(place, style="bold")
    return Text(_sample_words(row.sample), style="bold")


def _sample_words(row: "SampleRow") -> str:
    step = "left out by the run" if row.step is None else f"step {row.step:,}"
    words = (
        f"{step}, sample {row.sample:,}: source {row.source}, epoch {row.epoch}, era {row.era}, row "
        f"{row.row}"
    )
    if row.replaces is not None:
        words += f" in place of row {row.replaces}, which was damaged"
    return words


def _part_lines(part: "DecodedPart", colour: str) -> "Iterator[Text]":
    """Yields where a part is from, and its text; what is not learned stands in dim brackets."""
    from rich.text import Text

    from ...data_pipeline.read.peek import visible

    yield Text(f"── {_part_words(part.part)}", style=f"{colour} dim")
    line = Text()
    for segment in part.segments:
        text = visible(segment.text)
        if segment.learned:
            line.append(text, style=colour)
        elif text:
            line.append(f"⟦{text}⟧", style=f"{colour} dim")
    if part.ends:
        line.append("■", style=f"{colour} reverse")
    yield line


def _part_words(part: "RowPart") -> str:
    from ...data_pipeline.read.peek import visible

    document = part.document
    end = part.first + part.num_tokens
    words = [
        document.place,
        document.doc_id[:12],
        visible(f"{document.label}:{document.source_row}"),
        *([visible(document.record_id)] if document.record_id else []),
        f"all {document.num_tokens:,} tokens"
        if part.is_whole
        else f"tokens {part.first:,} to {end:,} of {document.num_tokens:,}",
    ]
    return "  ".join(words)


# ---- order


def _order(options: argparse.Namespace) -> int:
    """Carries out `moebius data order`."""
    config, run = _resolve(options)
    if options.epochs < 1:
        raise ValueError(f"--epochs {options.epochs}: at least 1")
    with _open_order(config, run) as order:
        if options.document is not None:
            return _print_sightings(options, config, order)
        return _print_rows(options, config, order)


def _print_rows(options: argparse.Namespace, config: "Config", order: "RunOrder") -> int:
    from rich.text import Text

    from .data_report import print_json

    found = [(row, order.parts_of(row)) for row in order.rows_of(_samples(options, order, 1))]
    if options.json:
        rows = [
            asdict(row) | {"documents": [part.as_json() for part in parts]} for row, parts in found
        ]
        print_json({"order": _order_json(config), "rows": rows})
        return 0
    lines = [Text(_order_words(config), style="dim")]
    for row, parts in found:
        lines.append(Text(_sample_words(row), style="bold"))
        lines += [Text(f"  {_part_words(part)}") for part in parts]
    _print_lines(iter(lines))
    return 0


def _print_sightings(options: argparse.Namespace, config: "Config", order: "RunOrder") -> int:
    from rich.console import Console

    from ..progress import progress_bars
    from .data_report import print_json

    with progress_bars(Console(stderr=True)) as start_progress:
        on_bytes = start_progress("looking for the document", order.documents.num_bytes())
        document = order.documents.find(options.document, on_bytes)
    found = order.sightings(document, most_epochs=options.epochs)
    if options.json:
        told = asdict(found) | {"document": document.as_json()}
        print_json({"order": _order_json(config)} | told)
    else:
        _print_lines(_sighting_lines(config, order, found))
    return 0


def _sighting_lines(config: "Config", order: "RunOrder", found: "Sightings") -> "Iterator[Text]":
    from rich.text import Text

    from ...data_pipeline.document_order import RowPart
    from ...data_pipeline.read.peek import visible

    document = found.document
    yield Text(_order_words(config), style="dim")
    yield Text(_part_words(RowPart(document, 0, document.num_tokens)), style="bold")
    yield Text(f"  of {visible(document.input)}, in {len(found.rows):,} rows of era {document.era}")
    for epoch in found.epochs:
        steps = _listed([f"{step:,}" for step in epoch.steps])
        samples = _listed([f"{sample:,}" for sample in epoch.samples])
        yield Text(f"  epoch {epoch.epoch}: step {steps} (sample {samples})")
    if not found.epochs:
        yield Text(f"  not before the run's end: {_never_words(order, found)}")
    if found.epochs_left_out:
        yield Text(f"  … and {found.epochs_left_out:,} later epochs (--epochs)")
    if not found.is_final:
        yield Text(
            "  the folder is still growing: later epochs are not decided yet", style="yellow"
        )


def _never_words(order: "RunOrder", found: "Sightings") -> str:
    if not found.rows:
        return "its tokens are the end of an era that fills no row"
    if found.next_sample is None:
        return f"source {found.document.source} has no weight there"
    step = order.left_out.step_of(found.next_sample, order.global_batch)
    if step is None:
        return f"the run left out sample {found.next_sample:,} when it went back from a spike"
    return f"a longer one would read it at step {step:,}"


def _listed(words: list[str]) -> str:
    more = len(words) - _SAMPLES_SHOWN
    return ", ".join(words[:_SAMPLES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def _print_lines(lines: "Iterator[Text]") -> None:
    from rich.console import Console

    console = Console()
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
