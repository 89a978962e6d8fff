"""`moebius plan`: predicts the cost of every layout of a model on a machine and ranks them."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ...distributed.dispatch.table import by_collectives
from ..arguments import Commands, NamesOrOwn, add_command, add_overrides
from ..console import console

if TYPE_CHECKING:
    from ...planning.hardware import Hardware
    from ...planning.prediction import Scenario
    from ...train.config.run_config import Config


def add_commands(commands: Commands) -> None:
    """Declares `moebius plan` and its options."""
    parser = add_command(
        commands,
        "plan",
        _plan,
        "predict memory and speed of every layout, and rank them",
        examples=[
            "plan moeut_1b --hardware h200 --nodes 1 4 16 64",
            "plan mine.toml model.feed_forward.num_experts=512 --nodes 4 --ep 8",
        ],
    )
    parser.add_argument(
        "name", metavar="MODEL", help="a recipe or a FILE.toml; `moebius models` lists the recipes"
    )
    add_overrides(parser)
    _add_scenario_arguments(parser)
    _add_constraint_arguments(parser)
    parser.add_argument(
        "--json",
        action="store_true",
        help="everything as JSON: memory, time and collectives of each layout, and sources",
    )


def _add_scenario_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the machine, the workload, and the sources of their costs."""
    parser.add_argument(
        "--hardware",
        default="h200",
        metavar="NAME|FILE.toml",
        help="h100, h200, b200, gb200_nvl72, a100",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="one or several numbers of nodes",
    )
    parser.add_argument(
        "--tokens-per-rank", type=int, metavar="N", help="per micro-batch; default: the recipe's"
    )
    parser.add_argument(
        "--micro-batches", type=int, default=1, metavar="N", help="accumulated by a rank per step"
    )
    parser.add_argument(
        "--skew",
        type=Path,
        metavar="RUN",
        help="a run, for the loads of its experts; default: every expert has equally many rows",
    )


def _add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the constraints of the layouts."""
    parser.add_argument(
        "--ep", type=int, metavar="N", help="only layouts with N ranks per copy of the experts"
    )
    parser.add_argument("--sharding", choices=["none", "fsdp"], help="only layouts of this kind")
    parser.add_argument(
        "--dispatcher", choices=NamesOrOwn(by_collectives()), help="only this dispatcher"
    )
    parser.add_argument(
        "--recompute", choices=["none", "selective", "full"], help="default: as little as fits"
    )


def _plan(options: argparse.Namespace) -> int:
    from ...planning.hardware import find_hardware
    from ...planning.plan_report import plan_report, render_plans
    from ...planning.planner import Constraints
    from ...train.config.resolve import resolve
    from ...train.recipes.smoke import RECIPES
    from ...train.record.run_folder import passes_note

    nodes = sorted(set(options.nodes))
    if nodes[0] < 1:
        raise ValueError(f"--nodes {nodes[0]}: must be at least 1")
    machine = find_hardware(options.hardware)
    config = resolve(options.name, options.overrides, RECIPES)
    wanted = Constraints(options.ep, options.sharding, options.dispatcher, options.recompute)
    with console(stderr=True).status("planning"):
        report = plan_report(_scenario(config, machine, options), nodes, wanted)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        top = 10 if len(report["plans"]) == 1 else 2
        console().print(render_plans(report, top=top))
        if note := passes_note(config):
            print(note)
    return 0


def _scenario(config: "Config", machine: "Hardware", options: argparse.Namespace) -> "Scenario":
    """Returns a configuration's workload on a machine.

    Raises:
        ValueError: the planner does not model the configuration, or an option is out of range.
    """
    from ...planning.prediction import Scenario
    from ...planning.routing_skew import RoutingSkew, recorded_skew
    from ...planning.workload import describe, with_muon

    if config.mesh.replicas:
        raise ValueError(
            f"mesh.replicas={config.mesh.replicas}: the planner does not model copies of hot "
            "experts; plan with mesh.replicas=0"
        )
    precision = config.train.precision
    if precision == "bfloat16_only":
        raise ValueError(
            'train.precision="bfloat16_only": the planner counts float32 weights and moments; plan '
            "with train.precision=bfloat16 or float32"
        )
    tokens = options.tokens_per_rank
    if tokens is None:
        tokens = config.train.micro_batch * config.data.seq_len
    if tokens < 1 or options.micro_batches < 1:
        raise ValueError(
            f"--tokens-per-rank {tokens}, --micro-batches {options.micro_batches}: both must be at "
            "least 1"
        )
    workload = describe(config.model, seq_len=config.data.seq_len, precision=precision)
    if config.optim.kind == "muon":
        muon = config.optim.muon
        workload = with_muon(workload, config.model, steps=muon.steps, routers=muon.routers)
    skew = recorded_skew(options.skew) if options.skew else RoutingSkew()
    skew.check([bank for bank, _ in workload.uses])
    # the trainer may still find a reason against it, which the report says
    captures = config.train.cuda_graph is not False and not config.train.compile
    average = {None: 0, "ema": 4, "last": 8}[config.train.average]
    return Scenario(workload, machine, tokens, skew, options.micro_batches, captures, average)
