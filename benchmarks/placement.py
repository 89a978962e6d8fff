"""Measures how far placement evens out ranks: packing alone, and with copies of hot experts.

    python -m benchmarks.placement [--steps 160]

Two small models train on the embedded corpus without balancing losses: a MoEUT with 8 of 64
feed-forward experts (sigmoid gates), and one with 1 of 64 (softmax gates, which collapses). Their
metrics record every expert's load by step and depth step. Every bank is placed by the loads of one
window of steps and judged on the next window, which the decision has not seen, as with
`mesh.rebalance_every`: for EP 2, 4, 8, for 0, 1, 2 replicas per rank, and for windows of 5 and 20
steps; early (steps 21 to 60, where routing changes fast) and late (from 101).
The figure is the hottest rank's load over the mean of its EP group, averaged over banks and judged
steps: once for a bank's depth steps summed, once for every depth step alone (a rank waits in each).
Takes about 5 minutes on 2 cores and writes results/placement.json.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report import save
from moebius.data_pipeline.make.prepare import prepare
from moebius.distributed.dispatch.expert_map import ExpertMap, contiguous_map
from moebius.distributed.placement.balance_load import load_imbalance, rebalanced
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import open_run, place_data

DEGREES, REPLICAS, WINDOWS = (2, 4, 8), (0, 1, 2), (5, 20)
SPANS = {"steps 21 to 60": (20, 60), "from step 101 on": (100, None)}
KINDS = {"feed_forward": "", "value": "value_", "output": "output_"}
SIZES = (
    "model.feed_forward.num_experts=64",
    "model.feed_forward.d_expert=32",
    "model.attention.balance=0",
)
MODELS = {
    "sigmoid, 8 of 64": (
        *SIZES,
        "model.feed_forward.router.top_k=8",
        "model.feed_forward.router.balance=0",
    ),
    "softmax, 1 of 64": (
        *SIZES,
        "model.feed_forward.router.kind=token_choice",
        "model.feed_forward.router.top_k=1",
        "model.feed_forward.router.balance=0",
    ),
}
# (steps, depth steps of one group member, experts): shares of the routes of a depth step
Bank = np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=160)
    options = parser.parse_args()
    last_span = max(begin for begin, _ in SPANS.values())
    if options.steps <= last_span:
        parser.error(f"steps after {last_span} are judged: --steps {options.steps} must be more")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for number, model in enumerate(MODELS):
            lines, config = train(scratch, f"recorded-{number}", options.steps, *MODELS[model])
            for kind, banks in banks_of(lines, config).items():
                rows += [{"model": model, "bank": kind, **row} for row in judge_all(banks)]
    show(rows)
    settings = {"models": MODELS, "steps": options.steps}
    print(f"written: {save('placement', {'settings': settings, 'recorded': rows})}")


def train(
    scratch: Path, name: str, steps: int, *changes: str
) -> tuple[list[dict[str, Any]], Config]:
    """Returns the train lines of one run on one rank."""
    own = (
        *changes,
        f"train.steps={steps}",
        "train.log_every=1",
        "train.eval_rows=8",
        "train.eval_every=0",
        "checkpoint.every=0",
        "mesh.dp_replicate=1",
        "mesh.ep=1",
        "job.rehearse_failure_at_step=none",
        "job.num_nodes=1",
        "job.ranks_per_node=1",
    )
    config = place_data(resolve("smoke", own, RECIPES), scratch)
    run_dir, data = scratch / name, Path(config.data.directory)
    if not data.exists():
        prepare(config.prepare, data)
    open_run(config, run_dir)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1")
    command = [*launcher, "-m", "moebius.train", str(run_dir)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdin=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"], config


def banks_of(lines: list[dict[str, Any]], config: Config) -> dict[str, list[Bank]]:
    """Returns the banks of all group members by kind."""
    found = {}
    for kind, prefix in KINDS.items():
        load_SLE = np.array([line[f"{prefix}expert_load"] for line in lines])
        members = np.array([step.member for step in config.model.schedule])
        found[kind] = [
            load_SLE[:, members == member] for member in range(config.model.layers_per_group)
        ]
    return found


def judge_all(banks: list[Bank]) -> Iterator[dict[str, Any]]:
    """Returns a row for every EP degree, number of replicas, window and span."""
    for ep, replicas, every, span in itertools.product(DEGREES, REPLICAS, WINDOWS, SPANS):
        yield {
            "ep": ep,
            "replicas": replicas,
            "every": every,
            "span": span,
            **judge(banks, ep, replicas, every, span),
        }


def judge(banks: list[Bank], ep: int, replicas: int, every: int, span: str) -> dict[str, float]:
    """Returns the factors of the span's steps, each under the expert map of the previous window."""
    found: dict[str, list[float]] = {
        name: [] for name in ("before", "after", "before_depth", "after_depth")
    }
    for bank in banks:
        start = expert_map = contiguous_map(bank.shape[2], ep)
        judged = range(len(bank))[slice(*SPANS[span])]
        for first in range(every, len(bank), every):
            expert_map = rebalanced(
                expert_map, bank[first - every : first].sum((0, 1)).tolist(), replicas=replicas
            )
            for step in range(first, min(first + every, len(bank))):
                if step in judged:
                    for name, own in (("before", start), ("after", expert_map)):
                        found[name].append(factor(own, bank[step].sum(0)))
                        found[f"{name}_depth"] += [factor(own, load_E) for load_E in bank[step]]
    return {name: fmean(values) for name, values in found.items()}


def factor(expert_map: ExpertMap, load_E: np.ndarray) -> float:
    return load_imbalance(expert_map, load_E.tolist())


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "feed-forward bank",
        "judged",
        "EP",
        "every",
        "replicas",
        "before",
        "after",
        "per depth step: before",
        "after",
    )
    for row in rows:
        if row["bank"] == "feed_forward":
            figures = (
                f"{row[key]:.3f}" for key in ("before", "after", "before_depth", "after_depth")
            )
            table.add_row(
                *(str(row[key]) for key in ("model", "span", "ep", "every", "replicas")), *figures
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
