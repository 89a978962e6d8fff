"""`moebius simulate`: routes tokens between simulated ranks in this process and counts the traffic."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ...data_pipeline.words import run_and_step
from ...distributed.dispatch.table import LOCAL, by_collectives
from ..arguments import Commands, NamesOrOwn, add_command, add_overrides
from ..console import console, print_message

if TYPE_CHECKING:
    from ...planning.simulation.calls import CallSource


def add_commands(commands: Commands) -> None:
    """Declares `moebius simulate` and its options."""
    parser = add_command(
        commands,
        "simulate",
        _simulate,
        "route tokens on simulated ranks in this process and count the traffic",
        examples=[
            "simulate moeut --ep 16 --dispatcher alltoall dedup",
            "simulate runs/mine --ep 8 --ranks-per-node 4",
        ],
    )
    parser.add_argument(
        "name",
        metavar="MODEL",
        help="a recipe or a FILE.toml (fresh weights), or a run (trained ones), also RUN@STEP",
    )
    add_overrides(parser)
    _add_rank_arguments(parser)
    parser.add_argument(
        "--tokens-per-rank", type=int, default=64, metavar="N", help="per step; default: 64"
    )
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--json", action="store_true", help="everything, all matrices included, as JSON"
    )


def _add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the simulated ranks and their dispatchers."""
    parser.add_argument(
        "--ep", type=int, metavar="N", help="ranks, at most 256; default: mesh.ep, or 8"
    )
    parser.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="default: 8, or all if 8 does not divide"
    )
    parser.add_argument(
        "--dispatcher",
        nargs="+",
        metavar="NAME",
        choices=NamesOrOwn([LOCAL, *by_collectives()]),
        help=f"one, or several to compare: {', '.join(by_collectives())}; default: the mesh's",
    )


def _simulate(options: argparse.Namespace) -> int:
    """Runs `moebius simulate`; returns 1 if the simulation found a violation."""
    from ...planning.simulation.calls import ranks_of, simulate_all
    from ...planning.simulation.threads import RankFailed
    from ...planning.simulation.traffic_report import render_simulation, traffic_report

    if options.steps < 1:
        raise ValueError(f"--steps {options.steps} must be at least 1")
    source = _source(options)
    ep, per_node = ranks_of(source.config, options.ep, options.ranks_per_node)
    dispatchers = options.dispatcher or [source.config.mesh.dispatcher]
    try:
        with console(stderr=True).status("simulating"):
            simulations = simulate_all(source, ep, per_node, dispatchers)
    except RankFailed as error:
        if not _says_enough(error.__cause__):
            raise
        print_message("error", str(error))
        return 1
    report = traffic_report(source, simulations)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        console().print(render_simulation(report))
    return 1 if report["violations"] else 0


def _says_enough(cause: BaseException | None) -> bool:
    """Returns whether the message of what ended a simulated rank helps without its traceback.

    It does if ranks disagree about an exchange, wait in vain (no cause) or run out of memory.
    """
    from ...distributed.dispatch.exchange import ExchangeMismatch

    # torch has no exception class for its allocator's errors.
    known = cause is None or isinstance(cause, (ExchangeMismatch, MemoryError))
    return known or "DefaultCPUAllocator" in str(cause)


def _source(options: argparse.Namespace) -> "CallSource":
    """Returns the source of calls: a trained run or a fresh model."""
    from ...distributed.process.process import start_process
    from ...evaluation.restore import restore
    from ...planning.simulation.calls import CallSource, expert_maps_of
    from ...train.config.resolve import resolve
    from ...train.recipes.smoke import RECIPES

    run_dir, size = Path(options.name), (options.tokens_per_rank, options.steps)
    run, _ = run_and_step(run_dir)
    if not run.is_dir():
        config = resolve(options.name, options.overrides, RECIPES)
        return CallSource(options.name, config, None, *size)
    if options.overrides:
        raise ValueError(
            f"{run_dir} is a run, whose configuration cannot be changed: remove "
            f"{' '.join(options.overrides)}"
        )
    with start_process("cpu") as process:
        restored = restore(run_dir, process)
    title, maps = f"{run.name}, step {restored.step}", expert_maps_of(restored.checkpoint)
    return CallSource(title, restored.config, restored.model, *size, maps)
