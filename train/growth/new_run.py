"""Writes what a source grows into as a new run with one checkpoint."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...data_pipeline.words import run_and_step
from ...distributed.checkpoint.atomic_directory import refuse_existing
from ...distributed.checkpoint.format import find_checkpoint, read_meta
from ...distributed.checkpoint.source import SOURCE_FILES, open_reader
from ..config.errors import ConfigError
from ..families.import_run import Imported, write_run
from ..families.start import start_from
from ..families.table import shapes_of


def grow_run(
    given: str,
    out: Path,
    words: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    family: str | None = None,
) -> Imported:
    """Writes a run folder `out` whose one checkpoint has the weights that a source grows into.

    It goes on after the step of a checkpoint, or begins with a folder's weights, without any state of an
    optimizer. The arguments and errors are those of `start_from`; `out` appears whole or not at all.
    """
    refuse_existing(out)
    if not words:
        raise ConfigError(f"{given}: say how it grows, for example split=2")
    path, step = (given, None) if given.startswith("hf://") else run_and_step(given)
    start = start_from(
        given if step is None else str(find_checkpoint(Path(path), step)),
        None,
        overrides,
        family=family,
        grow=words,
    )
    source, config, before = start.source, start.config, None
    reader = open_reader(source)
    if source.step is not None:
        before = read_meta(Path(source.path)).meta
        if any(word.startswith(("data.", "prepare.")) for word in overrides):
            before = {**before, "data": None}  # a position in other text
        grown = tuple(one.model_copy(update={"takes": ()}) for one in source.grown)
        source = source.model_copy(update={"kind": "written", "grown": grown})
    elif config.prepare.tokenizer == source.path:  # which the run has its own copy of
        own = {"tokenizer": str(out.absolute() / SOURCE_FILES)}
        config = config.model_copy(update={"prepare": config.prepare.model_copy(update=own)})
    state = {name: partial(reader.weight, name) for name in shapes_of(config.model)}
    notes = "".join(f"\n  {note}" for note in start.notes)
    return write_run(out, config, state, notes, source, before=before)
