"""`moebius plan`: what every layout of a model on a machine would cost, ranked."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ...distributed.dispatch.table import DISPATCHERS
from ..arguments import Commands, add_command, add_overrides

if TYPE_CHECKING:
    from rich.console import Console

    from ...planning.plan_report import PlanReport
    from ...planning.prediction import Scenario


def add_commands(commands: Commands) -> None:
    """Declares `moebius plan`."""
    text = "predict memory and speed of every layout, and rank them"
    parser = add_command(
        commands,
        "plan",
        _plan,
        text,
        examples=[
            'plan moeut_1b --hardware h200 --nodes 1 "…" 64 --png plan.png',
            "plan mine.toml model.feed_forward.num_experts=512 --nodes 4 --ep 8 --detail",
        ],
    )
    parser.add_argument(
        "name", metavar="MODEL", help="a recipe or a FILE.toml; `moebius models` lists the recipes"
    )
    add_overrides(parser)
    _add_scenario_arguments(parser)
    _add_constraint_arguments(parser)
    _add_report_arguments(parser)


def _add_scenario_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the machine and the work that are planned for."""
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
        help="in a micro-batch; default: the recipe's",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        default=1,
        metavar="N",
        help="whose gradients a rank adds up in a step",
    )


def _add_constraint_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the constraints of the layouts, and what their costs are computed from."""
    parser.add_argument(
        "--ep",
        type=int,
        metavar="N",
        help="only layouts with this many ranks per copy of the experts",
    )
    parser.add_argument("--sharding", choices=["none", "fsdp"], help="only layouts of this kind")
    parser.add_argument(
        "--dispatcher",
        choices=list(DISPATCHERS),
        help="only this one; symmetric, which no GPU has run, is planned only so, inside nodes",
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
        "--launches",
        type=float,
        metavar="N",
        help="operations that the host launches in a micro-batch; default: those of the list of kernels",
    )
    parser.add_argument(
        "--measured", type=Path, metavar="FILE.json", help="measured collectives, over the defaults"
    )
    parser.add_argument(
        "--measured-kernels",
        type=Path,
        metavar="FILE.json",
        help="gpu_kernels.json of benchmarks.gpu: corrects the predictions of kernels",
    )


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares how much of the plan is shown, and how."""
    parser.add_argument(
        "--top", type=int, default=None, metavar="N", help="layouts to show of every size"
    )
    parser.add_argument(
        "--detail",
        action="store_true",
        help="memory, time and collectives of the largest size's best",
    )
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="the kernels of the largest size's best, with their predicted times and bounds",
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw step time and MFU against the number of GPUs"
    )
    parser.add_argument(
        "--json", action="store_true", help="everything, collectives included, as JSON"
    )
    parser.add_argument("--sources", action="store_true", help="show where every figure comes from")


def _plan(options: argparse.Namespace) -> int:
    """Carries out `moebius plan`."""
    from rich.console import Console

    from ...planning.plan_report import draw_plans, make_report, parse_nodes, plans_as_json
    from ...planning.planner import Constraints
    from ...train.config.run_config import resolve
    from ...train.recipes.smoke import RECIPES
    from .plan_request import make_scenario

    nodes = parse_nodes(options.nodes)
    config = resolve(options.name, options.overrides, RECIPES)
    with Console(stderr=True).status("planning"):
        scenario = make_scenario(
            config,
            hardware=options.hardware,
            precision=options.precision,
            tokens=options.tokens_per_rank,
            skew=options.skew,
            measured=options.measured,
            chunks=options.overlap_chunks,
            micro_batches=options.micro_batches,
            launches=options.launches,
            measured_kernels=options.measured_kernels,
        )
        constraints = Constraints(
            options.ep, options.sharding, options.dispatcher, options.recompute
        )
        report = make_report(scenario, nodes, constraints)
    if options.png:
        draw_plans(report, options.png, title=options.name)
    if options.json:
        print(json.dumps(plans_as_json(report), indent=2))
    else:
        _show(report, scenario, options, Console(), top=10 if len(nodes) == 1 else 2)
    return 0


def _show(
    report: "PlanReport",
    scenario: "Scenario",
    options: argparse.Namespace,
    console: "Console",
    *,
    top: int,
) -> None:
    """Prints the ranked layouts, `top` of every size unless told otherwise, and what else was asked
    for.
    """
    from ...planning.kernel_report import render_kernels
    from ...planning.plan_report import render_detail, render_plans, render_sources

    console.print(render_plans(report, top=options.top or top))
    if options.detail:
        largest = report.sizes[-1]
        for with_ep in (False, True):
            if plan := largest.best(with_ep=with_ep):
                console.print(render_detail(plan))
    if options.kernels:
        console.print(render_kernels(report.sizes[-1].fitting[0]))
    if options.sources:
        console.print(render_sources(scenario))
    if options.png:
        console.print(f"picture: {options.png}", markup=False, soft_wrap=True)
