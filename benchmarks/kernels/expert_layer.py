"""Compares an expert layer, forward and backward, with the dense layer of equal active work.

    python -m benchmarks.kernels.expert_layer        (CPU: float32, bfloat16; 1 and 2 threads)
    python -m benchmarks.kernels.expert_layer --device cuda
    python -m benchmarks.kernels.expert_layer --settings A --dtypes float32 --threads 1 \
        --rounds 2 --seconds 0                       (a smoke test)

It computes y = Σ g·relu(x W_up[e]) W_down[e] and the gradients of x, both weights and the gates,
for the settings and contenders of layers.py. Contenders alternate in one process, round by round,
because a machine's speed drifts. Every run gets new routing: dropless routing changes row counts in
every step, and libraries that compile a kernel per row count look twice as fast on frozen routing.
Sorting is part of the time, choosing (the router) is not.

The ceiling is the fastest dense MLP D → K·F → D in full precision. "of ceiling" is its fastest time
÷ the contender's fastest. Before timing, every contender's result and gradients are compared with
the reference in float64; one that is wrong, or takes more than 5 seconds, is not timed. Saved bytes
are those of all storages that autograd keeps, without weights, beside the minimum (x, hidden rows,
gates, sorted order and its inverse). A contender stops after its --seconds of a cell.

Writes results/expert_layer_cpu.json (or _gpu). Takes about 10 minutes on 2 cores.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.layers import (
    CPU_SETTINGS,
    GPU_SETTINGS,
    SKEW,
    Bank,
    Contender,
    Layer,
    Mode,
    Result,
    Setting,
    contenders,
    draw_bank,
    draw_choices,
    exact_mode,
    meaning,
    onednn_error,
    result_of,
)
from benchmarks.memory import peak_bytes, saved_bytes
from benchmarks.report import RESULTS, save
from moebius.distributed.process.process import keep_freed_memory
from moebius.kernels.cpu import library
from moebius.kernels.cpu.brgemm import EXACT

TOLERANCES = {torch.float32: EXACT, torch.bfloat16: 2e-2}
FEWEST = 2  # rounds
PATIENCE_S = 5.0  # of a pass beyond which nobody is timed
WRONG = "wrong"
# What a backend says when a device, a dtype or a shape is not for it, or a package is not here.
CANNOT = (ValueError, RuntimeError, ImportError, NotImplementedError)


@dataclass
class Entry:
    """Holds one contender in one setting and dtype: correctness, saved memory, and times."""

    setting: str
    dtype: str
    name: str
    role: str
    mode: str
    error: float | None = None  # largest relative norm against the reference; of experts
    saved_bytes: int | None = None
    saved_over_ideal: float | None = None  # relative difference
    peak_bytes: int | None = None
    first_ms: float | None = None  # of the pass that was checked
    why_not: str | None = None  # it cannot run here, is wrong, or takes too long
    cells: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """Holds the requested measurements."""

    device: torch.device
    settings: tuple[Setting, ...]
    dtypes: tuple[torch.dtype, ...]
    threads: tuple[int, ...]
    rounds: int
    seconds: float
    deadline: float  # of time.monotonic(): no cell is begun after it


def main() -> None:
    options = parse()
    plan = make_plan(options)
    gc.freeze()  # what the imports left behind is not searched before every measurement of memory
    kept = plan.device.type == "cpu" and keep_freed_memory()
    onednn, console, entries = onednn_error(), Console(width=150), list[dict[str, Any]]()
    name = f"expert_layer_{'gpu' if plan.device.type == 'cuda' else 'cpu'}"
    figures: dict[str, Any] = {
        "method": {
            "skew": SKEW,
            "routing": "drawn anew for every run of every contender",
            "freed_memory_is_kept": kept,
            "onednn_float32_error": onednn,
            "seconds_per_contender_and_cell": plan.seconds,
            "most_rounds": plan.rounds,
            "load_average": os.getloadavg(),
        },
        "settings": [asdict(setting) for setting in plan.settings],
        "entries": entries,
    }
    for setting in plan.settings:
        for dtype in plan.dtypes:
            found = measure(setting, dtype, plan, exact_modes(plan.device, dtype, onednn))
            entries += [asdict(entry) for entry in found]
            # what there is, should a later setting fail
            written = save(name, figures, folder=options.out)
            console.print(table_of(f"{setting.name}, {name_of(dtype)}", found))
            console.print(written)
    if any(e["role"] == "ours" and (e["why_not"] or "").startswith(WRONG) for e in entries):
        raise SystemExit("one of ours is wrong: see the table")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--settings", nargs="+", help="by name; default: all of the device")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, help="of a CPU; default: 1 and 2")
    parser.add_argument("--rounds", type=int, default=12, help="at most")
    parser.add_argument("--seconds", type=float, help="of a contender and cell; 1, on a GPU 0.3")
    parser.add_argument("--limit", type=float, default=690.0, help="no cell is begun after it")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def make_plan(options: argparse.Namespace) -> Plan:
    """Returns the requested measurements, with the device's defaults."""
    gpu = options.device == "cuda"
    known = {setting.name: setting for setting in (GPU_SETTINGS if gpu else CPU_SETTINGS)}
    if unknown := set(options.settings or ()) - set(known):
        raise SystemExit(f"no setting {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    names = options.dtypes or (["bfloat16", "float32"] if gpu else ["float32", "bfloat16"])
    return Plan(
        device=torch.device(options.device),
        settings=tuple(known[name] for name in options.settings or known),
        dtypes=tuple(getattr(torch, name) for name in names),
        threads=tuple(options.threads or ([1] if gpu else [1, 2])),
        rounds=options.rounds,
        seconds=(0.3 if gpu else 1.0) if options.seconds is None else options.seconds,
        deadline=time.monotonic() + options.limit,
    )


def exact_modes(device: torch.device, dtype: torch.dtype, onednn: float) -> tuple[Mode, ...]:
    """Returns the libraries whose products are exact on this machine."""
    both = device.type == "cpu" and dtype == torch.float32 and onednn < EXACT
    return ("default", "oneDNN") if both else ("default",)


def measure(setting: Setting, dtype: torch.dtype, plan: Plan, modes: Sequence[Mode]) -> list[Entry]:
    """Checks all contenders of a setting and dtype, then times them in every cell."""
    torch.set_num_threads(max(plan.threads))
    generator = torch.Generator(plan.device).manual_seed(0)
    bank = draw_bank(setting, dtype, generator)
    found = [
        (each, Entry(setting.name, name_of(dtype), each.name, each.role, each.mode))
        for each in contenders(bank, modes)
    ]
    if time.monotonic() > plan.deadline:
        for _, entry in found:
            entry.why_not = "not reached (--limit)"
        return [entry for _, entry in found]
    check(found, setting, dtype, plan)
    running = [Running(c, e, c.build(bank), bank) for c, e in found if e.why_not is None]
    for threads in plan.threads:
        torch.set_num_threads(threads)
        if time.monotonic() < plan.deadline:
            time_cell(running, threads, plan, generator)
    return [entry for _, entry in found]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Right, and how much memory -----------------------------------------------------------------------


def check(
    found: Sequence[tuple[Contender, Entry]], setting: Setting, dtype: torch.dtype, plan: Plan
) -> None:
    """Runs every contender's first pass for its peak memory, saved bytes and values."""
    generator = torch.Generator(plan.device).manual_seed(1)
    bank = draw_bank(setting, dtype, generator, exact=True)
    choices = draw_choices(setting, SKEW, generator)
    expected = meaning(bank, choices)
    for contender, entry in found:
        try:
            output = first_pass(contender, entry, bank, choices)
        except CANNOT as error:
            entry.why_not = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            continue
        if contender.role in ("peer", "ours"):
            entry.error = output.error(expected)
            if not entry.error <= TOLERANCES[dtype]:
                entry.why_not = f"{WRONG}: relative error {entry.error:.1e}"
        if entry.why_not is None and (entry.first_ms or 0.0) > PATIENCE_S * 1e3:
            entry.why_not = f"not timed: one pass takes {entry.first_ms:.0f} ms"


def first_pass(contender: Contender, entry: Entry, bank: Bank, choices: Sequence[Any]) -> Result:
    """Runs forward and backward once, and records the cost."""
    layer, out = contender.build(bank), list[Result]()
    leaves = (bank.x_TD, *(choice.gates_THK for choice in choices), *layer.weights)

    def forward() -> torch.Tensor:
        y, entry.saved_bytes = saved_bytes(lambda: layer(bank.x_TD, choices), beside=layer.weights)
        return y

    def both_passes() -> None:
        started = time.perf_counter()
        out.append(result_of(forward, bank.grad_TD, leaves))
        if bank.x_TD.is_cuda:
            torch.cuda.synchronize()
        entry.first_ms = (time.perf_counter() - started) * 1e3

    # A GPU's kernels are compiled in the first of two passes.
    for _ in range(2 if bank.x_TD.is_cuda else 1):
        clear(leaves)
        vars(library._held).clear()  # a backend's workspaces are its own peak
        with exact_mode(contender.mode):
            entry.peak_bytes = peak_bytes(both_passes, bank.x_TD.device)
    if contender.role in ("peer", "ours") and entry.saved_bytes is not None:
        ideal = bank.setting.ideal_bytes(bank.x_TD.element_size())
        entry.saved_over_ideal = entry.saved_bytes / ideal - 1
    return out[-1]


def clear(leaves: Sequence[torch.Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


# Time ---------------------------------------------------------------------------------------------


@dataclass
class Running:
    """Holds a runnable contender and its times in the present cell."""

    contender: Contender
    entry: Entry
    layer: Layer
    bank: Bank
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def one(self, generator: torch.Generator) -> tuple[float, float]:
        """Returns seconds and processor seconds of a forward and backward pass with new routing."""
        choices = draw_choices(self.bank.setting, SKEW, generator)
        clear((self.bank.x_TD, *self.layer.weights))

        def passes() -> None:
            self.layer(self.bank.x_TD, choices).backward(self.bank.grad_TD)

        with exact_mode(self.contender.mode):
            return timed_on_gpu(passes) if self.bank.x_TD.is_cuda else timed(passes)


def timed(work: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def timed_on_gpu(work: Callable[[], None]) -> tuple[float, float]:
    """Measures between two GPU events: host launches cost nothing if in time, and count if late."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    cpu = time.process_time()
    torch.cuda._sleep(200_000)  # some 0.1 ms in which the host gets ahead, as in a training step
    start.record()
    work()
    end.record()
    cpu = time.process_time() - cpu
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, cpu


def time_cell(
    running: Sequence[Running], threads: int, plan: Plan, generator: torch.Generator
) -> None:
    """Runs rounds in turns until every contender has had its time."""
    for one in running:
        one.wall_s, one.cpu_s = [], []
        if one.bank.x_TD.is_cuda:
            one.one(generator)  # kernels are compiled and memory is there
    for number in range(plan.rounds):
        for one in running:
            if number >= FEWEST and sum(one.wall_s) > plan.seconds:
                continue
            wall, cpu = one.one(generator)
            one.wall_s.append(wall)
            one.cpu_s.append(cpu)
    ceilings = [one for one in running if one.contender.role == "ceiling"]
    wall = min(min(one.wall_s) for one in ceilings)
    cpu = min(min(one.cpu_s) for one in ceilings)
    for one in running:
        cell = {
            "threads": threads,
            "rounds": len(one.wall_s),
            "fastest_ms": min(one.wall_s) * 1e3,
            "fastest_cpu_ms": min(one.cpu_s) * 1e3,
            "of_ceiling": wall / min(one.wall_s),
            # what to read on a busy machine, at one thread
            "of_ceiling_by_cpu_time": None if one.bank.x_TD.is_cuda else cpu / min(one.cpu_s),
        }
        one.entry.cells.append(cell)


# Report -------------------------------------------------------------------------------------------


def table_of(title: str, entries: Sequence[Entry]) -> Table:
    threads = sorted({cell["threads"] for entry in entries for cell in entry.cells})
    heads = [f"{number} threads: ms, of ceiling" for number in threads] or ["time"]
    table = Table("", "error", "saved MiB", "over ideal", "peak MiB", *heads, title=title)
    for entry in entries:
        style = {"ours": "bold green", "ceiling": "yellow", "dense": "cyan"}.get(entry.role, "")
        label = entry.name if entry.mode == "default" else f"{entry.name} ({entry.mode})"
        times = [f"{c['fastest_ms']:.4g} {c['of_ceiling']:.2f}" for c in entry.cells]
        table.add_row(
            label,
            "" if entry.error is None else f"{entry.error:.0e}",
            mib(entry.saved_bytes),
            "" if entry.saved_over_ideal is None else f"{entry.saved_over_ideal:+.1%}",
            mib(entry.peak_bytes),
            *(times or [(entry.why_not or "not reached")[:60]]),
            style=style,
        )
    return table


def mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:,.0f}"


if __name__ == "__main__":
    main()
