"""`moebius train`, `submit` and `resume` start a job, `scale` changes its size, `stop` ends it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..arguments import (
    RUNS,
    Commands,
    add_command,
    add_config_arguments,
    add_overrides,
    add_run_argument,
    add_unauthenticated,
    allow_unauthenticated,
    resolve_config,
    words_and_overrides,
)
from ..console import console, print_plain

if TYPE_CHECKING:
    from ...train.config.run_config import Config
    from ...train.record.run_folder import Source

ENDS = (
    "exit code: 0 if the job SUCCEEDED or was STOPPED, 75 if it was PREEMPTED, 1 if it FAILED "
    "or is LOST, 2 if it could not start"
)


def add_commands(commands: Commands) -> None:
    """Declares the commands that start, scale and stop a job."""
    _add_train(commands)
    _add_submit(commands)
    _add_resume(commands)
    _add_scale(commands)
    _add_stop(commands)


# train, submit ------------------------------------------------------------------------------------


def _add_train(commands: Commands) -> None:
    parser = add_command(
        commands,
        "train",
        _train,
        "train on this machine without Ray, under torchrun's agent",
        examples=[
            "train smoke train.steps=40",
            "train mine.toml optim.learning_rate=3e-4 --run-dir runs/mine",
            "train --from runs/mine optim.learning_rate=1e-4 prepare.input=other.txt --run-dir runs/next",
            "train mine.toml --dry-run",
            "train --from runs/mine@10000 optim.schedule=wsd train.steps=12000 --run-dir runs/branch",
            'train --from hf://allenai/OLMoE-1B-7B-0924 prepare.input="texts/*.txt"',
            "train --from runs/mine@10000 --grow experts=x2 --run-dir runs/larger train.steps=20000",
        ],
        notes=ENDS,
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="make a few steps with all ranks, print what memory, time and disk the run takes, and "
        "leave nothing behind",
    )


def _add_submit(commands: Commands) -> None:
    parser = add_command(
        commands,
        "submit",
        _submit,
        "run a job on a Ray cluster, or on a simulated one on this machine",
        examples=[
            "submit smoke",
            "submit moeut_126m --address auto --detach job.num_nodes=2 job.ranks_per_node=4",
            "submit moeut_126m prepare.input=\"['corpus/*.jsonl']\" train.start_when=50_000_000",
        ],
        notes=ENDS,
    )
    add_config_arguments(parser)
    _add_place(parser, "simulate one for this job")


def _add_place(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help='a Ray cluster: HOST:PORT of its head, "auto", or "simulated" of '
        f"`moebius cluster up`; default: {default}",
    )
    parser.add_argument(
        "--detach", action="store_true", help="return once the supervisor runs (needs --address)"
    )
    add_unauthenticated(parser)


def _add_resume(commands: Commands) -> None:
    parser = add_command(
        commands,
        "resume",
        _resume,
        "continue a run from its newest checkpoint, with its own configuration, or start an imported one",
        examples=[
            "resume runs/mine",
            "resume runs/mine train.steps=20000 --address auto --detach",
        ],
        notes=ENDS,
    )
    add_run_argument(parser)
    add_overrides(parser)
    _add_place(
        parser, "the one that the run was submitted to, or none for a run of `moebius train`"
    )


def _train(options: argparse.Namespace) -> int:
    from ...cluster.local import dry_run, train_here

    config, run_dir, source = _resolve(options)
    start = dry_run if options.dry_run else train_here
    return start(config, run_dir, source=source, console=console()).exit_code


def _submit(options: argparse.Namespace) -> int:
    allow_unauthenticated(options)
    from ...cluster.submit import submit

    config, run_dir, source = _resolve(options)
    place = {"address": options.address, "detach": options.detach, "console": console()}
    return submit(config, run_dir, source=source, **place).exit_code


def _resume(options: argparse.Namespace) -> int:
    allow_unauthenticated(options)
    from ...cluster.job import read_status
    from ...cluster.submit import resume
    from ...data_pipeline.words import is_run

    run_dir = options.run_dir
    if not is_run(run_dir):
        read_status(run_dir)  # raises JobError
    config = resolve_config(str(run_dir / "config.json"), options.overrides)
    place = {"address": options.address, "detach": options.detach, "console": console()}
    return resume(config, run_dir, **place).exit_code


def _resolve(options: argparse.Namespace) -> "tuple[Config, Path, Source | None]":
    """Returns the configuration, the run folder, and what the run starts from."""
    source = None
    if options.start_from is not None:
        config, source = _start(options)
    elif options.draw_anew or options.family or options.grow or options.moments:
        raise ValueError(
            "--draw-anew, --family, --grow and --moments need --from SOURCE: without it, all parameters "
            "are drawn"
        )
    else:
        config = resolve_config(options.name, options.overrides)
    from ...train.record.run_folder import default_run_dir, place_data

    config = place_data(config, RUNS)
    return config, (options.run_dir or default_run_dir(config, RUNS)).absolute(), source


def _start(options: argparse.Namespace) -> "tuple[Config, Source]":
    """Returns the configuration of a run that starts from `--from`, and its source."""
    from ...train.families.start import start_from

    words, more = words_and_overrides(options.grow)
    if options.grow and not "".join(words).strip():
        raise ValueError("--grow: say how the model grows, for example split=2")
    start = start_from(
        options.start_from,
        options.name,
        [*options.overrides, *more],
        draw_anew=options.draw_anew,
        family=options.family,
        grow=words,
        moments=options.moments,
    )
    for note in start.notes:
        print_plain(note)
    return start.config, start.source


# scale, stop --------------------------------------------------------------------------------------


def _add_scale(commands: Commands) -> None:
    parser = add_command(
        commands,
        "scale",
        _scale,
        "continue a run on another number of nodes from the next step boundary",
        examples=["scale runs/mine 2"],
        notes="Returns at once. If the cluster has too few nodes, the run continues unchanged "
        "until there are more. Exit code: 0 if the request was recorded, 2 if there is no "
        "such run, it has ended, or it does not fit this number of nodes.",
    )
    add_run_argument(parser)
    parser.add_argument("num_nodes", type=int, metavar="N", help="number of nodes")


def _scale(options: argparse.Namespace) -> int:
    from ...cluster.supervise.placing import request_scale

    request_scale(options.run_dir, options.num_nodes)
    print(
        f"{options.run_dir}: {options.num_nodes} node(s) requested; follow the change with "
        "`moebius watch`"
    )
    return 0


def _add_stop(commands: Commands) -> None:
    parser = add_command(
        commands,
        "stop",
        _stop,
        "end a run at the next step boundary, with a checkpoint",
        examples=["stop runs/mine", "stop runs/mine --now"],
        notes="exit code: 0 once the job has ended, 2 if there is none or it does not end",
    )
    add_run_argument(parser)
    parser.add_argument("--now", action="store_true", help="end at once, without a checkpoint")
    parser.add_argument(
        "--preempt", action="store_true", help="end as PREEMPTED: the machines are taken away"
    )


def _stop(options: argparse.Namespace) -> int:
    from ...cluster.report.summary import closing_words
    from ...cluster.stop import stop

    status = stop(options.run_dir, now=options.now, preempt=options.preempt)

    console().print(closing_words(status))
    return 0
