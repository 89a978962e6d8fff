"""What recomputation and compiled dense parts cost and save, on one process.

    python -m benchmarks.recompute [RECIPE …] [--precision float32] [--rounds 12] [--no-compile]

Every way of running a recipe's micro-batch, in turns in one process, for the machine's speed
drifts: seconds of a forward and backward pass (median, and the fastest), and bytes that wait for
the backward pass, per token. The eager run without recomputation is the peer. Prints a table and
writes results/recompute_PRECISION.json; half a minute.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.report import save
from moebius.model.execution.compiled import compile_dense_parts
from moebius.model.execution.precision import forward_in
from moebius.model.execution.recompute import Recompute
from moebius.model.initialise import initialise
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import Config
from moebius.train.loss import MicroBatchLoss, micro_batch_loss
from moebius.train.recipes.smoke import RECIPES

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from live_memory import LiveMemory

MODES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass
class Way:
    """One way to run a recipe, and what was measured of it."""

    recipe: str
    recompute: Recompute
    compiled: bool
    kept_bytes_per_token: float | None = None
    first_s: float = 0.0
    median_s: float = 0.0
    fastest_s: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", default=["moeut"], metavar="RECIPE")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Way] = []
    for recipe in options.recipes:
        found += measure(
            recipe,
            getattr(torch, options.precision),
            options.rounds,
            compiles=not options.no_compile,
        )
    show(found)
    print(
        save(
            f"recompute_{options.precision}",
            {"precision": options.precision, "ways": [asdict(way) for way in found]},
        )
    )


def measure(recipe: str, dtype: torch.dtype, rounds: int, *, compiles: bool) -> list[Way]:
    config = RECIPES[recipe]()
    ways = [
        Way(recipe, mode, compiled) for compiled in (False, True)[: 1 + compiles] for mode in MODES
    ]
    passes = [forward_pass(config, way, dtype) for way in ways]
    times: list[list[float]] = [[] for _ in ways]
    for way, run in zip(ways, passes, strict=True):
        way.first_s = timed(run)
        if not way.compiled:  # a compiled part does not show its operations
            way.kept_bytes_per_token = kept_bytes(run) / (
                config.train.micro_batch * config.data.seq_len
            )
    for _ in range(rounds):
        for own, run in zip(times, passes, strict=True):
            own.append(timed(run))
    for way, own in zip(ways, times, strict=True):
        way.median_s, way.fastest_s = statistics.median(own), min(own)
    return ways


def forward_pass(config: Config, way: Way, dtype: torch.dtype) -> Callable[[], MicroBatchLoss]:
    model = Transformer(config.model)
    initialise(model, 0)
    model.recompute_layers(way.recompute)
    model.before_step(0)
    if way.compiled:
        compile_dense_parts(model)
    size = (config.train.micro_batch, config.data.seq_len + 1)
    rows: Tensor = torch.randint(
        config.model.vocab_size, size, generator=torch.Generator().manual_seed(0)
    )
    return partial(
        micro_batch_loss,
        partial(forward_in, model, dtype),
        rows,
        global_sequences=config.train.micro_batch,
    )


def timed(run: Callable[[], MicroBatchLoss]) -> float:
    started = time.perf_counter()
    run().loss.backward()
    return time.perf_counter() - started


def kept_bytes(run: Callable[[], MicroBatchLoss]) -> int:
    with LiveMemory() as live:
        result = run()
        kept = live.num_bytes
    del result
    return kept


def show(ways: list[Way]) -> None:
    table = Table(
        "recipe", "dense", "recompute", "kept B/token", "first s", "median s", "fastest s", "÷ peer"
    )
    peers = {way.recipe: way for way in ways if not way.compiled and way.recompute == "none"}
    for way in ways:
        kept = "" if way.kept_bytes_per_token is None else f"{way.kept_bytes_per_token:,.0f}"
        table.add_row(
            way.recipe,
            "compiled" if way.compiled else "eager",
            way.recompute,
            kept,
            f"{way.first_s:.1f}",
            f"{way.median_s:.3f}",
            f"{way.fastest_s:.3f}",
            f"{way.fastest_s / peers[way.recipe].fastest_s:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
