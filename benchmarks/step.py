"""Compares a MoEUT's training step with that of the dense model of equal parameters.

    python -m benchmarks.step                    (44M, sequences of 256, batches of 8, on CPU)
    python -m benchmarks.step --device cuda      (44M and 244M, sequences of 1,024)
    python -m benchmarks.step --threads 2 --precision bfloat16 --pairs 2 --no-compile
    python -m benchmarks.step --device cuda --sizes 244m --no-compile --pairs 8 --limit 300 \
        --beside without_norm without_rotary without_router   (what each fused kernel gains)

The step is that of train/loop.py: forward, loss, backward, clipping, AdamW, with new random tokens
in every step. Each side first tries its options: every backend of its experts; float32 products
through oneDNN, if exact; its best option so far with compiled dense parts. The fastest of each then
alternate in one process, so that a machine's drift affects both; the ratio is the median over
pairs, with its quartiles. Every number of threads and precision has its own process. Memory is a
step's need on top of weights and moments: activations, gradients, workspaces. What does not fit
into the time is skipped and reported. An option that fails is reported with its reason; one that
takes the process with it (an illegal access of a GPU's kernel) is left out of a second process.

Models named by --beside take turns with the two, as the fastest way of theirs: the dense model with
its columns rounded up to a width that a GPU multiplies fast ("dense_aligned", by default on a GPU),
and MoEUT with PyTorch operations instead of one of Triton's fused kernels. A kernel that gains less
than 3 % of a step is not worth its lines. Whether passes were captured as CUDA graphs is recorded.

Writes results/step_cpu.json (or step_gpu.json) as figures come. Takes about 10 minutes on 2 cores.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.attempt import UNFINISHED, is_broken, reason_of, require_gpu
from benchmarks.kernels.layers import Mode, exact_mode, onednn_error, whole_rows
from benchmarks.memory import peak_bytes
from benchmarks.report import RESULTS, ROOT, save, write_json
from moebius.data_pipeline.read.loader import Batch
from moebius.distributed.process.process import Process, start_process
from moebius.kernels.backend import BACKENDS
from moebius.kernels.cpu.brgemm import EXACT
from moebius.train.config.resolve import resolve
from moebius.train.loop import step
from moebius.train.recipes.smoke import RECIPES
from moebius.train.run import Run, assemble

SIDES = ("moeut", "dense")
ALIGNED = "dense_aligned"
# Who asks whether a fused kernel supports its rows; "no" makes it take PyTorch operations.
FUSED = {
    "without_norm": "moebius.model.block.runs_fused",
    "without_rotary": "moebius.model.layers.runs_fused",
    "without_router": "moebius.model.routers.router.can_route",
}
BESIDE = (ALIGNED, *FUSED)
RATE = 1e-4
POLL_S = 0.5  # how often a case's figures are copied into the results


@dataclass(frozen=True)
class Case:
    """Describes what one process compares."""

    size: str  # of the published recipes: "44m" is moeut_44m against dense_44m
    device: Literal["cpu", "cuda"]
    precision: str
    threads: int
    seq_len: int
    batch: int
    trials: int  # steps of every way that is tried
    pairs: int  # of steps in turns
    compiles: bool
    seconds: float  # for all of it: ways and pairs that come too late are left out
    beside: Sequence[str] = ()  # of `BESIDE`

    @property
    def tokens(self) -> int:
        return self.seq_len * self.batch


@dataclass(frozen=True)
class Way:
    """Holds settings that one side can run with."""

    backend: str = "auto"
    compiled: bool = False
    products: Mode = (
        "default"  # of float32 on a CPU: torch's default library, or oneDNN where that is exact
    )


Best = tuple[Run, Way]  # ready to continue
NextWay = Callable[[Way], Way]  # from the best so far


def main() -> None:
    options = parse()
    if options.case is not None:
        compare(Case(**json.loads(options.case)), options.case_out)
        return
    if options.device == "cuda":
        require_gpu()
    found: list[dict[str, Any]] = []
    name = f"step_{'gpu' if options.device == 'cuda' else 'cpu'}{options.suffix}"
    figures, written = {"load_average": os.getloadavg(), "cases": found}, None
    deadline, cases = time.monotonic() + options.limit, cases_of(options)
    for number, case in enumerate(cases):
        share, after = (
            (deadline - time.monotonic()) / (len(cases) - number),
            len(cases) - number - 1,
        )
        case = replace(case, seconds=share)
        print(f"{case.size}, {case.precision}, {case.threads} thread(s)", flush=True)
        found.append({})
        # one that hangs leaves half a share to each of the others
        for present in in_own_process(case, deadline - after * share / 2):
            found[-1] = asdict(case) | present
            written = save(name, figures, folder=options.out)
    show(Console(width=120), found)
    print(written)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sizes", nargs="+", help="default: 44m; on a GPU 44m and 244m")
    parser.add_argument("--precision", nargs="+", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, help="of a CPU; default: 1 and 2")
    parser.add_argument("--seq-len", type=int, help="default: 256; on a GPU 1024")
    parser.add_argument("--batch", type=int, help="sequences; default: 8; on a GPU 16")
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--pairs", type=int, help="default: 5; on a GPU 20")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--beside", nargs="*", choices=BESIDE, help=f"default: none; on a GPU {ALIGNED}"
    )
    parser.add_argument(
        "--limit", type=float, default=660.0, help="seconds for all cases, shared evenly"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--suffix", default="", help="of the files' names")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one case, in a process of its own
    parser.add_argument("--case-out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def cases_of(options: argparse.Namespace) -> list[Case]:
    gpu = options.device == "cuda"
    return [
        Case(
            size=size,
            device=options.device,
            precision=precision,
            threads=threads,
            seq_len=options.seq_len or (1024 if gpu else 256),
            batch=options.batch or (16 if gpu else 8),
            trials=options.trials,
            pairs=options.pairs or (20 if gpu else 5),
            compiles=not options.no_compile,
            seconds=options.limit,
            beside=options.beside if options.beside is not None else [ALIGNED] * gpu,
        )
        for size in options.sizes or (["244m", "44m"] if gpu else ["44m"])
        for precision in options.precision or (["bfloat16"] if gpu else ["float32", "bfloat16"])
        for threads in options.threads or ([1] if gpu else [2, 1])
    ]


def in_own_process(case: Case, deadline: float) -> Iterator[dict[str, Any]]:
    """Yields the case's figures as they come, and why they are incomplete.

    A process that died of one option is followed by another without it.
    """
    num_fatal, why_not = -1, "no time left (--limit)"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "case.json"
        while time.monotonic() < deadline and num_fatal < len(fatal_in(out)):
            num_fatal = len(fatal_in(out))
            with process_of(case, out) as process:
                while (code := code_of(process)) is None and time.monotonic() < deadline:
                    yield figures_in(out)
            if code == 0:
                yield figures_in(out)
                return
            errors = out.with_suffix(".err").read_text(encoding="utf-8", errors="replace")
            why_not = "stopped (--limit)" if code is None else f"exit code {code}: {errors[-2000:]}"
        yield figures_in(out) | {"why_not": why_not}


def figures_in(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def fatal_in(path: Path) -> list[dict[str, Any]]:
    """Returns the options that took their process with them."""
    sides = figures_in(path).get("sides", {}).values()
    return [entry for side in sides for entry in side["tried"] if entry.get("is_fatal")]


@contextmanager
def process_of(case: Case, out: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a case in a process that ends with the context; its errors go beside `out`."""
    words = ["--case", json.dumps(asdict(case)), "--case-out", str(out)]
    with out.with_suffix(".err").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.step", *words],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": str(case.threads)},
            stdin=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def code_of(process: subprocess.Popen[bytes]) -> int | None:
    """Waits a moment; returns the exit code, or None while the process runs."""
    try:
        return process.wait(timeout=POLL_S)
    except subprocess.TimeoutExpired:
        return None


# One case -----------------------------------------------------------------------------------------


def compare(case: Case, out: Path) -> None:
    """Compares both sides, and writes the figures to a file as they come.

    What was fatal to an earlier process, by the file, is not tried again.
    """
    torch.set_num_threads(case.threads)
    fatal, clock = fatal_in(out), Clock(case.seconds)
    found: dict[str, Any] = {"sides": {}}
    for side in (*SIDES, *case.beside):
        found["sides"][side] = {"tried": [entry for entry in fatal if entry["side"] == side]}
    keep = partial(write_json, out, found)
    with (
        start_process(case.device, timeout_s=600) as process,
        tempfile.TemporaryDirectory() as folder,
    ):
        runs: dict[str, Best] = {}
        for side in found["sides"]:
            until = {"moeut": 0.45}.get(side, 0.65)
            bench = Bench(case, side, process, Path(folder), found["sides"][side]["tried"], keep)
            best = bench.best_run(clock, until, ways_of(case, side, runs))
            if best is not None:
                runs[side], found["sides"][side]["best"] = best, asdict(best[1])
        for figures in by_turns(case, runs, clock):
            found |= figures
            keep()
        if "ratio" in found:
            low, high = found["quartiles"]
            print(f"  MoEUT ÷ dense: {found['ratio']:.2f} ({low:.2f}, {high:.2f})", flush=True)
            print(*(f"  {name}: {found['ratios'][name]:.3f}" for name in found["ratios"]), sep="\n")
        for side, (run, way) in runs.items():
            run.optimizer.zero_grad()
            one = found["sides"][side]
            one["state_bytes"] = state_bytes(run)
            one["is_captured"] = getattr(run, "graph", None) is not None
            with exact_mode(way.products), without(side):
                one["step_peak_bytes"] = peak_bytes(
                    lambda run=run: step(run, new_batch(case, run), RATE), process.device
                )
            keep()


class Clock:
    """Measures how much of a case's time has passed."""

    def __init__(self, seconds: float) -> None:
        self._started, self._seconds = time.monotonic(), seconds

    def is_before(self, part: float) -> bool:
        """Tells whether less than that share of the time has passed."""
        return time.monotonic() - self._started < part * self._seconds


@dataclass(frozen=True)
class Bench:
    """Tries a side's options."""

    case: Case
    side: str
    process: Process
    folder: Path
    tried: list[dict[str, Any]]
    keep: Callable[[], Any]  # writes `tried` down

    def best_run(self, clock: Clock, until: float, ways: Iterable[NextWay]) -> Best | None:
        """Returns the fastest option, ready to continue; None if none runs.

        After that share of the time no further one is tried.
        """
        best: tuple[float, Run, Way] | None = None
        for next_way in ways:
            way = next_way(Way() if best is None else best[2])
            entry: dict[str, Any] = asdict(way)
            if any(entry.items() <= known.items() for known in self.tried):
                continue
            entry["side"] = self.side
            self.tried.append(entry)
            if best is not None and not clock.is_before(until):
                entry["why_not"] = "no time left (--limit)"
                continue
            run = self._attempt(way, entry)
            print(f"  {self.side}, {way_text(asdict(way))}: {outcome(entry)}", flush=True)
            if run is not None and (best is None or min(entry["seconds"]) < best[0]):
                best = (min(entry["seconds"]), run, way)
            del run
            gc.collect()
        return None if best is None else best[1:]

    def _attempt(self, way: Way, entry: dict[str, Any]) -> Run | None:
        """Times some steps, or records why that is not possible; a process that dies is recorded."""
        entry |= {"why_not": UNFINISHED, "is_fatal": True}
        self.keep()
        run_dir = self.folder / f"{self.side}_{len(self.tried)}"
        try:
            run = build(self.case, self.side, way, self.process, run_dir)
            with without(self.side):
                entry["first_s"] = timed_step(self.case, run, way)
                steps = range(self.case.trials)
                entry["seconds"] = [timed_step(self.case, run, way) for _ in steps]
            del entry["why_not"]
        except Exception as error:
            entry["why_not"], run = reason_of(error), None
            if is_broken():
                self.keep()
                raise
        del entry["is_fatal"]
        self.keep()
        return run


def outcome(entry: dict[str, Any]) -> str:
    return entry.get("why_not") or f"{min(entry['seconds']):.4g} s, first {entry['first_s']:.4g} s"


# The fastest on a GPU come first: when the time is over, the others are left out.
GPU_ORDER = ("triton", "grouped_mm", "megablocks", "segments")


def ways_of(case: Case, side: str, runs: Mapping[str, Best]) -> Iterator[NextWay]:
    """Yields what to try next, given the best so far; a model beside takes the way of its side."""
    if side not in SIDES:
        yield from (lambda _: runs[base_of(side)][1] for _ in {base_of(side)} & {*runs})
        return
    names = BACKENDS if case.device == "cpu" else GPU_ORDER
    backends = [name for name in names if name != "reference"] if side == "moeut" else ["auto"]
    for name in backends:
        yield lambda _, name=name: Way(name)
    if case.device == "cpu" and case.precision == "float32" and onednn_error() < EXACT:
        yield lambda best: replace(best, products="oneDNN")
    if case.compiles:
        yield lambda best: replace(best, compiled=True)


def base_of(side: str) -> str:
    """Returns the side whose model and way another one has."""
    return "dense" if side in ("dense", ALIGNED) else "moeut"


@contextmanager
def without(side: str) -> Iterator[None]:
    """Makes a side that goes without a fused kernel take PyTorch operations instead."""
    with patch(FUSED[side], lambda *_, **__: False) if side in FUSED else nullcontext():
        yield


def build(case: Case, side: str, way: Way, process: Process, run_dir: Path) -> Run:
    run_dir.mkdir()
    name, changed = f"{base_of(side)}_{case.size}", list[str]()
    if side == ALIGNED:
        width = RECIPES[name]().model.feed_forward.d_feed_forward
        changed = [f"model.feed_forward.d_feed_forward={whole_rows(width)}"]
    config = resolve(
        name,
        [
            f"data.seq_len={case.seq_len}",
            f"train.global_batch={case.batch}",
            f"train.micro_batch={case.batch}",
            f"train.precision={case.precision}",
            f"train.compile={str(way.compiled).lower()}",
            f"train.threads={case.threads}",
            f"kernels.backend={way.backend}",
            *changed,
        ],
        RECIPES,
    )
    return assemble(config, run_dir, process)


def new_batch(case: Case, run: Run) -> Batch:
    """Returns random tokens, different in every step, and so is the routing."""
    shape = (1, case.batch, case.seq_len + 1)
    seed = torch.Generator().manual_seed(run.progress.step)
    return Batch(
        torch.randint(run.config.model.vocab_size, shape, generator=seed).numpy(),
        0,
        0,
        equal_shapes=True,
    )


def timed_step(case: Case, run: Run, way: Way) -> float:
    batch = new_batch(case, run)
    with exact_mode(way.products):
        wait_for(run.process.device)
        started = time.perf_counter()
        step(run, batch, RATE)
        wait_for(run.process.device)
        return time.perf_counter() - started


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def by_turns(case: Case, runs: dict[str, Best], clock: Clock) -> Iterator[dict[str, Any]]:
    """Alternates steps of both sides, at least two of each; yields the figures after every pair."""
    times: dict[str, list[float]] = {side: [] for side in runs}
    for number in range(case.pairs):
        if number >= 2 and not clock.is_before(0.85):
            break
        for side, (run, way) in runs.items():
            with without(side):
                times[side].append(timed_step(case, run, way))
        yield summary(case, times)


def summary(case: Case, times: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the figures of these steps, of both sides their ratio, and those of models beside."""
    medians = {side: statistics.median(own) for side, own in times.items()}
    found = {
        "seconds": medians,
        "fastest_s": {side: min(own) for side, own in times.items()},
        "tokens_per_s": {side: case.tokens / median for side, median in medians.items()},
        "all_s": times,
    }
    if not set(SIDES) <= set(times):
        return found
    ratios = ratios_of(times["moeut"], times["dense"])
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    beside = {f"{side} ÷ moeut": (side, "moeut") for side in times if side in FUSED}
    if ALIGNED in times:
        beside[f"moeut ÷ {ALIGNED}"] = ("moeut", ALIGNED)
    return found | {
        "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "ratio_of_fastest": min(times["moeut"]) / min(times["dense"]),
        "ratios": {
            name: statistics.median(ratios_of(times[ours], times[theirs]))
            for name, (ours, theirs) in beside.items()
        },
    }


def ratios_of(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def state_bytes(run: Run) -> int:
    """Returns the bytes of weights and moments."""
    moments = [
        value
        for state in run.optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*run.parameters, *moments))


# Report -------------------------------------------------------------------------------------------


def show(console: Console, cases: Sequence[dict[str, Any]]) -> None:
    table = Table(
        "size",
        "precision",
        "threads",
        "MoEUT s",
        "dense s",
        "ratio (quartiles)",
        "MoEUT tokens/s",
        "peak MiB, MoEUT",
        "dense",
        "MoEUT's best",
        box=None,
    )
    for case in cases:
        head = (case["size"], case["precision"], str(case["threads"]))
        if "ratio" not in case:
            table.add_row(*head, case.get("why_not", f"only: {case.get('seconds')}")[-200:])
            continue
        low, high = case["quartiles"]
        peaks = [mib(case["sides"][side].get("step_peak_bytes")) for side in SIDES]
        best = case["sides"]["moeut"]["best"]
        table.add_row(
            *head,
            *(f"{case['seconds'][side]:.4g}" for side in SIDES),
            f"{case['ratio']:.2f} ({low:.2f}, {high:.2f})",
            f"{case['tokens_per_s']['moeut']:,.0f}",
            *peaks,
            way_text(best),
        )
    console.print(table)


def way_text(way: dict[str, Any]) -> str:
    mode = "" if way["products"] == "default" else f", {way['products']}"
    return f"{way['backend']}{mode}{', compiled' * way['compiled']}"


def mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:,.0f}"


if __name__ == "__main__":
    main()
