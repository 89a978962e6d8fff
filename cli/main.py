"""The command `moebius`: parses, builds, calls. No logic lives here."""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from .. import __version__
from ..cluster.job import JobError, State, read_status, refuse_if_running
from ..data_pipeline.shards import Manifest
from ..train.config import Config, resolve
from ..train.recipes.smoke import RECIPES
from ..train.run_folder import default_run_dir, open_run, place_data

if TYPE_CHECKING:
    from ..model.transformer import Transformer
    from ..simulation.request import RequestedRanks, SavedPlacement

RUNS = Path("runs")  # where runs and prepared data go unless told otherwise


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point. Exits 0 on success, 1 where a job failed, 2 where the request cannot be carried
    out.
    """
    options = _parsed(arguments)
    try:
        code = options.run(options)
    except (
        ValueError
    ) as error:  # every mistake of a user is a ValueError whose message says what to do
        Console(stderr=True, soft_wrap=True).print(
            f"[bold red]error:[/] {_plain(str(error))}", highlight=False
        )
        code = 2
    except KeyboardInterrupt:  # where nothing runs that could be ended in better order
        code = 130
    except BrokenPipeError:  # `moebius logs | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Values to change may stand anywhere: argparse takes no more of them once an option has come."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (
        "overrides" not in options or any(word.startswith("-") or "=" not in word for word in rest)
    ):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides = [*options.overrides, *rest]
    return options


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser = argparse.ArgumentParser(
        prog="moebius",
        description="Expert-parallel pretraining of Mixture-of-Experts Universal Transformers.",
        epilog=f"recipes: {', '.join(RECIPES)}",
    )
    parser.add_argument("--version", action="version", version=f"moebius {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        _add_prepare,
        _add_train,
        _add_submit,
        _add_status,
        _add_logs,
        _add_stop,
        _add_eval,
        _add_models,
        _add_layout,
        _add_plan,
        _add_simulate,
        _add_ckpt,
    ):
        add(commands)
    return parser


def _command(
    commands: argparse._SubParsersAction, name: str, run, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.set_defaults(run=run)
    return parser


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="RECIPE|FILE.toml", help="`moebius models` lists the recipes"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="single values to change"
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="run folder; an existing run is continued"
    )


def _run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run folder")


# prepare ------------------------------------------------------------------------------------------------------------


def _add_prepare(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "prepare", _prepare, "turn text into token shards")
    parser.add_argument(
        "--input",
        nargs="+",
        metavar="TEXT",
        default=["embedded"],
        help=".txt, .jsonl, .jsonl.zst, .parquet: files, globs or URLs; `embedded` is the prose that Python carries",
    )
    parser.add_argument(
        "--validation-input",
        nargs="+",
        metavar="TEXT",
        default=[],
        help="default: a share of --input",
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder for shards and tokenizer"
    )
    parser.add_argument("--tokenizer", choices=["bpe", "bytes"], default="bpe")
    parser.add_argument(
        "--vocab-size", type=int, default=None, metavar="N", help="of the BPE tokenizer (8000)"
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="Ray tasks at a time; 1: this process"
    )
    parser.add_argument(
        "--address", metavar="ADDRESS", help="spread the work over this Ray cluster"
    )


def _prepare(options: argparse.Namespace) -> int:
    from ..cluster.watch import show_preparation
    from ..data_pipeline.config import DataConfig
    from ..data_pipeline.prepare import prepare

    values = {
        "input": options.input,
        "validation_input": options.validation_input,
        "tokenizer": options.tokenizer,
        "directory": str(options.output.absolute()),
    }
    if options.vocab_size is not None:
        values["vocab_size"] = options.vocab_size
    data = DataConfig.model_validate(values)
    if options.address is None and options.workers == 1:
        with show_preparation(Console()) as on_progress:
            manifest = prepare(data, data.directory, on_progress=on_progress)
    else:
        from ..cluster.submit import prepare_on_cluster

        manifest = prepare_on_cluster(data, address=options.address, workers=options.workers)
    _print_manifest(manifest, options.output)
    return 0


# train, submit ------------------------------------------------------------------------------------------------------


def _add_train(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "train",
        _train,
        "train on this machine, without Ray: torchrun's agent and its ranks",
    )
    _config_arguments(parser)


def _add_submit(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "submit",
        _submit,
        "run a job on a Ray cluster, or on a simulated one on this machine",
    )
    _config_arguments(parser)
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help='a running Ray cluster, or "auto"; default: simulate one',
    )
    parser.add_argument(
        "--detach", action="store_true", help="return once the supervisor is up (with --address)"
    )


def _open(options: argparse.Namespace) -> tuple[Config, Path]:
    """The configuration, checked against the world it asks for, and its open run folder."""
    config = place_data(resolve(options.name, options.overrides, RECIPES), RUNS)
    config.check_world(config.world_size)
    run_dir = (options.run_dir or default_run_dir(config, RUNS)).absolute()
    refuse_if_running(run_dir)
    open_run(config, run_dir)
    return config, run_dir


def _train(options: argparse.Namespace) -> int:
    from ..cluster.local import train_here

    return train_here(*_open(options)).exit_code


def _submit(options: argparse.Namespace) -> int:
    from ..cluster.submit import submit

    return submit(*_open(options), address=options.address, detach=options.detach).exit_code


# status, logs, stop -------------------------------------------------------------------------------------------------


def _add_status(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands, "status", _status, "show how runs stand, from their run folders alone"
    )
    parser.add_argument(
        "run_dirs", type=Path, nargs="*", metavar="RUN", help=f"default: every run under {RUNS}/"
    )
    parser.add_argument("--watch", action="store_true", help="follow one run until it has ended")


def _status(options: argparse.Namespace) -> int:
    from ..cluster.summary import closing_words, status_table
    from ..cluster.watch import follow

    folders = options.run_dirs or sorted(path.parent for path in RUNS.glob("*/journal.jsonl"))
    console = Console()
    if not folders:
        raise JobError(
            f"no runs under {RUNS.absolute()}: name a run folder, or start one with `moebius "
            "submit smoke`"
        )
    if len(options.run_dirs) == 1:
        status = follow(folders[0], console=console) if options.watch else read_status(folders[0])
        console.print(closing_words(status))
        return status.exit_code if status.state.is_final or status.state is State.LOST else 0
    if options.watch:
        raise JobError("--watch follows one run: name it")
    console.print(status_table([read_status(folder) for folder in folders]))
    return 0


def _add_logs(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands, "logs", _logs, "print the logs of a run's ranks, generation by generation"
    )
    _run_argument(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the job has ended")


def _logs(options: argparse.Namespace) -> int:
    from ..cluster.watch import follow_logs

    for line in follow_logs(options.run_dir, rank=options.rank, follow=options.follow):
        print(line, flush=options.follow)
    return 0


def _add_stop(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "stop", _stop, "end a run at a step boundary, with a checkpoint")
    _run_argument(parser)
    parser.add_argument("--now", action="store_true", help="at once, without a checkpoint")


def _stop(options: argparse.Namespace) -> int:
    from ..cluster.submit import stop
    from ..cluster.summary import closing_words

    status = stop(options.run_dir, now=options.now)
    Console().print(closing_words(status))
    return 0


# eval ---------------------------------------------------------------------------------------------------------------


def _add_eval(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands, "eval", _eval, "measure a trained model's loss, score a text, or let it write"
    )
    _run_argument(parser)
    parser.add_argument(
        "--step", type=int, metavar="N", help="of which checkpoint; default: the newest"
    )
    parser.add_argument("--split", choices=["validation", "train"], default="validation")
    parser.add_argument(
        "--rows", type=int, default=0, metavar="N", help="at most so many rows; default: all"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="continue this text instead of measuring")
    parser.add_argument(
        "--score", metavar="TEXT", help="print how likely this text is instead of measuring"
    )
    parser.add_argument(
        "--draws", type=int, default=1, metavar="N", help="of companions, for models that need them"
    )
    parser.add_argument(
        "--tokens", type=int, default=100, metavar="N", help="to write after the prompt"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="of the sampling; 0: most likely",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the sampling and of companions"
    )


def _eval(options: argparse.Namespace) -> int:
    from ..evaluation.report import measure, score_text, write_text

    if options.score is not None:
        print(
            score_text(
                options.run_dir,
                options.score,
                step=options.step,
                draws=options.draws,
                seed=options.seed,
            )
        )
        return 0
    if options.prompt is None:
        result = measure(
            options.run_dir, step=options.step, split=options.split, max_rows=options.rows
        )
        print(result)
        return 0
    pieces = write_text(
        options.run_dir,
        options.prompt,
        step=options.step,
        num_tokens=options.tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


# models -------------------------------------------------------------------------------------------------------------


def _add_models(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "models",
        _models,
        "print what the recipes are, what they cost and what they promise",
    )
    parser.add_argument(
        "names", nargs="*", metavar="RECIPE|FILE.toml", help="default: every recipe"
    )
    parser.add_argument(
        "--count",
        action="store_true",
        help="compare the FLOPs with torch's own count (a minute for all)",
    )
    parser.add_argument("--json", action="store_true", help="everything, exact, as a JSON list")


def _models(options: argparse.Namespace) -> int:
    from .catalogue import catalogue, show

    with Console(stderr=True).status("counting"):
        entries = list(catalogue(options.names, RECIPES, count=options.count))
    if options.json:
        print(json.dumps([entry.plain() for entry in entries], indent=2))
    else:
        console = Console()
        console.print(show(entries, width=console.width))
    return 0


# plan ---------------------------------------------------------------------------------------------------------------


def _add_plan(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands, "plan", _plan, "predict memory and speed of every layout, and rank them"
    )
    parser.add_argument(
        "name", metavar="MODEL", help="a recipe or a FILE.toml; `moebius models` lists the recipes"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="single values to change"
    )
    parser.add_argument(
        "--hardware",
        default="h200",
        metavar="NAME|FILE.toml",
        help="h100, h200, b200, gb200_nvl72 …",
    )
    parser.add_argument(
        "--nodes",
        nargs="+",
        default=["1"],
        metavar="N",
        help='for example 4, or 1 "…" 1250 (doubling)',
    )
    parser.add_argument(
        "--precision", choices=["bf16", "fp32"], help="of the products; default: the recipe's"
    )
    parser.add_argument(
        "--tokens-per-rank",
        type=int,
        metavar="N",
        help="in a step; default: the recipe's micro-batch",
    )
    parser.add_argument(
        "--ep",
        type=int,
        metavar="N",
        help="only layouts with this many ranks per copy of the experts",
    )
    parser.add_argument("--sharding", choices=["none", "fsdp"], help="only layouts of this kind")
    parser.add_argument(
        "--dispatcher",
        choices=["allgather", "alltoall", "dedup", "hierarchical"],
        help="only this one",
    )
    parser.add_argument(
        "--recompute", choices=["none", "selective", "full"], help="default: as little as fits"
    )
    parser.add_argument(
        "--overlap-chunks", type=int, default=1, metavar="N", help="parts in which rows travel"
    )
    parser.add_argument(
        "--skew",
        default=None,
        metavar="RUN|ALPHA|balanced",
        help="routing: a run's recorded loads, or a Dirichlet concentration (default: 5)",
    )
    parser.add_argument(
        "--measured", type=Path, metavar="FILE.json", help="measured collectives, over the defaults"
    )
    parser.add_argument(
        "--top", type=int, default=None, metavar="N", help="layouts to show of every size"
    )
    parser.add_argument(
        "--detail",
        action="store_true",
        help="memory, time and collectives of the largest size's best",
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw step time and MFU against the number of GPUs"
    )
    parser.add_argument(
        "--json", action="store_true", help="everything, collectives included, as JSON"
    )
    parser.add_argument("--sources", action="store_true", help="show where every figure comes from")


def _plan(options: argparse.Namespace) -> int:
    from ..planning.planner import Constraints
    from ..planning.report import (
        draw_plans,
        make_report,
        parse_nodes,
        plans_as_json,
        render_detail,
        render_plans,
        render_sources,
    )
    from .plan_request import make_scenario

    nodes = parse_nodes(options.nodes)
    console, errors = Console(), Console(stderr=True)
    config = resolve(options.name, options.overrides, RECIPES)
    with errors.status("planning"):
        scenario = make_scenario(
            config,
            hardware=options.hardware,
            precision=options.precision,
            tokens=options.tokens_per_rank,
            skew=options.skew,
            measured=options.measured,
            chunks=options.overlap_chunks,
        )
        constraints = Constraints(
            options.ep, options.sharding, options.dispatcher, options.recompute
        )
        report = make_report(scenario, nodes, constraints)
    if options.png:
        draw_plans(report, options.png, title=options.name)
    if options.json:
        print(json.dumps(plans_as_json(report), indent=2))
        return 0
    console.print(render_plans(report, top=options.top or (10 if len(nodes) == 1 else 2)))
    if options.detail:
        for plan in filter(
            None, (report.sizes[-1].best(with_ep=with_ep) for with_ep in (False, True))
        ):
            console.print(render_detail(plan))
    if options.sources:
        console.print(render_sources(scenario))
    if options.png:
        console.print(f"picture: {options.png}")
    return 0


# simulate -----------------------------------------------------------------------------------------------------------


def _add_simulate(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands,
        "simulate",
        _simulate,
        "route tokens on simulated ranks in this process, and count",
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="MODEL",
        help="a recipe or a FILE.toml (fresh weights), or a run folder (trained ones)",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="single values to change"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="RUN",
        help="replay what a run recorded (train.record_routing)",
    )
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
        choices=["local", "allgather", "alltoall", "dedup", "hierarchical"],
        default=[None],
        help="one, or several to compare: allgather, alltoall, dedup, hierarchical; default: the mesh's",
    )
    parser.add_argument(
        "--overlap-chunks", type=int, metavar="N", help="parts in which rows travel"
    )
    parser.add_argument(
        "--homes",
        metavar="STEP|contiguous",
        help="where a run that moves experts had them at that checkpoint; default: of a run its newest, of a trace contiguous",
    )
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
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the traffic from rank to rank and the loads"
    )
    parser.add_argument(
        "--json", action="store_true", help="everything, all matrices included, as JSON"
    )


def _simulate(options: argparse.Namespace) -> int:
    from ..simulation.dispatch import unexpected_cause
    from ..simulation.shapes import ShapeMismatch
    from ..simulation.threads import RankFailed

    try:
        return _simulated(options)
    # What ends a simulation before there is a report to show it in. One line says it; where that is
    # not enough, a traceback too.
    except (RankFailed, ShapeMismatch) as error:
        if (cause := unexpected_cause(error)) is not None:
            traceback.print_exception(cause)
        words = " ".join(str(error).split())
        Console(stderr=True, soft_wrap=True).print(
            f"[bold red]error:[/] {_plain(words)}", highlight=False
        )
        return 1


def _simulated(options: argparse.Namespace) -> int:
    from ..simulation.report import draw_simulation, render_simulation, simulation_as_json
    from ..simulation.request import (
        RequestedRanks,
        simulate_all,
        source_from_model,
        source_from_trace,
    )

    if (options.name is None) == (options.trace is None):
        raise JobError(
            "name what to simulate: a recipe, a FILE.toml or a run folder, or else --trace RUN"
        )
    _refuse_idle_options(options)
    asked = RequestedRanks(
        options.ep, options.world_size, options.ranks_per_node, options.overlap_chunks
    )
    if options.shapes_only:
        return _simulate_shapes(options, asked)
    if options.trace is not None:
        source = source_from_trace(
            options.trace, steps=options.steps, seed=options.seed, homes=options.homes
        )
    else:
        title, config, trained, placement = _simulated_model(options)
        source = source_from_model(
            title,
            config,
            trained,
            tokens_per_rank=64 if options.tokens_per_rank is None else options.tokens_per_rank,
            steps=1 if options.steps is None else options.steps,
            seed=options.seed,
            placement=placement,
        )
    with Console(stderr=True).status("simulating"):
        report = simulate_all(source, asked, options.dispatcher)
    if options.png:
        draw_simulation(report, options.png)
    if options.json:
        print(json.dumps(simulation_as_json(report), indent=2))
    else:
        Console().print(render_simulation(report))
    return 1 if report.violations else 0


def _refuse_idle_options(options: argparse.Namespace) -> None:
    """What would be ignored is a mistake."""
    idle = [("--tokens-per-rank", options.tokens_per_rank)]
    if options.shapes_only:
        idle += [("--steps", options.steps), ("--png", options.png), ("--homes", options.homes)]
        if len(options.dispatcher) > 1:
            raise JobError("--shapes-only builds a model with one dispatcher: name one")
    elif options.trace is None:
        return
    for option, value in idle:
        if value is not None:
            raise JobError(
                f"{option} {value}: means nothing with "
                f"{'--shapes-only' if options.shapes_only else '--trace'}"
            )


def _simulate_shapes(options: argparse.Namespace, asked: "RequestedRanks") -> int:
    from ..simulation.report import render_shapes, shapes_as_json
    from ..simulation.request import config_of_run, shape_request
    from ..simulation.shapes import first_middle_last, shapes_of

    if options.name is None:
        raise JobError("--shapes-only builds a model: name a recipe, a FILE.toml or a run folder")
    is_run = _is_run(options)
    config = (
        config_of_run(Path(options.name))
        if is_run
        else resolve(options.name, options.overrides, RECIPES)
    )
    request, refusal = shape_request(config, asked, options.dispatcher[0])
    with Console(stderr=True).status("building"):
        shapes = shapes_of(request, first_middle_last(request.layout.world_size))
    if options.json:
        print(json.dumps({**shapes_as_json(request, shapes), "refused": refusal}, indent=2))
    else:
        Console().print(render_shapes(options.name, request, shapes))
    if refusal is not None:
        Console(stderr=True, soft_wrap=True).print(
            f"[yellow]training would refuse it:[/] {_plain(refusal)}", highlight=False
        )
    return 0 if refusal is None else 1


def _simulated_model(
    options: argparse.Namespace,
) -> tuple[str, Config, "Transformer | None", "SavedPlacement | None"]:
    """Its title, its configuration and, of a run folder, its weights and where its experts live."""
    from ..distributed.process.process import start_process
    from ..evaluation.restore import restore
    from ..simulation.request import find_placement

    if not _is_run(options):
        config = resolve(options.name, options.overrides, RECIPES)
        return options.name, config, None, find_placement(None, options.homes)
    run_dir = Path(options.name)
    placement = find_placement(
        run_dir, options.homes
    )  # what cannot be had is refused before the weights are read
    with start_process("cpu") as process:
        restored = restore(run_dir, process)
    if options.homes is None:
        placement = find_placement(run_dir, None, default=restored.step)
    return f"{run_dir.name}, step {restored.step}", restored.config, restored.model, placement


def _is_run(options: argparse.Namespace) -> bool:
    if not Path(options.name).is_dir():
        return False
    if options.overrides:
        raise JobError(
            f"{options.name} is a run and is simulated as it is: leave out "
            f"{' '.join(options.overrides)}"
        )
    return True


# layout -------------------------------------------------------------------------------------------------------------


def _add_layout(commands: argparse._SubParsersAction) -> None:
    parser = _command(
        commands, "layout", _layout, "print which rank sits where, and which links its groups use"
    )
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks in all")
    parser.add_argument(
        "--ep", type=int, default=1, metavar="N", help="ranks that share one copy of the experts"
    )
    parser.add_argument(
        "--dp-shard",
        type=int,
        metavar="N",
        help="ranks that share the dense weights; default: as --ep",
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="default: 8, or all on one node if 8 do not fit",
    )
    parser.add_argument(
        "--model",
        metavar="RECIPE",
        choices=list(RECIPES),
        help="show the experts of this recipe's model",
    )


def _layout(options: argparse.Namespace) -> int:
    from ..distributed.layout import MeshConfig, plan_layout, render

    for option, value in (("--ep", options.ep), ("--dp-shard", options.dp_shard)):
        if value is not None and value < 1:
            raise JobError(f"{option} {value}: at least 1")
    layout = plan_layout(MeshConfig(ep=options.ep, dp_shard=options.dp_shard), options.world_size)
    experts = RECIPES[options.model]().model.expert_counts() if options.model else None
    per_node = 8 if options.world_size % 8 == 0 else options.world_size
    print(render(layout, options.ranks_per_node or per_node, experts))
    return 0


# ckpt ---------------------------------------------------------------------------------------------------------------


def _add_ckpt(commands: argparse._SubParsersAction) -> None:
    parser = _command(commands, "ckpt", _ckpt_ls, "list, verify, rewrite and export checkpoints")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    _run_argument(
        _command(
            actions, "ls", _ckpt_ls, "list a run's checkpoints: steps, sizes, ranks that wrote them"
        )
    )
    verify = _command(
        actions,
        "verify",
        _ckpt_verify,
        "read every byte: every checksum, every expert exactly once",
    )
    _checkpoint_argument(verify, "RUN without --step: all of its checkpoints")
    reshard = _command(
        actions, "reshard", _ckpt_reshard, "rewrite a checkpoint into the files of other ranks"
    )
    _checkpoint_argument(reshard, "RUN without --step: its newest checkpoint")
    reshard.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a directory that does not exist yet"
    )
    reshard.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks in all")
    reshard.add_argument("--ep", type=int, default=1, metavar="N", help="as mesh.ep")
    reshard.add_argument(
        "--dp-shard", type=int, metavar="N", help="as mesh.dp_shard; default: as --ep"
    )
    reshard.add_argument(
        "--dp-replicate",
        type=int,
        metavar="N",
        help="as mesh.dp_replicate; default: fills the world",
    )
    reshard.add_argument(
        "--sharding", choices=["none", "fsdp"], default="none", help="as mesh.sharding"
    )
    export = _command(
        actions,
        "export",
        _ckpt_export,
        "write a checkpoint's weights as safetensors, expert by expert",
    )
    _checkpoint_argument(export, "RUN without --step: its newest checkpoint")
    export.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a directory that does not exist yet"
    )
    export.add_argument(
        "--dtype",
        choices=["fp32", "bf16"],
        default="fp32",
        help="of what enters matrix products; the rest is fp32",
    )
    export.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="of one file: 5GB, 500MB, 2GiB (5GB)",
    )


def _checkpoint_argument(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("path", type=Path, metavar="RUN|CHECKPOINT", help=default)
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint of the run")


def _ckpt_ls(options: argparse.Namespace) -> int:
    from .checkpoint_report import list_table

    Console().print(list_table(options.run_dir))
    return 0


def _ckpt_verify(options: argparse.Namespace) -> int:
    from .checkpoint_report import progress_bars, verify_each

    problems = []
    with progress_bars(Console(stderr=True)) as watch:
        for path, words, problem in verify_each(options.path, options.step, watch):
            print(f"{path.name}: {'DAMAGED' if problem else f'intact ({words})'}")
            problems += [str(problem)] if problem else []
    if problems:
        raise JobError("\n".join(problems))
    return 0


def _ckpt_reshard(options: argparse.Namespace) -> int:
    from .checkpoint_report import progress_bars, reshard_for

    mesh = {key: getattr(options, key) for key in ("ep", "dp_shard", "dp_replicate", "sharding")}
    with progress_bars(Console(stderr=True)) as watch:
        words = reshard_for(
            options.path,
            options.out,
            mesh,
            world_size=options.world_size,
            step=options.step,
            watch=watch,
        )
    print(words)
    return 0


def _ckpt_export(options: argparse.Namespace) -> int:
    from ..distributed.checkpoint.files import find_checkpoint
    from ..export.safetensors import export, parse_size
    from .checkpoint_report import progress_bars

    with progress_bars(Console(stderr=True)) as watch:
        exported = export(
            find_checkpoint(options.path, options.step),
            options.out,
            dtype=options.dtype,
            max_file_bytes=parse_size(options.max_shard_size),
            watch=watch,
        )
    print(f"{options.out}: {exported}")
    return 0


def _print_manifest(manifest: Manifest, folder: Path) -> None:
    print(f"{folder}: vocabulary of {manifest.vocab_size}")
    for split in ("train", "validation"):
        shards = [shard for shard in manifest.shards if shard.split == split]
        tokens, documents = (
            sum(shard.num_tokens for shard in shards),
            sum(shard.num_documents for shard in shards),
        )
        size = sum(shard.num_bytes for shard in shards)
        print(
            f"  {split}: {tokens:,} tokens of {documents:,} documents in {len(shards)} shards, "
            f"{size / 2**20:.1f} MiB"
        )


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
