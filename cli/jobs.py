"""Jobs: `moebius train` and `submit` start one; `status`, `logs` and `stop` need its run folder
alone.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import RUNS, Commands, add_command, add_config_arguments, add_run_argument

if TYPE_CHECKING:
    from ..train.config import Config


def add_commands(commands: Commands) -> None:
    """Declares the commands that start a job, show how it stands and end it."""
    _add_train(commands)
    _add_submit(commands)
    _add_status(commands)
    _add_logs(commands)
    _add_stop(commands)


# train, submit ------------------------------------------------------------------------------------


def _add_train(commands: Commands) -> None:
    text = "train on this machine, without Ray: torchrun's agent and its ranks"
    parser = add_command(
        commands,
        "train",
        _train,
        text,
        examples=[
            "train smoke job.num_nodes=1 train.steps=40",
            "train mine.toml optim.learning_rate=3e-4 --run-dir runs/mine",
        ],
    )
    add_config_arguments(parser)


def _add_submit(commands: Commands) -> None:
    text = "run a job on a Ray cluster, or on a simulated one on this machine"
    parser = add_command(
        commands,
        "submit",
        _submit,
        text,
        examples=[
            "submit smoke",
            "submit moeut_126m --address auto --detach job.num_nodes=4 job.ranks_per_node=8",
            "submit moeut_126m data.input=\"['corpus/*.jsonl']\" train.start_when.tokens=50M",
        ],
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help='a running Ray cluster, or "auto"; default: simulate one',
    )
    parser.add_argument(
        "--detach", action="store_true", help="return once the supervisor is up (with --address)"
    )


def _train(options: argparse.Namespace) -> int:
    """Carries out `moebius train`."""
    from ..cluster.local import train_here

    config, run_dir = _resolve(options)
    return train_here(config, run_dir).exit_code


def _submit(options: argparse.Namespace) -> int:
    """Carries out `moebius submit`."""
    from ..cluster.submit import submit

    config, run_dir = _resolve(options)
    return submit(config, run_dir, address=options.address, detach=options.detach).exit_code


def _resolve(options: argparse.Namespace) -> "tuple[Config, Path]":
    """Returns the configuration, checked against the world it asks for, and where it is to run."""
    from ..train.config import resolve
    from ..train.recipes.smoke import RECIPES
    from ..train.run_folder import default_run_dir, place_data

    config = place_data(resolve(options.name, options.overrides, RECIPES), RUNS)
    config.check_world(config.world_size)
    return config, (options.run_dir or default_run_dir(config, RUNS)).absolute()


# status, logs, stop -------------------------------------------------------------------------------


def _add_status(commands: Commands) -> None:
    text = "show how runs stand, from their run folders alone"
    parser = add_command(
        commands,
        "status",
        _status,
        text,
        examples=["status", "status runs/mine --watch"],
    )
    parser.add_argument(
        "run_dirs", type=Path, nargs="*", metavar="RUN", help=f"default: every run under {RUNS}/"
    )
    parser.add_argument("--watch", action="store_true", help="follow one run until it has ended")


def _status(options: argparse.Namespace) -> int:
    """Carries out `moebius status`."""
    from rich.console import Console

    from ..cluster.job import JobError, State, read_status
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


def _add_logs(commands: Commands) -> None:
    text = "print the logs of a run's ranks, generation by generation"
    parser = add_command(
        commands,
        "logs",
        _logs,
        text,
        examples=["logs runs/mine --rank 0 --follow"],
    )
    add_run_argument(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the job has ended")


def _logs(options: argparse.Namespace) -> int:
    """Carries out `moebius logs`."""
    from ..cluster.watch import follow_logs

    for line in follow_logs(options.run_dir, rank=options.rank, follow=options.follow):
        print(line, flush=options.follow)
    return 0


def _add_stop(commands: Commands) -> None:
    text = "end a run at a step boundary, with a checkpoint"
    parser = add_command(
        commands,
        "stop",
        _stop,
        text,
        examples=["stop runs/mine", "stop runs/mine --now"],
    )
    add_run_argument(parser)
    parser.add_argument("--now", action="store_true", help="at once, without a checkpoint")


def _stop(options: argparse.Namespace) -> int:
    """Carries out `moebius stop`."""
    from rich.console import Console

    from ..cluster.job import stop
    from ..cluster.summary import closing_words

    status = stop(options.run_dir, now=options.now)
    Console().print(closing_words(status))
    return 0
