"""Lists and verifies a run's checkpoints, for `moebius ckpt`."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from rich.table import Table
from rich.text import Text

from ...data_pipeline.words import reads_in, run_and_step, some_of
from ...distributed.checkpoint.checkpoint_folder import CheckpointConfig, list_set_aside
from ...distributed.checkpoint.format import (
    CheckpointError,
    CorruptCheckpointError,
    StartProgress,
    find_checkpoint,
    list_checkpoints,
    missing_files,
    open_verified,
    read_meta,
    step_name,
)


def list_table(path: Path) -> Table:
    """Returns a table of a run's checkpoints, oldest first, or of the checkpoint `path`.

    Unfinished checkpoints have a line too. This reads names and sizes only.

    Raises:
        CheckpointError: there is none.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("step", "written", "MiB", "ranks", "ep", "shard", "replicate", "state"):
        justify = "left" if name in ("written", "state") else "right"
        table.add_column(name, justify=justify, no_wrap=name != "state")
    named, (path, step) = path, run_and_step(path)
    own = [found.path for found in list_checkpoints(path / "checkpoints")]
    kept = _why_kept(own)
    for checkpoint in own if own and step is None else [find_checkpoint(named)]:
        with suppress(FileNotFoundError):  # its run has deleted it as an old one
            table.add_row(*_row(checkpoint, kept.get(checkpoint.name), is_of_run=bool(own)))
    if step is not None:
        return table
    for unfinished in sorted((path / "checkpoints").glob("*.tmp")):
        words = Text(f"{unfinished.name}: being written, or abandoned", style="yellow")
        with suppress(FileNotFoundError):  # it was completed meanwhile
            table.add_row("", _time_of(unfinished), "", "", "", "", "", words)
    for aside in list_set_aside(path / "checkpoints"):
        words = Text(f"{aside.name}: damaged, and set aside by the run", style="red")
        size = f"{_size_of(aside) / 2**20:,.1f}"
        table.add_row("", _time_of(aside), size, "", "", "", "", words)
    return table


def _why_kept(checkpoints: Sequence[Path]) -> dict[str, str]:
    """Returns why a run's checkpoints stay, by their names; empty if the newest one cannot tell."""
    try:
        section = read_meta(checkpoints[-1]).meta["config"]["checkpoint"]
        config = CheckpointConfig.model_validate(section)
        read = reads_in(checkpoints[-1].parent)
        return config.why_kept([path.name for path in checkpoints], read)
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _row(checkpoint: Path, kept: str | None, *, is_of_run: bool) -> tuple[str | Text, ...]:
    """Returns a checkpoint's line of the table; FileNotFoundError if it was deleted meanwhile."""
    step = checkpoint.name.removeprefix("step_").lstrip("0")
    ranks: Sequence[object] = ("", "", "", "")
    written, size = _time_of(checkpoint), f"{_size_of(checkpoint) / 2**20:,.1f}"
    try:
        meta, problems = read_meta(checkpoint), missing_files(checkpoint)
        layout, step = meta.layout, str(meta.step)
        ranks = (layout.world_size, layout.ep, layout.dp_shard, layout.dp_replicate)
        if is_of_run and checkpoint.name != step_name(meta.step):
            problems.append(
                f"is called {checkpoint.name}, not {step_name(meta.step)}: was it renamed?"
            )
    except CorruptCheckpointError as error:
        problems = [str(error)]
    why = "" if kept is None else f"; kept: {kept}" if kept else "; kept by nothing, will be pruned"
    state = Text(f"complete{why}", style="green")
    if problems:
        state = Text(some_of(problems), style="red")
    return (step, written, size, *map(str, ranks), state)


def verify_each(
    path: Path, step: int | None, start_progress: StartProgress
) -> Iterator[tuple[Path, str, CheckpointError | None]]:
    """Verifies one checkpoint or all of a run; yields what each holds, and its damage.

    Skips checkpoints that the run deletes in the meantime.

    Raises:
        CheckpointError: there is none; or the requested one, or every one, was deleted meanwhile.
    """
    paths = [find_checkpoint(path, step)]
    path, step = run_and_step(path, step)
    if step is None and paths[0] != path:
        paths = [checkpoint.path for checkpoint in list_checkpoints(path / "checkpoints")] or paths
    num_verified = 0
    for checkpoint in paths:
        if (found := _verified(checkpoint, start_progress)) is not None:
            num_verified += 1
            yield checkpoint, *found
    if not num_verified:
        deleted = some_of(f"{checkpoint} was deleted meanwhile" for checkpoint in paths)
        raise CheckpointError(f"{deleted}; nothing was verified")


def _verified(
    checkpoint: Path, start_progress: StartProgress
) -> tuple[str, CheckpointError | None] | None:
    """Returns what a checkpoint holds and what is wrong; None if its run has deleted it meanwhile."""
    try:
        stored = open_verified(
            checkpoint, start_progress(f"reading {checkpoint.name}", _size_of(checkpoint))
        )
    except FileNotFoundError:
        return None
    except CheckpointError as error:
        return ("", error) if checkpoint.is_dir() else None
    num_experts = len(stored.meta.num_experts)
    return (
        f"{len(stored.index.tensors)} tensors, {num_experts} of them by experts, each expert once",
        None,
    )


def _size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def _time_of(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
