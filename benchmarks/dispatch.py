"""Compares dispatch and combine with the bare exchange of the same bytes.

    python -m benchmarks.dispatch [--ranks 2 4 8] [--seconds 4]

For each world, number of experts per token (K) and dispatcher, it times one forward pass of
dispatch and combine (without the stand-ins for the experts between them). The floor is
`all_to_all_single` of exactly the rows that the dispatcher sends and receives, with known splits
and rows in place. For allgather the floor uses its own two collectives; for a dispatcher without
collectives, those of one that sends the same rows. Both alternate pass by pass, because a shared
machine's speed drifts. Each pass counts the slowest rank's time; results are medians over passes.
The processor time of all ranks is reported too and is more reliable on a busy machine. `local` on
one rank shows the cost without an exchange. Goals: `dedup` sends exactly Σ over tokens of their
distinct destination ranks and takes ≤ 1.25 × the floor for rows of 4 KiB × 2,048 tokens per rank;
`symmetric` takes ≤ 0.75 × that floor, and ≤ 0.7 × for 512 tokens of 512 bytes. expert_parallel.py
measures whole training steps.

Ranks are processes of this machine over Gloo. Exits with 1 if a goal is missed. Takes about 15
minutes on 2 busy cores and writes results/dispatch.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.report import ROOT, save
from moebius.distributed.dispatch.base import NodeGroups, build_node_groups
from moebius.distributed.dispatch.choose import make_dispatcher
from moebius.distributed.dispatch.exchange import AllGather, AllToAll, Pending, ReduceScatter
from moebius.distributed.dispatch.table import DISPATCHERS, needs_nodes, needs_outbox
from moebius.distributed.process.process import Process, start_process
from moebius.distributed.symmetric.outbox import Outbox, open_outbox
from moebius.model.moe import Dispatched, LocalDispatcher
from moebius.model.routing import Routes, token_routes

GOAL = 1.25  # of dedup, against the bare exchange
MEMORY_GOALS = {"wide": 0.75, "narrow": 0.7}  # of symmetric, against the same
EXPERTS_PER_RANK = 4
PER_NODE = 2  # pretended nodes, for the hierarchical dispatcher
WARM_UP, FEWEST = 2, 5  # passes


@dataclass(frozen=True)
class Point:
    """Describes one measurement: T tokens per rank of D float32 numbers, K experts each."""

    num_ranks: int
    tokens: int
    width: int
    top_k: int
    dispatcher: str


def points(num_ranks: int) -> list[Point]:
    """Sweeps K at the goal's shape, and adds narrow rows, where latency dominates."""
    if num_ranks == 1:
        return [Point(1, 2048, 1024, 4, "local")]
    names = [
        name for name, entry in DISPATCHERS.items() if num_ranks > PER_NODE or not entry.needs_nodes
    ]
    wide = [Point(num_ranks, 2048, 1024, k, name) for k in (1, 2, 4, 8) for name in names]
    narrow = [Point(num_ranks, 512, 128, 4, name) for name in names]
    return [*wide, *narrow]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=4.0, help="for the passes of one point")
    parser.add_argument("--name", default="dispatch", help="of the file in results/")
    # In a rank: where rank 0 leaves the figures.
    parser.add_argument("--rank-out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_out is not None:
        run_rank(options)
        return
    load_before = os.getloadavg()
    figures: list[dict[str, Any]] = []
    for num_ranks in options.ranks:
        figures += launch(num_ranks, options.seconds)
        print(f"measured: {num_ranks} ranks", flush=True)
    met = print_report(figures)
    path = save(
        options.name,
        {
            "goal_dispatch": GOAL,
            "load_average_before": load_before,
            "load_average_after": os.getloadavg(),
            "points": figures,
        },
    )
    print(f"written: {path}")
    raise SystemExit(0 if met else 1)


def launch(num_ranks: int, seconds: float) -> list[dict[str, Any]]:
    """Returns what rank 0 of a world of that size measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={num_ranks}",
            "-m",
            "benchmarks.dispatch",
            "--rank-out",
            str(out),
            "--seconds",
            str(seconds),
        ]
        subprocess.run(
            command,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
        )
        return json.loads(out.read_text())


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    with start_process("cpu", timeout_s=120) as process, torch.no_grad():
        found = [
            time_point(point, process, options.seconds) for point in points(process.world_size)
        ]
        if process.rank == 0:
            options.rank_out.write_text(json.dumps(found))


# Dispatch and combine -----------------------------------------------------------------------------


@dataclass
class Spent:
    """Holds seconds of wall time and of processors."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def during(self, work: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu
        return result


def time_point(point: Point, process: Process, seconds: float) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    dispatcher = build_dispatcher(point, group)
    x, routes = batch(point, process)
    floor = make_floor(point, group, x, bare_motions(point, dispatcher, group, x, routes))
    started = time.perf_counter()
    for _ in range(WARM_UP):
        one_pass(dispatcher, x, routes)
        floor()
    taken = time.perf_counter() - started
    passes = torch.tensor(max(FEWEST, int(seconds * WARM_UP / taken)))
    dist.broadcast(passes, 0)
    spent = []
    for _ in range(int(passes)):
        dist.barrier()
        ours, bare = one_pass(dispatcher, x, routes), Spent()
        dist.barrier()
        bare.during(floor)
        spent.append([ours.wall_s, bare.wall_s, ours.cpu_s, bare.cpu_s])
    return asdict(point) | summary(torch.tensor(spent)) | rows(point, dispatcher, routes)


def build_dispatcher(point: Point, group: dist.ProcessGroup) -> Any:
    """Builds a point's dispatcher with the groups and memory it needs. Collective."""
    return make_dispatcher(
        point.dispatcher,
        group,
        nodes=node_groups(group) if needs_nodes(point.dispatcher) else None,
        outbox=open_memory(point, group),
        ranks_per_node=PER_NODE,
    )


@cache
def node_groups(group: dist.ProcessGroup) -> NodeGroups:
    """Returns one pair of groups for all points. Collective.

    An idle Gloo group has a thread that wakes a hundred times a second and would slow every
    measurement.
    """
    return build_node_groups(group, PER_NODE, timeout_s=120)


def open_memory(point: Point, group: dist.ProcessGroup) -> Outbox | None:
    """Opens this rank's memory to the others, if the dispatcher needs it. Collective."""
    if not needs_outbox(point.dispatcher):
        return None
    found = open_outbox(group, timeout_s=120)
    if isinstance(found, str):
        raise SystemExit(f"{point.dispatcher} cannot be had here: {found}")
    return found


def summary(spent: Tensor) -> dict[str, Any]:
    """Returns the slowest rank's time and all ranks' processor time of every pass."""
    wall, cpu = spent[:, :2].double().contiguous(), spent[:, 2:].double().contiguous()
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    (ours, floor), (ours_cpu, floor_cpu) = wall.T.tolist(), cpu.T.tolist()
    ratios = [a / b for a, b in zip(ours, floor, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "passes": len(ours),
        "seconds": statistics.median(ours),
        "floor_seconds": statistics.median(floor),
        "fastest_seconds": min(ours),
        "fastest_floor_seconds": min(floor),
        "ratio": statistics.median(ours) / statistics.median(floor),
        "ratio_of_fastest": min(ours) / min(floor),
        "quartiles_of_pairs": [quartiles[0], quartiles[2]],
        "cpu_ratio": statistics.median(ours_cpu) / max(statistics.median(floor_cpu), 1e-9),
    }


def rows(point: Point, dispatcher: Any, routes: Routes) -> dict[str, int]:
    """Returns the rows of a pass over all ranks, with their lower and upper bounds."""
    stats = None if isinstance(dispatcher, LocalDispatcher) else dispatcher.setup.counters
    sent = 0 if stats is None else stats.rows_sent // stats.passes
    wanted = torch.zeros(routes.num_targets, point.num_ranks, dtype=torch.bool)
    wanted[routes.source_N, routes.expert_N // EXPERTS_PER_RANK] = True
    totals = torch.tensor([sent, int(wanted.sum()), len(routes.expert_N)])
    dist.all_reduce(totals)
    names = ("rows_sent", "distinct_destinations", "rows_one_per_route")
    return dict(zip(names, totals.tolist(), strict=True)) | {"row_bytes": point.width * 4}


def batch(point: Point, process: Process) -> tuple[Tensor, Routes]:
    """Returns tokens that choose experts evenly."""
    generator = torch.Generator().manual_seed(process.rank)
    num_experts = EXPERTS_PER_RANK * point.num_ranks
    scores = torch.rand(point.tokens, num_experts, generator=generator)
    experts = scores.topk(min(point.top_k, num_experts)).indices
    x = torch.randn(point.tokens, point.width, generator=generator)
    return x, token_routes(experts, torch.ones(experts.shape), num_experts=num_experts)


def one_pass(dispatcher: Any, x: Tensor, routes: Routes) -> Spent:
    """Times dispatch and combine, without the stand-in for the experts between them."""

    def arrive() -> tuple[Dispatched, Tensor, Routes]:
        dispatched = dispatcher.dispatch(x, routes)
        return dispatched, dispatched.x_UD, dispatched.routes

    spent = Spent()
    dispatched, x_UD, came = spent.during(arrive)
    y_TD = stand_in(x_UD, came)
    dist.barrier()  # nobody pays for another rank's experts
    spent.during(lambda: dispatched.combine(y_TD))
    return spent


def stand_in(x_UD: Tensor, routes: Routes) -> Tensor:
    """Returns a row for every target, in place of the experts' outputs."""
    if routes.per_source == routes.per_target == 1:
        return x_UD
    return x_UD.new_zeros(routes.num_targets, x_UD.shape[1]).index_add_(
        0, routes.target_N, x_UD[routes.source_N]
    )


def bare_motions(
    point: Point, dispatcher: Any, group: dist.ProcessGroup, x: Tensor, routes: Routes
) -> list[tuple[AllToAll, Tensor]]:
    """Returns the all-to-alls of rows in a pass.

    For a dispatcher without all-to-alls, those of the first one in the table that sends the same
    rows.
    """
    seen = wide_motions(dispatcher, x, routes)
    entry = DISPATCHERS.get(point.dispatcher)
    for name, other in DISPATCHERS.items():
        if seen or entry is None or entry.pattern.to_all or other.pattern != entry.pattern:
            continue
        seen = wide_motions(build_dispatcher(replace(point, dispatcher=name), group), x, routes)
    return seen


def wide_motions(dispatcher: Any, x: Tensor, routes: Routes) -> list[tuple[AllToAll, Tensor]]:
    """Returns the all-to-alls of rows in a pass, in order."""
    seen: list[tuple[AllToAll, Tensor]] = []
    start = AllToAll.start

    def recorded(self: AllToAll, rows: Tensor) -> Pending:
        if rows.dim() == 2 and rows.shape[1] == x.shape[1] and rows.is_floating_point():
            seen.append((self, torch.randn_like(rows)))
        return start(self, rows)

    AllToAll.start = recorded
    try:
        one_pass(dispatcher, x, routes)
    finally:
        AllToAll.start = start
    return seen


def make_floor(
    point: Point, group: dist.ProcessGroup, x: Tensor, motions: list[tuple[AllToAll, Tensor]]
) -> Callable[[], None]:
    """Exchanges the same bytes with nothing around them; for allgather with its own collectives."""

    def gather_and_scatter() -> None:
        ReduceScatter(group).start(AllGather(group).start(x).wait()).wait()

    def exchange() -> None:
        for motion, sent in motions:
            out = sent.new_empty(sum(motion.received), sent.shape[1])
            dist.all_to_all_single(out, sent, motion.received, motion.sent, group=motion.group)

    return gather_and_scatter if point.dispatcher == "allgather" else exchange


# Report -------------------------------------------------------------------------------------------


def print_report(figures: list[dict[str, Any]]) -> bool:
    """Prints all points and returns whether the goals are met."""
    table = Table(
        "ranks",
        "tokens × width",
        "K",
        "dispatcher",
        "ms",
        "floor ms",
        "ratio",
        "CPU",
        "rows ÷ routes",
        "",
        title="dispatch + combine against the bare exchange of the same rows",
    )
    met = True
    for point in figures:
        verdict = verdict_of(point)
        met = met and "missed" not in verdict
        table.add_row(
            str(point["num_ranks"]),
            f"{point['tokens']} × {point['width']}",
            str(point["top_k"]),
            point["dispatcher"],
            f"{point['seconds'] * 1e3:.1f}",
            f"{point['floor_seconds'] * 1e3:.1f}",
            f"{point['ratio']:.2f}" if point["num_ranks"] > 1 else "",
            f"{point['cpu_ratio']:.2f}" if point["num_ranks"] > 1 else "",
            f"{point['rows_sent'] / point['rows_one_per_route']:.2f}",
            verdict,
        )
    Console(width=110).print(table)
    return met


def verdict_of(point: dict[str, Any]) -> str:
    """Returns the verdict on a dispatcher with a goal."""
    if point["dispatcher"] not in ("dedup", "symmetric"):
        return ""
    if point["rows_sent"] != point["distinct_destinations"]:
        return "rows missed"
    is_wide = point["row_bytes"] >= 4096 and point["tokens"] >= 2048
    if point["dispatcher"] == "dedup" and not is_wide:
        return "rows met"
    goal = MEMORY_GOALS["wide" if is_wide else "narrow"]
    if point["dispatcher"] == "dedup":
        goal = GOAL
    return "met" if point["ratio"] <= goal else "time missed"


if __name__ == "__main__":
    main()
