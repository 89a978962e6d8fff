"""What `moebius ckpt` shows and does: a run's checkpoints as a table, verified, and rewritten for
other ranks.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from ...distributed.checkpoint.checkpoint_folder import list_set_aside
from ...distributed.checkpoint.format import (
    CheckpointError,
    CorruptCheckpointError,
    find_checkpoint,
    list_checkpoints,
    missing_files,
    open_verified,
    read_meta,
    step_name,
)
from ...distributed.checkpoint.reshard import StartProgress, reshard
from ...distributed.dispatch.expert_map import ExpertMap
from ...distributed.layout import Layout, MeshConfig, check_runnable, plan_layout


def list_table(path: Path) -> Table:
    """Returns a table of a run's checkpoints, oldest first, or of the one that `path` is.

    What is unfinished beside them has a line too. Names and sizes are looked at, no bytes read.

    Raises:
        CheckpointError: there is none.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("step", "written", "MiB", "ranks", "ep", "shard", "replicate", "state"):
        justify = "left" if name in ("written", "state") else "right"
        table.add_column(name, justify=justify, no_wrap=name != "state")
    own = [found.path for found in list_checkpoints(path / "checkpoints")]
    for checkpoint in own or [find_checkpoint(path)]:
        with suppress(FileNotFoundError):  # deleted as an old one by its run, which goes on
            table.add_row(*_row(checkpoint, is_of_run=bool(own)))
    for unfinished in sorted((path / "checkpoints").glob("*.tmp")):
        words = Text(f"{unfinished.name}: being written, or left behind", style="yellow")
        with suppress(FileNotFoundError):  # it was being written, and got its name meanwhile
            table.add_row("", _time_of(unfinished), "", "", "", "", "", words)
    for aside, why in list_set_aside(path / "checkpoints"):
        style = "red" if why == "damaged" else "yellow"
        words = Text(f"{aside.name}: {why}, and set aside by the run", style=style)
        size = f"{_size_of(aside) / 2**20:,.1f}"
        table.add_row("", _time_of(aside), size, "", "", "", "", words)
    return table


def _row(checkpoint: Path, *, is_of_run: bool) -> tuple[str | Text, ...]:
    """A checkpoint's line of the table; FileNotFoundError where it was deleted meanwhile."""
    step = checkpoint.name.removeprefix("step_").lstrip("0")
    ranks: Sequence[object] = ("", "", "", "")
    written, size = _time_of(checkpoint), f"{_size_of(checkpoint) / 2**20:,.1f}"
    try:
        meta, problems = read_meta(checkpoint), missing_files(checkpoint)
        layout, step = meta.layout, str(meta.step)
        ranks = (layout.world_size, layout.ep, layout.dp_shard, layout.dp_replicate)
        if is_of_run and checkpoint.name != step_name(meta.step):
            problems.append(f"is called {checkpoint.name}, by which a run goes: was it renamed?")
    except CorruptCheckpointError as error:
        problems = [str(error)]
    state = Text("; ".join(problems), style="red") if problems else Text("complete", style="green")
    return (step, written, size, *map(str, ranks), state)


def verify_each(
    path: Path, step: int | None, start_progress: StartProgress
) -> Iterator[tuple[Path, str, CheckpointError | None]]:
    """Verifies one checkpoint or all of a run, and yields for each what it holds and its damage.

    Of all of a run those are passed over that it deletes meanwhile, as it does with old ones.

    Raises:
        CheckpointError: there is none; or the one that was asked for, or every one of the run, was
            deleted meanwhile.
    """
    paths = [find_checkpoint(path, step)]
    if step is None and paths[0] != path:
        paths = [checkpoint.path for checkpoint in list_checkpoints(path / "checkpoints")] or paths
    num_verified = 0
    for checkpoint in paths:
        if (found := _verified(checkpoint, start_progress)) is not None:
            num_verified += 1
            yield checkpoint, *found
    if not num_verified:
        deleted = "; ".join(f"{checkpoint} was deleted meanwhile" for checkpoint in paths)
        raise CheckpointError(f"{deleted}; nothing was verified")


def _verified(
    checkpoint: Path, start_progress: StartProgress
) -> tuple[str, CheckpointError | None] | None:
    """What a checkpoint holds and what is wrong with it; None if its run, which goes on, has
    deleted it meanwhile.
    """
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


def reshard_for(
    path: Path,
    out: Path,
    mesh: dict[str, Any],
    *,
    world_size: int,
    step: int | None,
    start_progress: StartProgress,
) -> str:
    """Writes a checkpoint anew for other ranks and returns a few lines about what was written.

    Args:
        mesh: the values of MeshConfig for the new ranks.

    Raises:
        ValueError: no such checkpoint or it is damaged, the mesh does not fit, or `out` cannot be
            written.
    """
    try:
        config = MeshConfig(**mesh)
    except ValidationError as error:
        told = "; ".join(
            f"{'.'.join(map(str, one['loc']))} {one['input']}: {one['msg']}"
            for one in error.errors()
        )
        raise CheckpointError(f"the mesh is not valid: {told}") from None
    check_runnable(config)
    layout, source = plan_layout(config, world_size), find_checkpoint(path, step)
    before = read_meta(source)
    started = time.monotonic()
    expert_maps, placed = _expert_maps(before.meta, layout, config.sharding)
    reshard(
        source,
        out,
        layout,
        sharding=config.sharding,
        expert_maps=expert_maps,
        start_progress=start_progress,
    )
    files = sum(file.suffix == ".distcp" for file in out.iterdir())
    return (
        f"{out}: step {before.step}, the same state as {source}, bit for bit\n"
        f"  written by  {_short(before.layout)}\n  rewritten   {_short(layout)}, sharding "
        f"{config.sharding}\n{placed}"
        f"  {files} files, {_size_of(out) / 2**20:,.1f} MiB, verified; "
        f"{time.monotonic() - started:.1f} s"
    )


def _expert_maps(
    meta: dict[str, Any], layout: Layout, sharding: str
) -> tuple[dict[str, ExpertMap], str]:
    """Where a run that moves its experts had them, if that fits: what ExpertPlacement takes up
    again. And words of it.
    """
    expert_maps = {
        name: ExpertMap.from_dict(bank["homes"]) for name, bank in meta.get("experts", {}).items()
    }
    if not expert_maps:
        return {}, ""
    eps = sorted({len(own.slots_P) for own in expert_maps.values()})
    if sharding == "none" and eps == [layout.ep]:
        return expert_maps, "  experts     where the run had moved them\n"
    was = ", ".join(map(str, eps))
    return (
        {},
        f"  experts     in contiguous blocks again: the run had moved them, for ep {was} and "
        "sharding none\n",
    )


def _size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def _time_of(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))


def _short(layout: Layout) -> str:
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    return (
        f"{ranks}: dp_replicate {layout.dp_replicate} × dp_shard {layout.dp_shard}, ep {layout.ep}"
    )
