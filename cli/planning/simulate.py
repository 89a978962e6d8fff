"""`moebius simulate`: routing and all-to-all on simulated ranks in this process, counted."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ...distributed.dispatch.table import LOCAL, by_collectives
from ..arguments import Commands, add_command, add_overrides
from ..messages import print_message

if TYPE_CHECKING:
    from ...model.transformer import Transformer
    from ...simulation.calls import CallSource, RequestedRanks, SavedPlacement
    from ...train.config.run_config import Config


def add_commands(commands: Commands) -> None:
    """Declares `moebius simulate`."""
    text = "route tokens on simulated ranks in this process, and count"
    parser = add_command(
        commands,
        "simulate",
        _simulate,
        text,
        examples=[
            "simulate moeut --ep 16 --dispatcher alltoall dedup",
            "simulate --trace runs/mine --ep 8 --png traffic.png",
        ],
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="MODEL",
        help="a recipe or a FILE.toml (fresh weights), or a run folder (trained ones)",
    )
    add_overrides(parser)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="RUN",
        help="replay what a run recorded (train.record_routing)",
    )
    _add_rank_arguments(parser)
    _add_work_arguments(parser)
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the traffic from rank to rank and the loads"
    )
    parser.add_argument(
        "--json", action="store_true", help="everything, all matrices included, as JSON"
    )


def _add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the simulated ranks, and how rows travel between them."""
    parser.add_argument(
        "--ep", type=int, metavar="N", help="ranks per copy of the experts; default: mesh.ep, or 8"
    )
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks in all, at most 256; default: the mesh's, or one ep group",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="default: 8, or all on one if 8 do not divide",
    )
    parser.add_argument(
        "--dispatcher",
        nargs="+",
        metavar="NAME",
        choices=[LOCAL, *by_collectives()],
        default=[None],
        help=f"one, or several to compare: {', '.join(by_collectives())}; default: the mesh's",
    )
    parser.add_argument(
        "--overlap-chunks", type=int, metavar="N", help="parts in which rows travel"
    )
    parser.add_argument(
        "--expert-map",
        metavar="STEP|contiguous",
        help="where a run that moves experts had them at that checkpoint; default: of a run its "
        "newest, of a trace contiguous",
    )


def _add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares how much is simulated."""
    parser.add_argument("--tokens-per-rank", type=int, metavar="N", help="of every step (64)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="default: 1, or all that were recorded"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of tokens, and of a trace's rows"
    )
    parser.add_argument(
        "--shapes-only",
        action="store_true",
        help="no values: first, middle and last of up to 10,240 ranks",
    )


def _simulate(options: argparse.Namespace) -> int:
    """Carries out `moebius simulate`; 1 where the simulation found a violation."""
    import traceback

    from ...simulation.dispatch import unexpected_cause
    from ...simulation.shapes import ShapeMismatch
    from ...simulation.threads import RankFailed

    try:
        return _simulated(options)
    # What ends a simulation before there is a report to show it in. One line says it; where that is
    # not enough, a traceback too.
    except (RankFailed, ShapeMismatch) as error:
        if (cause := unexpected_cause(error)) is not None:
            traceback.print_exception(cause)
        print_message("error", " ".join(str(error).split()))
        return 1


def _simulated(options: argparse.Namespace) -> int:
    """Simulates what was asked for and shows it; returns the exit code."""
    from rich.console import Console

    from ...simulation.calls import RequestedRanks, simulate_all
    from ...simulation.traffic_report import draw_simulation, render_simulation, simulation_as_json

    _refuse_contradictions(options)
    asked = RequestedRanks(
        options.ep, options.world_size, options.ranks_per_node, options.overlap_chunks
    )
    if options.shapes_only:
        return _simulate_shapes(options, asked)
    source = _source(options)
    with Console(stderr=True).status("simulating"):
        report = simulate_all(source, asked, options.dispatcher)
    if options.png:
        draw_simulation(report, options.png)
    if options.json:
        print(json.dumps(simulation_as_json(report), indent=2))
    else:
        Console().print(render_simulation(report))
    return 1 if report.violations else 0


def _refuse_contradictions(options: argparse.Namespace) -> None:
    """Raises JobError where two options exclude each other, or one would be ignored."""
    from ...cluster.job import JobError

    if (options.name is None) == (options.trace is None):
        raise JobError(
            "name what to simulate: a recipe, a FILE.toml or a run folder, or else --trace RUN"
        )
    idle = [("--tokens-per-rank", options.tokens_per_rank)]
    if options.shapes_only:
        idle += [
            ("--steps", options.steps),
            ("--png", options.png),
            ("--expert-map", options.expert_map),
        ]
        if len(options.dispatcher) > 1:
            raise JobError("--shapes-only builds a model with one dispatcher: name one")
    elif options.trace is None:
        return
    beside = "--shapes-only" if options.shapes_only else "--trace"
    for option, value in idle:
        if value is not None:
            raise JobError(f"{option} {value}: means nothing with {beside}")


def _source(options: argparse.Namespace) -> "CallSource":
    """Returns where the simulated steps get their routes from: a recorded trace, or a model."""
    from ...simulation.calls import source_from_model, source_from_trace

    if options.trace is not None:
        return source_from_trace(
            options.trace, steps=options.steps, seed=options.seed, expert_map=options.expert_map
        )
    title, config, trained, placement = _simulated_model(options)
    return source_from_model(
        title,
        config,
        trained,
        tokens_per_rank=64 if options.tokens_per_rank is None else options.tokens_per_rank,
        steps=1 if options.steps is None else options.steps,
        seed=options.seed,
        placement=placement,
    )


def _simulate_shapes(options: argparse.Namespace, asked: "RequestedRanks") -> int:
    """Simulates shapes without values, which needs no memory for weights; returns the exit code."""
    from rich.console import Console

    from ...cluster.job import JobError
    from ...simulation.calls import shape_request
    from ...simulation.shapes import first_middle_last, shapes_of
    from ...simulation.traffic_report import render_shapes, shapes_as_json

    if options.name is None:
        raise JobError("--shapes-only builds a model: name a recipe, a FILE.toml or a run folder")
    request, refusal = shape_request(_config(options), asked, options.dispatcher[0])
    with Console(stderr=True).status("building"):
        shapes = shapes_of(request, first_middle_last(request.layout.world_size))
    if options.json:
        print(json.dumps({**shapes_as_json(request, shapes), "refused": refusal}, indent=2))
    else:
        Console().print(render_shapes(options.name, request, shapes))
    if refusal is None:
        return 0
    print_message("training would refuse it", refusal, style="yellow")
    return 1


def _simulated_model(
    options: argparse.Namespace,
) -> "tuple[str, Config, Transformer | None, SavedPlacement | None]":
    """Returns the title and configuration of the model that was named; of a run folder its weights
    and its placement of experts too.
    """
    from ...distributed.process.process import start_process
    from ...evaluation.restore import restore
    from ...simulation.calls import find_placement

    if not _is_run(options):
        return options.name, _config(options), None, find_placement(None, options.expert_map)
    run_dir = Path(options.name)
    # What cannot be had is refused before the weights are read.
    placement = find_placement(run_dir, options.expert_map)
    with start_process("cpu") as process:
        restored = restore(run_dir, process)
    if options.expert_map is None:
        placement = find_placement(run_dir, None, default=restored.step)
    return f"{run_dir.name}, step {restored.step}", restored.config, restored.model, placement


def _config(options: argparse.Namespace) -> "Config":
    """Returns the configuration of the run, recipe or file that was named."""
    from ...simulation.calls import config_of_run
    from ...train.config.resolve import resolve
    from ...train.recipes.smoke import RECIPES

    if _is_run(options):
        return config_of_run(Path(options.name))
    return resolve(options.name, options.overrides, RECIPES)


def _is_run(options: argparse.Namespace) -> bool:
    """Whether a run folder was named; JobError where it is to be simulated with other values."""
    from ...cluster.job import JobError

    if not Path(options.name).is_dir():
        return False
    if options.overrides:
        raise JobError(
            f"{options.name} is a run and is simulated as it is: leave out "
            f"{' '.join(options.overrides)}"
        )
    return True
