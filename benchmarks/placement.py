"""How much evener ranks become when experts are placed by their load: packing alone, and with copies of hot experts.

    python benchmarks/placement.py [--steps 60] [--every 20]

1. Recorded: a small MoEUT with 64 feed-forward experts and 4 × 4 of each attention projection trains on the embedded corpus
   without balancing losses; its own metrics tell the load of every expert, step by step and depth step by depth step. Every bank
   is placed by the loads of one window of steps and judged on the next window, as `mesh.rebalance_every` does it: on loads that
   the decision has not seen. For EP 2, 4, 8 and 0, 1, 2 replicas per rank.
2. In a run: the same model on 4 Gloo ranks, EP 4, with and without moves; the factors are those of the routes that the ranks
   really served (`exchange` in the metrics).

The figure is the hottest rank's load over the mean of its EP group, in the mean over banks and judged steps: once for a bank's
depth steps added up (what is measured in a run), once for every depth step alone (a rank waits in each of them).

Takes about 8 minutes on 2 cores; writes results/placement.json and results/placement.png.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib.figure import Figure
from report import RESULTS, save
from rich.console import Console
from rich.table import Table

from moebius.data_pipeline.prepare import prepare
from moebius.distributed.dispatch_homes import Homes, contiguous_homes
from moebius.distributed.placement import hottest_factor, rebalanced
from moebius.train.config import Config, resolve
from moebius.train.recipes import RECIPES
from moebius.train.run_folder import open_run, place_data

DEGREES, REPLICAS = (2, 4, 8), (0, 1, 2)
KINDS = {"feed_forward": "", "value": "value_", "output": "output_"}
MODEL = (
    "model.num_experts=64", "model.router.top_k=8", "model.d_expert=32", "model.router.balance=0",
    "model.attention_balance=0",
)  # fmt: skip
Bank = np.ndarray  # (steps, depth steps of one group member, experts): shares of the routes of a depth step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        lines, config = train(Path(scratch), "recorded", options.steps)
        banks = banks_of(lines, config)
        rows = [
            {"ep": ep, "replicas": replicas, "kind": kind, **judge(own, ep, replicas, options.every)}
            for ep in DEGREES
            for replicas in REPLICAS
            for kind, own in banks.items()
        ]
        runs = [in_a_run(Path(scratch), options.steps, every) for every in ([], [options.every, 0], [options.every, 1])]
    show(rows, runs)
    settings = {"model": MODEL, "steps": options.steps, "every": options.every}
    path = save("placement", {"settings": settings, "recorded": rows, "in_a_run": runs})
    draw(rows, path.with_suffix(".png"))
    print(f"written: {path} and {RESULTS / 'placement.png'}")


def train(scratch: Path, name: str, steps: int, *changes: str, ranks: int = 1) -> tuple[list[dict[str, Any]], Config]:
    """The train lines of one run."""
    own = (
        *MODEL, f"train.steps={steps}", "train.log_every=1", "train.eval_rows=8", "train.eval_every=0", "checkpoint.every=0",
        "mesh.dp_replicate=1", f"mesh.ep={ranks}", "job.rehearse_failure_at_step=none", "job.num_nodes=1",
        f"job.ranks_per_node={ranks}", *changes,
    )  # fmt: skip
    config = place_data(resolve("smoke", own, RECIPES), scratch)
    run_dir, data = scratch / name, Path(config.data.directory)
    if not data.exists():
        prepare(config.data, data)
    open_run(config, run_dir)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "moebius.train",
        str(run_dir),
    ]  # fmt: skip
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] in ("train", "placement")], config


def banks_of(lines: list[dict[str, Any]], config: Config) -> dict[str, list[Bank]]:
    """By kind, the banks of all group members."""
    steps = [line for line in lines if line["kind"] == "train"]
    found = {}
    for kind, prefix in KINDS.items():
        load_SLE = np.array([line[f"{prefix}expert_load"] for line in steps])
        members = np.array(config.model.schedule)
        found[kind] = [load_SLE[:, members == member] for member in range(config.model.group_size)]
    return found


def judge(banks: list[Bank], ep: int, replicas: int, every: int) -> dict[str, float]:
    """Factors of the steps after the first window, each under the homes that the window before has led to."""
    before: list[float] = []
    after: list[float] = []
    before_depth: list[float] = []
    after_depth: list[float] = []
    for bank in banks:
        start = homes = contiguous_homes(bank.shape[2], ep)
        for first in range(every, len(bank), every):
            homes = rebalanced(homes, bank[first - every : first].sum((0, 1)).tolist(), replicas=replicas)
            for load_LE in bank[first : first + every]:
                before.append(factor(start, load_LE.sum(0)))
                after.append(factor(homes, load_LE.sum(0)))
                before_depth += [factor(start, load_E) for load_E in load_LE]
                after_depth += [factor(homes, load_E) for load_E in load_LE]
    return {
        "before": fmean(before), "after": fmean(after),
        "before_per_depth_step": fmean(before_depth), "after_per_depth_step": fmean(after_depth),
        "worst_before": max(before), "worst_after": max(after),
    }  # fmt: skip


def factor(homes: Homes, load_E: np.ndarray) -> float:
    return hottest_factor(homes, load_E.tolist())


def in_a_run(scratch: Path, steps: int, moves: list[int]) -> dict[str, Any]:
    """What 4 ranks really served after the first window, with or without moves."""
    changes = []
    if moves:
        changes = [f"mesh.rebalance_every={moves[0]}", f"mesh.replicas={moves[1]}"]
    lines, _ = train(scratch, "-".join(["run", *map(str, moves)]), steps, *changes, ranks=4)
    train_lines = [line for line in lines if line["kind"] == "train"]
    judged = [line for line in train_lines if line["step"] > steps // 3]
    hottest: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for line in judged:
        for layer, figures in line["exchange"].items():
            hottest[layer.partition("/")[2]].append(figures["hottest_rank"])
    placements = [line for line in lines if line["kind"] == "placement"]
    return {
        "rebalance_every": moves[0] if moves else 0, "replicas": moves[1] if moves else 0,
        "hottest_rank": {kind: fmean(values) for kind, values in hottest.items()},
        "loss": train_lines[-1]["loss"],
        "moves": [{key: line[key] for key in ("step", "moved_experts", "moved_bytes", "seconds")} for line in placements],
    }  # fmt: skip


def show(rows: list[dict[str, Any]], runs: list[dict[str, Any]]) -> None:
    table = Table("EP", "bank", "replicas", "before", "after", "per depth step: before", "after")
    for row in rows:
        figures = (row[key] for key in ("before", "after", "before_per_depth_step", "after_per_depth_step"))
        table.add_row(str(row["ep"]), row["kind"], str(row["replicas"]), *(f"{figure:.3f}" for figure in figures))
    Console().print(table)
    table = Table("in a run, EP 4", "replicas", *KINDS, "last loss", "seconds per move")
    for run in runs:
        seconds = [move["seconds"] for move in run["moves"]]
        table.add_row(
            f"every {run['rebalance_every']}" if run["rebalance_every"] else "no moves", str(run["replicas"]),
            *(f"{run['hottest_rank'][kind]:.3f}" for kind in KINDS), f"{run['loss']:.6f}",
            f"{fmean(seconds):.3f}" if seconds else "",
        )  # fmt: skip
    Console().print(table)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel per kind of bank: factors against the EP degree."""
    figure = Figure(figsize=(9, 3.2), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(KINDS), sharey=True)
    for panel, kind in zip(panels, KINDS, strict=True):
        own = [row for row in rows if row["kind"] == kind]
        panel.plot(
            DEGREES,
            [row["before"] for row in own if row["replicas"] == 0],
            "o--",
            color="0.5",
            label="contiguous blocks",
        )
        for replicas in REPLICAS:
            after = [row["after"] for row in own if row["replicas"] == replicas]
            panel.plot(DEGREES, after, "o-", label=f"placed, {replicas} replicas per rank")
        panel.set(title=kind.replace("_", "-"), xlabel="EP degree", xscale="log", xticks=DEGREES, xticklabels=DEGREES)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("hottest rank's load ÷ mean")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
    figure.savefig(path, metadata={"Software": None})


if __name__ == "__main__":
    main()
