"""Compares a training step with expert parallelism to pure data parallelism.

    python -m benchmarks.expert_parallel [--ranks 4] [--degrees 1 2 4] [--rounds 20] [--steps 2]
    python -m benchmarks.expert_parallel --ranks 8 --degrees 1 8 --dispatchers dedup

It runs steps of the recipe smoke (train/loop.py without the data), one micro-batch per rank, always
on the same number of ranks. EP 1, where every rank has all experts and only gradients are
exchanged, is pure data parallelism; every other degree runs with every dispatcher. All variants are
built in the same processes and take turns, in another order in every round, so that a machine's
drift affects all of them. A turn is some steps between two barriers. It reports the slowest rank's
time; the processor time of all ranks (user and system, including Gloo's threads), which is more
reliable if ranks share cores; and their context switches, voluntary (waiting) and involuntary
(preempted).

Ratios are medians over rounds of a variant's turn ÷ EP 1's turn in the same round, with quartiles.
Goals for the fastest dispatcher with EP on all ranks: 1.15 in processor time (1.3 on 8 ranks) and
1.25 in time. Exits with 1 if one is missed. Writes results/expert_parallel.json, or the given name;
takes about 5 minutes on 2 cores.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.report import ROOT, save
from moebius.data_pipeline.read.loader import Batch
from moebius.distributed.dispatch.table import DISPATCHERS, LOCAL, needs_nodes
from moebius.distributed.process.process import Process, start_process
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.loop import step
from moebius.train.recipes.smoke import RECIPES
from moebius.train.run import Run, assemble

GOALS = {"processor": 1.15, "wall": 1.25}
MANY_RANKS, MANY_GOALS = 8, {"processor": 1.3}
PER_NODE = 2  # pretended nodes, for dispatchers that want them
MICRO_BATCH = 4
WARM_UP = 2  # turns


@dataclass(frozen=True)
class Way:
    """Describes how experts are spread, and the dispatcher."""

    ep: int
    dispatcher: str

    @property
    def name(self) -> str:
        return "data parallelism" if self.ep == 1 else f"EP {self.ep} {self.dispatcher}"


@dataclass(frozen=True)
class Turn:
    """Holds the cost of a turn per step: of the slowest rank, and of all ranks."""

    wall_s: float
    processor_s: float
    voluntary: float  # context switches
    involuntary: float


def ways_of(degrees: Sequence[int], dispatchers: Sequence[str]) -> list[Way]:
    """Returns EP 1 first, then the others by degree; node groups need more than one node."""
    spread = [
        Way(ep, name)
        for ep in degrees
        if ep > 1
        for name in dispatchers
        if ep > PER_NODE or not needs_nodes(name)
    ]
    return [Way(1, LOCAL), *spread]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--dispatchers", nargs="+", default=[*DISPATCHERS], choices=[*DISPATCHERS])
    parser.add_argument("--rounds", type=int, default=20, help="2 at least")
    parser.add_argument("--steps", type=int, default=2, help="of a turn")
    parser.add_argument("--name", default="expert_parallel", help="of the file in results/")
    parser.add_argument("--rank-out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds {options.rounds} has no quartiles: give 2 at least")
    if wrong := [ep for ep in options.degrees if ep < 1 or options.ranks % ep]:
        parser.error(f"--degrees {wrong} do not divide --ranks {options.ranks}")
    if options.rank_out is not None:
        run_rank(options)
        return
    load_before = os.getloadavg()
    turns = launch(options)
    found = {name: summary(of, turns["data parallelism"]) for name, of in turns.items()}
    missed = show(found, options.ranks)
    figures = {
        "recipe": "smoke",
        "ranks": options.ranks,
        "sequences_per_rank": MICRO_BATCH,
        "rounds": options.rounds,
        "steps_per_turn": options.steps,
        "load_average_before": load_before,
        "load_average_after": os.getloadavg(),
        "ways": found,
        "goals": goals_of(options.ranks),
        "missed": missed,
    }
    print(f"written: {save(options.name, figures)}")
    raise SystemExit(1 if missed else 0)


def launch(options: argparse.Namespace) -> dict[str, list[Turn]]:
    """Returns all turns by variant, as rank 0 measured them."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "turns.json"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={options.ranks}", "-m", "benchmarks.expert_parallel"),
            *("--ranks", str(options.ranks), "--degrees", *map(str, options.degrees)),
            *("--dispatchers", *options.dispatchers, "--rounds", str(options.rounds)),
            *("--steps", str(options.steps), "--rank-out", str(out)),
        ]
        subprocess.run(
            command,
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
        )
        found: dict[str, list[Any]] = json.loads(out.read_text())
        return {name: [Turn(**turn) for turn in turns] for name, turns in found.items()}


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    ways = ways_of(options.degrees, options.dispatchers)
    with start_process("cpu", timeout_s=120) as process:
        turns = by_turns(
            ways, process, options.rank_out.parent, rounds=options.rounds, steps=options.steps
        )
        if process.rank == 0:
            found = {name: [asdict(turn) for turn in of] for name, of in turns.items()}
            options.rank_out.write_text(json.dumps(found))


def by_turns(
    ways: Sequence[Way], process: Process, folder: Path, *, rounds: int, steps: int
) -> dict[str, list[Turn]]:
    """Lets all variants take turns, the same turns on all ranks. Collective."""
    with shared_groups():
        runs = {way.name: build_run(way, process, folder) for way in ways}
    turns: dict[str, list[Turn]] = {name: [] for name in runs}
    names = [*runs]
    for number in range(WARM_UP + rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            turn = take_turn(*runs[name], steps)
            if number >= WARM_UP:
                turns[name].append(turn)
    return turns


@contextmanager
def shared_groups() -> Iterator[None]:
    """Lets runs that take turns share groups of the same ranks for the same use.

    A Gloo group has a thread that wakes a hundred times a second even if idle. With separate groups
    for every variant, 50 such threads per rank would wake in every turn instead of a normal run's
    three.
    """
    made: dict[Any, Any] = {}
    new_group = dist.new_group

    def shared(ranks: list[int] | None = None, **options: Any) -> Any:
        key = (None if ranks is None else tuple(ranks), options.get("group_desc"))
        if key not in made:
            made[key] = new_group(ranks, **options)
        return made[key]

    dist.new_group = shared
    try:
        yield
    finally:
        dist.new_group = new_group


def build_run(way: Way, process: Process, folder: Path) -> tuple[Run, Batch]:
    """Builds a run without data, and one batch (one micro-batch per rank) for all its steps."""
    if needs_nodes(way.dispatcher):
        process = replace(process, ranks_per_node=PER_NODE)
    changes = [
        f"mesh.ep={way.ep}",
        "mesh.dp_replicate=none",
        f"mesh.dispatcher={way.dispatcher}",
        f"train.micro_batch={MICRO_BATCH}",
        f"train.global_batch={MICRO_BATCH * process.world_size}",
    ]
    config = resolve("smoke", changes, RECIPES)
    run_dir = folder / way.name.replace(" ", "_")
    run_dir.mkdir(exist_ok=True)
    return assemble(config, run_dir, process), random_batch(config, process.rank)


def random_batch(config: Config, rank: int) -> Batch:
    """Returns one micro-batch of tokens, the same for the same rank."""
    tokens = torch.randint(
        config.model.vocab_size,
        (1, config.train.micro_batch, config.data.seq_len + 1),
        generator=torch.Generator().manual_seed(rank),
    )
    return Batch(tokens.numpy(), 0, 0, equal_shapes=True)


def take_turn(run: Run, batch: Batch, steps: int) -> Turn:
    """Runs some steps between two barriers. Collective."""
    dist.barrier()
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(steps):
        step(run, batch, 1e-4)
    wall = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    dist.barrier()  # threads that still serve other ranks count here
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent = torch.tensor(
        [
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            after.ru_nvcsw - before.ru_nvcsw,
            after.ru_nivcsw - before.ru_nivcsw,
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(spent)
    return Turn(*(number / steps for number in (*wall.tolist(), *spent.tolist())))


# Report -------------------------------------------------------------------------------------------


def summary(turns: Sequence[Turn], alone: Sequence[Turn]) -> dict[str, Any]:
    """Returns a variant's medians and its ratios to data parallelism, round by round."""
    return {
        "wall_s": statistics.median(turn.wall_s for turn in turns),
        "fastest_wall_s": min(turn.wall_s for turn in turns),
        "processor_s": statistics.median(turn.processor_s for turn in turns),
        "voluntary_switches": statistics.median(turn.voluntary for turn in turns),
        "involuntary_switches": statistics.median(turn.involuntary for turn in turns),
        "wall": ratio([a.wall_s / b.wall_s for a, b in zip(turns, alone, strict=True)]),
        "processor": ratio(
            [a.processor_s / b.processor_s for a, b in zip(turns, alone, strict=True)]
        ),
    }


def ratio(values: Sequence[float]) -> dict[str, float]:
    """Returns the median with its quartiles."""
    lower, _, upper = statistics.quantiles(values, n=4)
    return {"median": statistics.median(values), "lower": lower, "upper": upper}


def goals_of(ranks: int) -> dict[str, float]:
    """Returns the highest acceptable ratios."""
    return MANY_GOALS if ranks >= MANY_RANKS else GOALS


def show(found: dict[str, dict[str, Any]], ranks: int) -> list[str]:
    """Prints all variants; returns the goals that the fastest one with EP on all ranks misses."""
    table = Table(
        *("way", "ms a step", "÷ DP", "processor ms", "÷ DP", "switches", "forced"),
        title=f"a step of smoke on {ranks} ranks; processors and context switches of all ranks",
    )
    for name, one in found.items():
        table.add_row(
            name,
            f"{one['wall_s'] * 1e3:.0f}",
            spelled(one["wall"]),
            f"{one['processor_s'] * 1e3:.0f}",
            spelled(one["processor"]),
            f"{one['voluntary_switches']:.0f}",
            f"{one['involuntary_switches']:.0f}",
        )
    console = Console(width=110)
    console.print(table)
    spread = {name: one for name, one in found.items() if name.startswith(f"EP {ranks} ")}
    if not spread:
        return []
    best = min(spread, key=lambda name: spread[name]["processor"]["median"])
    missed = []
    for what, goal in goals_of(ranks).items():
        value = spread[best][what]["median"]
        good = value <= goal
        console.print(f"{best}, {what}: {value:.2f} ({'met' if good else 'missed'}: ≤ {goal})")
        missed += [] if good else [what]
    return missed


def spelled(value: dict[str, float]) -> str:
    """Formats a ratio with its quartiles."""
    return f"{value['median']:.2f} ({value['lower']:.2f} to {value['upper']:.2f})"


if __name__ == "__main__":
    main()
