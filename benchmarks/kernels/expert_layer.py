"""What a layer of experts costs, forward and backward, beside the dense layer of equal active work
and beside everybody else's.

    python -m benchmarks.kernels.expert_layer        (CPU: float32, bfloat16; 1 and 2 threads)
    python -m benchmarks.kernels.expert_layer --device cuda
    python -m benchmarks.kernels.expert_layer --settings A --dtypes float32 --threads 1 \\
        --rounds 2 --seconds 0                       (a smoke test)

y = Σ g·relu(x W_up[e]) W_down[e] and gradients of x, both weights and the gates, over the settings
of expert_problem.py; who runs is listed in expert_peers.py. Contenders take turns in one process,
round by round, for a machine's speed drifts. Every single run gets a routing that has not been seen
before: dropless routing makes new row counts in every step, and libraries that compile a kernel per
row count look twice as good on a frozen one. Sorting is part of the time, choosing (the router) is
not.

The ceiling is the fastest dense MLP D → K·F → D that computes in full precision. "of ceiling" is
its fastest time ÷ the contender's fastest. Before anything is timed every contender's result and
all its gradients are held against the reference in float64; one that is wrong, or takes more than
--patience seconds, is not timed. Saved bytes are those of all storages that autograd keeps, weights
left out, beside the least that is needed (x, hidden rows, gates, sorted order and its inverse). A
contender stops when it has used its --seconds of a cell.

Writes results/expert_layer_cpu.json (or _gpu): figures of every cell. About 10 minutes on
2 cores.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.kernels.peers import Contender, Layer, Mode, contenders, exact_mode
from benchmarks.kernels.problem import (
    CPU_SETTINGS,
    GPU_SETTINGS,
    SKEW,
    Bank,
    Result,
    Setting,
    draw_bank,
    draw_choices,
    meaning,
    result_of,
)
from benchmarks.memory import peak_bytes, saved_bytes
from benchmarks.report import RESULTS, save
from moebius.distributed.process.host_memory import keep_freed_memory
from moebius.kernels.cpu import workspace
from moebius.kernels.cpu.onednn import EXACT, relative_error

TOLERANCES = {torch.float32: EXACT, torch.bfloat16: 2e-2}
FEWEST = 2  # rounds
WRONG = "wrong"
# What a backend says when a device, a dtype or a shape is not for it, or a package is not here.
CANNOT = (ValueError, RuntimeError, ImportError, NotImplementedError)


@dataclass
class Entry:
    """One contender in one setting and dtype: whether it is right, what it keeps, and its cells."""

    setting: str
    dtype: str
    name: str
    role: str
    mode: str
    work: float
    error: float | None = (
        None  # largest relative norm against the reference in float64; a dense layer has none
    )
    saved_bytes: int | None = None
    ideal_bytes: int | None = None
    saved_over_ideal: float | None = None  # relative difference
    peak_bytes: int | None = None
    first_ms: float | None = None  # of the pass that was checked
    why_not: str | None = None  # it cannot run here, is wrong, or takes too long
    cells: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """What was asked for."""

    device: torch.device
    settings: tuple[Setting, ...]
    dtypes: tuple[torch.dtype, ...]
    threads: tuple[int, ...]
    balanced: tuple[str, ...]  # settings that are timed under balanced routing as well
    rounds: int
    seconds: float
    patience_s: float
    deadline: float  # of time.monotonic(): no cell is begun after it
    only: str | None

    def skews(self, setting: Setting) -> list[float]:
        return [SKEW, 0.0] if setting.name in self.balanced else [SKEW]

    def cells(self) -> int:
        return len(self.dtypes) * sum(
            1 + len(self.threads) * len(self.skews(setting)) for setting in self.settings
        )


def main() -> None:
    options = parse()
    plan = make_plan(options)
    gc.freeze()  # what the imports left behind is not searched before every measurement of memory
    kept = plan.device.type == "cpu" and keep_freed_memory()
    onednn = relative_error()
    console, entries = Console(width=150), []
    name = f"expert_layer_{'gpu' if plan.device.type == 'cuda' else 'cpu'}" + options.suffix
    figures: dict[str, Any] = {
        "method": {
            "skew": SKEW,
            "routing": "drawn anew for every run of every contender",
            "freed_memory_is_kept": kept,
            "onednn_float32_error": onednn,
            "onednn_is_exact": onednn < EXACT,
            "seconds_per_contender_and_cell": plan.seconds,
            "most_rounds": plan.rounds,
            "threads_while_checking": max(plan.threads),
            "load_average": os.getloadavg(),
        },
        "settings": [setting_facts(setting) for setting in plan.settings],
        "entries": entries,
    }
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    written = None
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=plan.cells())
        for setting in plan.settings:
            meanings: Meanings = {}
            for dtype in plan.dtypes:
                modes = exact_modes(plan.device, dtype, onednn)
                found = measure(setting, dtype, plan, modes, meanings, Shown(progress, task))
                entries += [asdict(entry) for entry in found]
                written = save(
                    name, figures, folder=options.out
                )  # what there is, should a later setting fail
                console.print(table_of(f"{setting.name}, {name_of(dtype)}", found))
    print(written)
    if any(
        entry["role"] == "ours" and (entry["why_not"] or "").startswith(WRONG) for entry in entries
    ):
        raise SystemExit("one of ours is wrong: see the table")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--settings", nargs="+", help="by name; default: all of the device")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--threads", nargs="+", type=int, default=None, help="of a CPU; default: 1 and 2"
    )
    parser.add_argument(
        "--balanced",
        nargs="*",
        help="settings timed under balanced routing too; default: A, or 244M",
    )
    parser.add_argument("--rounds", type=int, default=12, help="at most")
    parser.add_argument(
        "--seconds", type=float, help="per contender and cell; default: 1, on a GPU 0.3"
    )
    parser.add_argument(
        "--patience", type=float, default=5.0, help="seconds of a pass beyond which nobody is timed"
    )
    parser.add_argument(
        "--limit", type=float, default=690.0, help="seconds after which no cell is begun"
    )
    parser.add_argument("--only", help="only contenders whose name contains this, and the ceiling")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--suffix", default="", help="of the files' names")
    return parser.parse_args()


def make_plan(options: argparse.Namespace) -> Plan:
    gpu = options.device == "cuda"
    known = {setting.name: setting for setting in (GPU_SETTINGS if gpu else CPU_SETTINGS)}
    unknown = set(options.settings or ()) - set(known)
    if unknown:
        raise SystemExit(
            f"no setting {', '.join(sorted(unknown))} on {options.device}: choose from "
            f"{', '.join(known)}"
        )
    names = options.dtypes or (["bfloat16", "float32"] if gpu else ["float32", "bfloat16"])
    return Plan(
        device=torch.device(options.device),
        settings=tuple(known[name] for name in options.settings or known),
        dtypes=tuple(getattr(torch, name) for name in names),
        threads=tuple(options.threads or ([1] if gpu else [1, 2])),
        balanced=tuple(["244M" if gpu else "A"] if options.balanced is None else options.balanced),
        rounds=options.rounds,
        seconds=(0.3 if gpu else 1.0) if options.seconds is None else options.seconds,
        patience_s=options.patience,
        deadline=time.monotonic() + options.limit,
        only=options.only,
    )


def exact_modes(device: torch.device, dtype: torch.dtype, onednn: float) -> tuple[Mode, ...]:
    """The libraries whose products are exact here."""
    both = device.type == "cpu" and dtype == torch.float32 and onednn < EXACT
    return ("default", "oneDNN") if both else ("default",)


@dataclass(frozen=True)
class Shown:
    """The bar in the terminal."""

    progress: Progress
    task: Any

    def step(self, what: str) -> None:
        self.progress.update(self.task, description=what)

    def done(self) -> None:
        self.progress.advance(self.task)


def measure(
    setting: Setting,
    dtype: torch.dtype,
    plan: Plan,
    modes: Sequence[Mode],
    meanings: "Meanings",
    shown: Shown,
) -> list[Entry]:
    """Checks all contenders of a setting and dtype, then times them in every cell."""
    torch.set_num_threads(max(plan.threads))
    generator = torch.Generator(plan.device).manual_seed(0)
    found = [
        (contender, new_entry(contender, setting, dtype))
        for contender in contenders(draw_bank(setting, dtype, generator), modes)
        if plan.only is None or contender.role == "ceiling" or plan.only in contender.name
    ]
    shown.step(f"{setting.name} {name_of(dtype)}: checking")
    if time.monotonic() > plan.deadline:
        for _, entry in found:
            entry.why_not = "not reached (--limit)"
        return [entry for _, entry in found]
    check(found, setting, dtype, plan, meanings)
    shown.done()
    bank = draw_bank(setting, dtype, generator)
    running = [Running(c, e, c.build(bank), bank) for c, e in found if e.why_not is None]
    for threads in plan.threads:
        torch.set_num_threads(threads)
        for skew in plan.skews(setting):
            shown.step(f"{setting.name} {name_of(dtype)}, {threads} threads, skew {skew:g}")
            if time.monotonic() < plan.deadline:
                time_cell(running, skew, threads, plan, generator)
            shown.done()
    return [entry for _, entry in found]


def new_entry(contender: Contender, setting: Setting, dtype: torch.dtype) -> Entry:
    return Entry(
        setting.name, name_of(dtype), contender.name, contender.role, contender.mode, contender.work
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Right, and how much memory -----------------------------------------------------------------------


Meanings = dict[
    str, Result
]  # by activation: the reference's output to the same data, whatever their dtype


def check(
    found: Sequence[tuple[Contender, Entry]],
    setting: Setting,
    dtype: torch.dtype,
    plan: Plan,
    meanings: Meanings,
) -> None:
    """The first pass of every contender: its peak memory, its saved bytes, its values."""
    generator = torch.Generator(plan.device).manual_seed(1)
    bank, choices = (
        draw_bank(setting, dtype, generator, exact=True),
        draw_choices(setting, SKEW, generator),
    )
    for contender, entry in found:
        try:
            layer = contender.build(bank)
            output = first_pass(layer, contender, entry, bank, choices)
        except CANNOT as error:
            entry.why_not = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            continue
        if contender.role in ("peer", "ours"):
            if contender.activation not in meanings:
                meanings[contender.activation] = expected(bank, choices, contender.activation)
            entry.error = output.error(meanings[contender.activation])
            if not entry.error <= TOLERANCES[dtype]:
                entry.why_not = f"{WRONG}: relative error {entry.error:.1e}"
        if (
            entry.why_not is None
            and entry.first_ms is not None
            and entry.first_ms > plan.patience_s * 1e3
        ):
            entry.why_not = f"not timed: one pass takes {entry.first_ms / 1e3:.0f} s"


def first_pass(
    layer: Layer, contender: Contender, entry: Entry, bank: Bank, choices: Sequence[Any]
) -> Result:
    out: list[Result] = []
    # Of SwiGLU experts the weights are laid out otherwise: their gradients are not compared.
    weights = layer.weights if contender.activation == "relu" else ()
    leaves = (bank.x_TD, *(choice.gates_THK for choice in choices), *weights)

    def both_passes() -> None:
        def forward() -> torch.Tensor:
            y, entry.saved_bytes = saved_bytes(
                lambda: layer(bank.x_TD, choices), beside=layer.weights
            )
            return y

        started = time.perf_counter()
        out.append(result_of(forward, bank.grad_TD, leaves))
        if bank.x_TD.is_cuda:
            torch.cuda.synchronize()
        entry.first_ms = (time.perf_counter() - started) * 1e3

    # A GPU's kernels are compiled in the first of two passes.
    for _ in range(2 if bank.x_TD.is_cuda else 1):
        clear(layer, bank, choices)
        vars(
            workspace._held
        ).clear()  # a backend's workspaces are its own peak, not what was there before
        with exact_mode(contender.mode):
            entry.peak_bytes = peak_bytes(both_passes, bank.x_TD.device)
    if contender.role in ("peer", "ours") and entry.saved_bytes is not None:
        entry.ideal_bytes = bank.setting.ideal_bytes(bank.x_TD.element_size())
        entry.saved_over_ideal = entry.saved_bytes / entry.ideal_bytes - 1
    return out[-1]


def expected(bank: Bank, choices: Sequence[Any], activation: str) -> Result:
    if activation == "relu":
        return meaning(bank, choices)
    twice = torch.cat((bank.w_up_EDF, bank.w_up_EDF), 2).detach().requires_grad_()
    gated = Bank(bank.setting, bank.x_TD, twice, bank.w_down_EFD, bank.grad_TD)
    return meaning(gated, choices, activation=activation)


def clear(layer: Layer, bank: Bank, choices: Sequence[Any]) -> None:
    for leaf in (bank.x_TD, *layer.weights, *(choice.gates_THK for choice in choices)):
        leaf.grad = None


# Time ---------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A contender that can run, and its times in the present cell."""

    contender: Contender
    entry: Entry
    layer: Layer
    bank: Bank
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def one(self, skew: float, generator: torch.Generator) -> tuple[float, float]:
        """Seconds and processor seconds of one forward and backward pass under a routing of its
        own.
        """
        choices = draw_choices(self.bank.setting, skew, generator)
        clear(self.layer, self.bank, choices)

        def passes() -> None:
            self.layer(self.bank.x_TD, choices).backward(self.bank.grad_TD)

        with exact_mode(self.contender.mode):
            return timed_on_gpu(passes) if self.bank.x_TD.is_cuda else timed(passes)


def timed(work: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def timed_on_gpu(work: Callable[[], None]) -> tuple[float, float]:
    """Between two events on the GPU: launches that the host makes in time cost nothing, those it
    makes too late do.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    cpu = time.process_time()
    torch.cuda._sleep(
        200_000
    )  # some 0.1 ms of cycles in which the host gets ahead, as it is in a training step
    start.record()
    work()
    end.record()
    cpu = time.process_time() - cpu
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3, cpu


def time_cell(
    running: Sequence[Running], skew: float, threads: int, plan: Plan, generator: torch.Generator
) -> None:
    """Rounds in turns, until everyone has had its time."""
    for one in running:
        one.wall_s, one.cpu_s = [], []
        if one.bank.x_TD.is_cuda:
            one.one(skew, generator)  # kernels are compiled and memory is there
    for number in range(plan.rounds):
        for one in running:
            if number >= FEWEST and sum(one.wall_s) > plan.seconds:
                continue
            wall, cpu = one.one(skew, generator)
            one.wall_s.append(wall)
            one.cpu_s.append(cpu)
    ceilings = [one for one in running if one.contender.role == "ceiling"]
    for one in running:
        one.entry.cells.append(figures_of(one, ceilings) | {"threads": threads, "skew": skew})


def figures_of(one: Running, ceilings: Sequence[Running]) -> dict[str, Any]:
    """`of_ceiling` is of the fastest runs; by processor time is what to read on a busy machine, at
    one thread.
    """
    setting, work = one.bank.setting, one.contender.work
    ceiling = min(min(other.wall_s) for other in ceilings)
    ceiling_median = min(statistics.median(other.wall_s) for other in ceilings)
    ceiling_cpu = min(min(other.cpu_s) for other in ceilings)
    fastest, median = min(one.wall_s), statistics.median(one.wall_s)
    flop = setting.flop * work
    if one.contender.role == "dense" and setting.d_dense is not None:
        flop = setting.flop * setting.d_dense / setting.active_width
    return {
        "rounds": len(one.wall_s),
        "ms": median * 1e3,
        "fastest_ms": fastest * 1e3,
        "cpu_ms": statistics.median(one.cpu_s) * 1e3,
        "fastest_cpu_ms": min(one.cpu_s) * 1e3,
        "gflop_per_s": flop / fastest / 1e9,
        "of_ceiling": ceiling * work / fastest,
        "of_ceiling_by_medians": ceiling_median * work / median,
        "of_ceiling_by_cpu_time": None
        if one.bank.x_TD.is_cuda
        else ceiling_cpu * work / min(one.cpu_s),
    }


# Report -------------------------------------------------------------------------------------------


def setting_facts(setting: Setting) -> dict[str, Any]:
    return asdict(setting) | {"gflop": setting.flop / 1e9, "active_width": setting.active_width}


def table_of(title: str, entries: Sequence[Entry]) -> Table:
    cells = sorted(
        {(c["threads"], c["skew"]) for entry in entries for c in entry.cells},
        key=lambda c: (c[0], -c[1]),
    )
    heads = [f"{threads} thr, {'skewed' if skew else 'balanced'}" for threads, skew in cells] or [
        "time"
    ]
    table = Table(
        "",
        "error",
        "saved MiB",
        "over ideal",
        "peak MiB",
        *heads,
        title=f"{title}: ms, GFLOP/s, of ceiling",
    )
    for entry in entries:
        style = {"ours": "bold green", "ceiling": "yellow", "dense": "cyan"}.get(entry.role, "")
        label = entry.name if entry.mode == "default" else f"{entry.name} ({entry.mode})"
        over = "" if entry.saved_over_ideal is None else f"{entry.saved_over_ideal:+.1%}"
        error = "" if entry.error is None else f"{entry.error:.0e}"
        times = [cell_text(entry, *cell) for cell in cells or [(0, 0.0)]]
        table.add_row(
            label, error, mib(entry.saved_bytes), over, mib(entry.peak_bytes), *times, style=style
        )
    return table


def cell_text(entry: Entry, threads: int, skew: float) -> str:
    for cell in entry.cells:
        if (cell["threads"], cell["skew"]) == (threads, skew):
            return (
                f"{cell['fastest_ms']:.4g} ms {cell['gflop_per_s']:,.0f} {cell['of_ceiling']:.2f}"
            )
    return (entry.why_not or "not reached")[:60]


def mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:,.0f}"


if __name__ == "__main__":
    main()
