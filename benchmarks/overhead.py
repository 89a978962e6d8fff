"""Measures the cost of the whole stack on top of the bare model step.

    python -m benchmarks.overhead [--pairs 3] [--steps 60] [--long-steps 2000] [--soak 3000]

One run answers four questions:
  1. Step time inside the stack (Ray, supervisor, agents, loader, metrics, background checkpoints) ÷
     the bare step on the same number of ranks under plain torchrun: forward, backward, reduction,
     clipping, update on one fixed batch. Measured in pairs, because the machine's speed drifts.
     Goal: ≤ 1.05. Means over all counted steps include saves and their effects, but not
     evaluations.
  2. Seconds per step that ranks waited for data after the first batch, summed over ranks. Goal:
     below 1 ms.
  3. Memory of all processes (proportional set size, so that shared pages count once). Goal: < 4
  GiB. 4. Unshared memory of every process in a long run of a small model: median of its second
  quarter
     against the median of its last quarter. Goal: none grows by more than 8 MiB.

With --norms, only the cost of gradient norms by part is measured, on one rank: so many steps with and
as many without them by turns, and the median ratio (goal: ≤ 1.01).

With --soak, only the memory of both ranks of `moebius train` with EP 2 is measured, over so many
steps with a checkpoint every 50 (results/soak.json, 5 minutes).

With --examine, only `evaluate.every` is measured, on two ranks of the recipe smoke with EP 2: seconds
for 200 items of a task with four answers, and for one prompt (results/examine.json, 1 minute).

Exits with 1 if a goal is missed. Takes about 12 minutes on 2 cores and writes
results/overhead.json. With --long-steps 0 it skips question 4, takes half the time and writes
results/overhead_step.json.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import ROOT, save
from moebius.cluster.job import last_train_line
from moebius.cluster.local import train_here
from moebius.cluster.nodes import processes
from moebius.cluster.submit import submit
from moebius.data_pipeline.read.loader import Batch
from moebius.distributed import gradients
from moebius.distributed.process.process import start_process
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.loop import step
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import open_run, place_data
from moebius.train.run import assemble

WARM_UP = 10  # steps not counted
SMALL = (
    "model.vocab_size=1024",
    "prepare.vocab_size=1024",
    "model.d_model=32",
    "model.attention.d_head=8",
    "model.feed_forward.d_expert=16",
    "model.feed_forward.num_experts=8",
    "model.feed_forward.router.top_k=2",
    "data.seq_len=32",
    "train.global_batch=4",
    "train.micro_batch=1",
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--long-steps", type=int, default=2000)
    parser.add_argument(
        "--bare", type=Path, help=argparse.SUPPRESS
    )  # a rank of the bare run: its run folder
    parser.add_argument("--norms", type=int, metavar="STEPS", help="measure only norms by part")
    parser.add_argument("--soak", type=int, metavar="STEPS", help="measure only two ranks' memory")
    parser.add_argument("--examine", action="store_true", help="measure only evaluate.every")
    options = parser.parse_args()
    if options.bare is not None:
        run_bare(options.bare)
        return
    if options.norms:
        compare_norms(options.norms)
    if options.soak:
        soak(options.soak)
        return
    if options.examine:
        time_examinations()
        return
    with tempfile.TemporaryDirectory() as scratch:
        figures = measure(Path(scratch), options)
        if options.long_steps:
            figures["long_run"] = measure_growth(Path(scratch), options)
    met = print_report(figures)
    print(f"written: {save('overhead' if options.long_steps else 'overhead_step', figures)}")
    raise SystemExit(0 if met else 1)


def measure(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    steps = options.steps + WARM_UP
    changes = [f"train.steps={steps}", f"train.eval_every={10 * steps}", "train.eval_rows=16"]
    config = make_config(scratch, *changes)
    pairs, waits, peaks = [], [], []
    for number in range(options.pairs):
        # Reading the memory of 25 processes costs a few per cent of a core itself: rarely, while
        # time is measured.
        stack = run_stack(config, scratch / f"stack-{number}", sample_every_s=15.0)
        bare_s = time_bare(config, scratch / f"bare-{number}")
        pairs.append(
            {
                "stack_step_s": stack["step_s"],
                "bare_step_s": bare_s,
                "ratio": stack["step_s"] / bare_s,
            }
        )
        waits.append(stack["data_wait_s_per_step"])
        peaks.append(stack["peak_pss_gib"])
        print(f"pair {number + 1} of {options.pairs}: {pairs[-1]}", flush=True)
    return {
        "layout": "2 pretended nodes × 2 ranks, EP 2 × DP 2, recipe smoke",
        "steps_counted": options.steps,
        "pairs": pairs,
        "ratio_median": statistics.median(pair["ratio"] for pair in pairs),
        "data_wait_s_per_step": max(waits),
        "peak_pss_gib": max(peaks),
    }


def measure_growth(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    config = make_config(
        scratch,
        *SMALL,
        f"train.steps={options.long_steps}",
        "train.eval_every=500",
        "checkpoint.every=200",
    )
    return {
        "steps": options.long_steps,
        "growth": run_stack(config, scratch / "long", sample_every_s=1.0)["growth"],
    }


def compare_norms(steps: int) -> None:
    """Prints what norms by part cost per step, and exits with 1 if it is more than one per cent."""
    layout = ("job.num_nodes=1", "job.ranks_per_node=1", "mesh.ep=1", "mesh.dp_replicate=1")
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "bare"
        logged = (f"train.steps={2 * steps}", "train.log_every=1")
        time_bare(make_config(Path(scratch), *logged, *layout), run_dir)
        ratio = json.loads((run_dir / "bare.json").read_text())["norms_ratio"]
    print(f"step with norms by part ÷ step without, median of {steps // 2} turns: {ratio:.4f}")
    raise SystemExit(0 if ratio <= 1.01 else 1)


def soak(steps: int) -> None:
    """Trains on two ranks with EP 2, and records the resident size of each in eight parts of the run.

    The first two of the parts are left out of the growth. In a run of 3,000 steps rank 0 grew by 40 MiB
    there, during the first evaluations and checkpoints, and by one in the other six.
    """
    with tempfile.TemporaryDirectory() as scratch:
        changes = (f"train.steps={steps}", "train.eval_every=500", "checkpoint.every=50")
        layout = ("job.num_nodes=1", "job.ranks_per_node=2", "mesh.ep=2", "mesh.dp_replicate=1")
        config, run_dir = (
            make_config(Path(scratch), *SMALL, *changes, *layout),
            Path(scratch) / "run",
        )
        sizes: dict[str, list[int]] = {}
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(1.0):
                for pid, marks in processes.find(str(run_dir)).items():
                    if processes.RANK in marks and last_train_line(run_dir) is not None:
                        with contextlib.suppress(psutil.Error):
                            rss = psutil.Process(pid).memory_info().rss
                            sizes.setdefault(f"rank {int(marks[processes.RANK])}", []).append(rss)

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            status = train_here(config, run_dir, console=Console(file=io.StringIO()))
        finally:
            ended.set()
            thread.join()
        if status.exit_code:
            raise SystemExit(f"the job failed: {status.reason}")
    parts = {rank: _medians_mib(values) for rank, values in sorted(sizes.items())}
    growth = {rank: round(values[-1] - values[2], 1) for rank, values in parts.items()}
    for rank, values in parts.items():
        print(f"{rank}: {values} MiB, growth {growth[rank]} MiB")
    facts = {"steps": steps, "layout": "1 node × 2 ranks, EP 2", "resident_mib": parts}
    print(f"written: {save('soak', facts | {'growth_mib': growth})}")
    raise SystemExit(0 if max(growth.values()) <= 4.0 else 1)


def time_examinations(items: int = 200, times: int = 4) -> None:
    """Times scores and samples of a run, beside its steps; the first time is left out."""
    with tempfile.TemporaryDirectory() as scratch:
        questions = [
            {
                "question": f"What is {n}?",
                "choices": ["one", "two", "three", "four"],
                "label": n % 4,
            }
            for n in range(items)
        ]
        (Path(scratch) / "arc_easy.jsonl").write_text("\n".join(map(json.dumps, questions)) + "\n")
        asked = ("evaluate.tasks=arc_easy", f"evaluate.data={scratch}", 'evaluate.prompts="The "')
        changes = (*asked, "evaluate.every=10", f"train.steps={10 * times}", "train.eval_rows=16")
        layout = ("job.num_nodes=1", "job.ranks_per_node=2", "mesh.ep=2", "mesh.dp_replicate=1")
        run_dir = Path(scratch) / "run"
        config = make_config(Path(scratch), *changes, *layout)
        status = train_here(config, run_dir, console=Console(file=io.StringIO()))
        if status.exit_code:
            raise SystemExit(f"the job failed: {status.reason}")
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    by_kind = {
        kind: [line for line in lines if line["kind"] == kind]
        for kind in ("train", "scores", "samples")
    }
    pairs = zip(by_kind["scores"][1:], by_kind["samples"][1:], strict=True)
    facts = {
        "layout": "1 node × 2 ranks, EP 2, recipe smoke",
        "step_s": statistics.median(line["step_s"] for line in by_kind["train"]),
        f"scores_s_of_{items}_items": statistics.median(
            line["seconds"] for line in by_kind["scores"][1:]
        ),
        "sample_s": statistics.median(text["time"] - score["time"] for score, text in pairs),
    }
    print(facts)
    print(f"written: {save('examine', facts)}")


def _medians_mib(values: list[int], parts: int = 8) -> list[float]:
    """Returns the median of each part of a series."""
    bounds = [len(values) * number // parts for number in range(parts + 1)]
    return [
        round(statistics.median(values[first:last]) / 2**20, 1)
        for first, last in itertools.pairwise(bounds)
    ]


def make_config(scratch: Path, *changes: str) -> Config:
    return place_data(
        resolve("smoke", ["job.rehearse_failure_at_step=none", *changes], RECIPES), scratch
    )


def run_stack(config: Config, run_dir: Path, *, sample_every_s: float) -> dict[str, Any]:
    """Runs one job through the whole stack, with times from its metrics and memory from outside."""
    open_run(config, run_dir)
    watcher = MemoryWatcher(sample_every_s)
    watcher.start()
    status = submit(config, run_dir, console=Console(file=(run_dir / "console.log").open("w")))
    watcher.stop()
    if status.exit_code:
        raise SystemExit(f"the job failed: {status.reason}; logs in {run_dir}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["kind"] == "train"]
    # From the end of one step's log line to the next: everything that happens between is in it,
    # saves too.
    first, last = next(line for line in train if line["step"] >= WARM_UP), train[-1]
    waited = [line["data_wait_s"] for line in train[1:]]
    return {
        "step_s": (last["time"] - first["time"]) / (last["step"] - first["step"]),
        "data_wait_s_per_step": sum(waited) / len(waited),
        "peak_pss_gib": watcher.peak_bytes / 2**30,
        "growth": watcher.growth(),
    }


def time_bare(config: Config, run_dir: Path) -> float:
    """Returns the mean step of the same ranks under plain torchrun, without Ray, loader, metrics
    and checkpoints.
    """
    open_run(config, run_dir)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={config.world_size}",
        "-m",
        "benchmarks.overhead",
        "--bare",
        str(run_dir),
    ]
    subprocess.run(
        command,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
    )
    return json.loads((run_dir / "bare.json").read_text())["step_s"]


def run_bare(run_dir: Path) -> None:
    config = Config.load(run_dir / "config.json")
    torch.set_num_threads(1)
    with start_process("auto", timeout_s=60) as process:
        run = assemble(config, run_dir, process)
        accumulation = config.train.global_batch // (process.world_size * config.train.micro_batch)
        shape = (accumulation, config.train.micro_batch, config.data.seq_len + 1)
        tokens = torch.randint(
            config.model.vocab_size, shape, generator=torch.Generator().manual_seed(process.rank)
        )
        batch = Batch(tokens.numpy(), 0, 0, equal_shapes=True)
        times = []
        for number in range(config.train.steps):
            # without and with norms by part, by turns, each first every other time
            with contextlib.nullcontext() if number % 4 in (1, 2) else without_parts():
                started = time.perf_counter()
                step(run, batch, 1e-4)
                times.append(time.perf_counter() - started)
        if process.rank == 0:
            counted = iter(times[WARM_UP + -WARM_UP % 4 :])
            fours = zip(counted, counted, counted, counted, strict=False)
            ratios = [(b + c) / (a + d) for a, b, c, d in fours]
            facts = {
                "step_s": statistics.fmean(times[WARM_UP:]),
                "norms_ratio": statistics.median(ratios) if ratios else None,
            }
            (run_dir / "bare.json").write_text(json.dumps(facts))


@contextlib.contextmanager
def without_parts() -> Iterator[None]:
    """Makes steps that have no norms by part."""
    with mock.patch.object(gradients, "_sums_of_parts", return_value=0.0):
        yield


class MemoryWatcher:
    """Samples the memory of this process and its descendants until stopped."""

    def __init__(self, every_s: float) -> None:
        self.peak_bytes = 0
        self._every_s = every_s
        self._samples: dict[tuple[int, str], list[tuple[float, int]]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def growth(self) -> list[dict[str, Any]]:
        """Returns the unshared memory in the second and last quarter, per process that lived
        through half of the run or more.
        """
        out = []
        longest = max(
            (samples[-1][0] - samples[0][0] for samples in self._samples.values()), default=0.0
        )
        for (pid, name), samples in self._samples.items():
            if samples[-1][0] - samples[0][0] < 0.5 * longest:
                continue
            sizes = [size for _, size in samples]
            quarter = max(1, len(sizes) // 4)
            early, late = sizes[quarter : 2 * quarter] or sizes, sizes[-quarter:]
            out.append(
                {
                    "process": name,
                    "pid": pid,
                    "early_mib": round(statistics.median(early) / 2**20, 1),
                    "late_mib": round(statistics.median(late) / 2**20, 1),
                }
            )
        return sorted(out, key=lambda row: row["early_mib"] - row["late_mib"])

    def _watch(self) -> None:
        while not self._ended.wait(self._every_s):
            total, now = 0, time.monotonic()
            me = psutil.Process()
            for process in [me, *me.children(recursive=True)]:
                try:
                    memory, name = process.memory_full_info(), describe(process)
                except psutil.Error:
                    continue
                total += memory.pss
                self._samples.setdefault((process.pid, name), []).append((now, memory.uss))
            self.peak_bytes = max(self.peak_bytes, total)


def describe(process: psutil.Process) -> str:
    words = process.cmdline()
    for word in words:
        if word.startswith(("ray::", "moebius")):
            return word
    return " ".join(Path(word).name for word in words[:3])[:60]


def print_report(figures: dict[str, Any]) -> bool:
    """Prints figures beside goals and returns whether all goals are met."""
    rows = [
        ("step in the stack ÷ bare step (median of pairs)", figures["ratio_median"], 1.05),
        ("wait for data after the first batch, s per step", figures["data_wait_s_per_step"], 0.001),
        ("memory of all processes, GiB", figures["peak_pss_gib"], 4.0),
    ]
    if "long_run" in figures:
        growth = max(
            (row["late_mib"] - row["early_mib"] for row in figures["long_run"]["growth"]),
            default=0.0,
        )
        rows.append(
            (
                f"largest growth of a process over {figures['long_run']['steps']} steps, MiB",
                growth,
                8.0,
            )
        )
    table = Table("figure", "measured", "goal", "", title="cost of the whole stack")
    for name, measured, goal in rows:
        table.add_row(
            name, f"{measured:.4g}", f"≤ {goal:g}", "met" if measured <= goal else "[red]missed"
        )
    Console().print(table)
    return all(measured <= goal for _, measured, goal in rows)


if __name__ == "__main__":
    main()
