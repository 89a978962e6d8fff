"""Compares an expert layer, forward and backward, with the dense layer of equal active work.

    python -m benchmarks.kernels.expert_layer        (CPU: float32, bfloat16; 1 and 2 threads)
    python -m benchmarks.kernels.expert_layer --device cuda
    python -m benchmarks.kernels.expert_layer --settings A --dtypes float32 --threads 1 \
        --rounds 2 --seconds 0                       (a smoke test)
    python -m benchmarks.kernels.expert_layer --settings Qwen3 \
        --dtypes bfloat16                            (beside transformers' experts; 9 GB, float32 16)

It computes y = Σ g·a(x W_up[e]) W_down[e] and the gradients of x, both weights and the gates, for
the settings and contenders of layers.py. Contenders alternate in one process, round by round,
because a machine's speed drifts. Every run gets new routing: dropless routing changes row counts in
every step, and libraries that compile a kernel per row count look twice as fast on frozen routing.
Sorting is part of the time, choosing (the router) is not.

The ceiling is the fastest dense MLP D → K·F → D in full precision. "of ceiling" is its fastest time
÷ the contender's fastest. Before timing, every contender's result and gradients are compared with
the reference in float64; one that is wrong, or takes more than 10 seconds, is not timed. Saved bytes
are those of all storages that autograd keeps, without weights, beside the minimum (x, hidden rows,
gates, sorted order and its inverse). A contender stops after its --seconds of a cell. "in a step" is
timed as a step runs it: nine calls that share the bank, and the time is a ninth. Alone, the others'
times include zeroed buffers and copies into the leaves' gradients, which a step does not make.

On a GPU times are those between two events, and the device sleeps until the host has launched all of
a pass. "late" counts passes in which it woke up too early, so that launches may be part of their
time; fastest_cpu_ms is what the host needs for launching.

Every entry is written to results/expert_layer_cpu.json (or _gpu) as it comes, also why a contender
failed. Takes about 10 minutes on 2 cores.
"""

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.attempt import (
    UNFINISHED,
    Broken,
    is_broken,
    reason_of,
    require_gpu,
    restart,
)
from benchmarks.kernels.layers import (
    CPU_SETTINGS,
    GPU_SETTINGS,
    SKEW,
    Bank,
    Choice,
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
    run_calls,
)
from benchmarks.memory import peak_bytes, saved_bytes
from benchmarks.report import RESULTS, save
from moebius.distributed.process.process import keep_freed_memory
from moebius.kernels.cpu import library
from moebius.kernels.cpu.brgemm import EXACT

TOLERANCES = {torch.float32: EXACT, torch.bfloat16: 2e-2}
FEWEST = 2  # rounds
PATIENCE_S = 10.0  # of a pass beyond which nobody is timed
WRONG = "wrong"
NOT_REACHED = "not reached (--limit)"
CLOCK_HZ = 2e9  # of a GPU's multiprocessors, at most
LONGEST_SLEEP_S = 0.1  # of a GPU that waits for the host


class Unfit(Exception):
    """Reports that a contender ran and must not be timed."""


@dataclass
class Entry:
    """Holds one contender in one setting and dtype: correctness, saved memory, and times."""

    setting: str
    dtype: str
    name: str
    role: str
    mode: str
    calls: int = 1  # that share the bank in a timed pass; the cells' times are of one of them
    error: float | None = None  # largest relative norm against the reference; of experts
    saved_bytes: int | None = None
    saved_over_ideal: float | None = None  # relative difference
    peak_bytes: int | None = None
    first_ms: float | None = None  # of the pass that was checked
    why_not: str | None = None  # it cannot run here, is wrong, or takes too long
    cells: list[dict[str, Any]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Returns the name, with the mode unless it is the default."""
        return self.name if self.mode == "default" else f"{self.name} ({self.mode})"


@dataclass(frozen=True)
class SweepPlan:
    """Holds the requested measurements."""

    device: torch.device
    settings: tuple[Setting, ...]
    dtypes: tuple[torch.dtype, ...]
    threads: tuple[int, ...]
    rounds: int
    seconds: float
    deadline: float  # of time.monotonic(): no cell is begun after it

    def has_time(self, num_ready: int) -> bool:
        """Returns whether one more contender could still be timed, beside those that are ready."""
        needed_s = self.seconds * len(self.threads) * (num_ready + 1)
        return time.monotonic() + needed_s < self.deadline


class Sheet:
    """Holds all entries, and writes them down after every change."""

    def __init__(self, plan: SweepPlan, folder: Path) -> None:
        gpu = plan.device.type == "cuda"
        self._name, self._folder = f"expert_layer_{'gpu' if gpu else 'cpu'}", folder
        self.about: dict[str, Any] = {}
        self.entries: list[Entry] = []
        self.finished: list[str] = []  # settings and dtypes

    def load(self) -> None:
        """Takes over what this program measured before it was restarted."""
        found = json.loads((self._folder / f"{self._name}.json").read_text(encoding="utf-8"))
        self.entries = [Entry(**entry) for entry in found["entries"]]
        self.finished = found["finished"]

    def keep(self) -> Path:
        """Writes the file anew."""
        _compare_with_ceilings(self.entries)
        entries = [asdict(entry) for entry in self.entries]
        figures = self.about | {"finished": self.finished, "entries": entries}
        return save(self._name, figures, folder=self._folder)

    def entry_of(self, setting: Setting, dtype: torch.dtype, contender: Contender) -> Entry:
        """Returns a contender's entry: a new one, or that from before a restart."""
        names = (setting.name, name_of(dtype), contender.name, contender.role, contender.mode)
        new = Entry(*names, contender.calls)
        for entry in self.entries:
            if (entry.setting, entry.dtype, entry.label) == (new.setting, new.dtype, new.label):
                return entry
        self.entries.append(new)
        return new

    @contextmanager
    def attempt(self, entry: Entry) -> Iterator[None]:
        """Makes an exception the entry's reason; a process that is killed leaves one too.

        Raises:
            Broken: nothing runs in this process any more.
        """
        entry.why_not = UNFINISHED
        self.keep()
        try:
            yield
            entry.why_not = None
        except Unfit as error:
            entry.why_not = str(error)
        except Exception as error:
            entry.why_not = reason_of(error)
            if is_broken():
                self.keep()
                raise Broken from error
        self.keep()


def main() -> None:
    options = parse()
    plan = make_plan(options)
    gc.freeze()  # what the imports left behind is not searched before every measurement of memory
    kept = plan.device.type == "cpu" and keep_freed_memory()
    onednn, console, sheet = onednn_error(), Console(width=150), Sheet(plan, options.out)
    if options.go_on:
        sheet.load()
    sheet.about = {
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
    }
    for setting in plan.settings:
        for dtype in plan.dtypes:
            title = f"{setting.name}, {name_of(dtype)}"
            if title in sheet.finished:
                continue
            found = measure(setting, dtype, plan, exact_modes(plan.device, dtype, onednn), sheet)
            sheet.finished.append(title)
            written = sheet.keep()
            console.print(table_of(title, found))
            console.print(written)
    ours = [entry for entry in sheet.entries if entry.role == "ours"]
    if any((entry.why_not or "").startswith(WRONG) for entry in ours):
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
    parser.add_argument("--go-on", action="store_true", help=argparse.SUPPRESS)  # after a restart
    return parser.parse_args()


def make_plan(options: argparse.Namespace) -> SweepPlan:
    """Returns the requested measurements, with the device's defaults."""
    gpu = options.device == "cuda"
    if gpu:
        require_gpu()
    known = {setting.name: setting for setting in (GPU_SETTINGS if gpu else CPU_SETTINGS)}
    if unknown := set(options.settings or ()) - set(known):
        raise SystemExit(f"no setting {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    names = options.dtypes or (["bfloat16", "float32"] if gpu else ["float32", "bfloat16"])
    return SweepPlan(
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


def measure(
    setting: Setting, dtype: torch.dtype, plan: SweepPlan, modes: Sequence[Mode], sheet: Sheet
) -> list[Entry]:
    """Checks all contenders of a setting and dtype, then times them in every cell.

    A GPU's contender is also timed as soon as it is checked, so that a run that is cut short has
    figures.
    """
    torch.set_num_threads(max(plan.threads))
    rivals = contenders(setting, modes)
    entries = [sheet.entry_of(setting, dtype, contender) for contender in rivals]
    if not plan.has_time(0):
        return refused(entries, NOT_REACHED)
    generator = torch.Generator(plan.device).manual_seed(0)
    try:
        bank, exam = draw_bank(setting, dtype, generator), draw_exam(setting, dtype, plan.device)
    except Exception as error:  # noqa: BLE001 (what fails here fails for all of them)
        return refused(entries, reason_of(error))
    running: list[Running] = []
    try:
        for contender, entry in zip(rivals, entries, strict=True):
            if entry.why_not is None and not plan.has_time(len(running)):
                entry.why_not = NOT_REACHED
            if entry.why_not is None:
                with sheet.attempt(entry):
                    check(contender, entry, exam)
                    running.append(Running(contender, entry, contender.build(bank), bank))
                if plan.device.type == "cuda" and entry.why_not is None:
                    time_cell(running[-1:], 1, FEWEST, plan, generator, sheet)
            print(line_of(entry), flush=True)
        for threads in plan.threads:
            torch.set_num_threads(threads)
            if time.monotonic() < plan.deadline:
                time_cell(running, threads, plan.rounds, plan, generator, sheet)
    except Broken:
        left_s = max(1.0, plan.deadline - time.monotonic())
        restart("benchmarks.kernels.expert_layer", "--go-on", "--limit", f"{left_s:.0f}")
    return entries


def refused(entries: list[Entry], why_not: str) -> list[Entry]:
    """Gives the same reason to all that have none yet."""
    for entry in entries:
        entry.why_not = entry.why_not or why_not
    return entries


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Right, and how much memory -----------------------------------------------------------------------


@dataclass(frozen=True)
class Exam:
    """Holds what every contender is checked with, and the right result."""

    bank: Bank
    choices: tuple[Choice, ...]
    expected: Result


def draw_exam(setting: Setting, dtype: torch.dtype, device: torch.device) -> Exam:
    generator = torch.Generator(device).manual_seed(1)
    setting = replace(setting, num_experts=setting.checked_experts or setting.num_experts)
    bank = draw_bank(setting, dtype, generator, exact=True)
    choices = draw_choices(setting, SKEW, generator)
    return Exam(bank, choices, meaning(bank, choices))


def check(contender: Contender, entry: Entry, exam: Exam) -> None:
    """Runs a contender's first pass for its peak memory, saved bytes and values.

    Raises:
        Unfit: it is wrong, or takes too long.
    """
    output = first_pass(contender, entry, exam.bank, exam.choices)
    if contender.role in ("peer", "ours"):
        entry.error = output.error(exam.expected)
        if not entry.error <= TOLERANCES[exam.bank.x_TD.dtype]:
            raise Unfit(f"{WRONG}: relative error {entry.error:.1e}")
    if (entry.first_ms or 0.0) > PATIENCE_S * 1e3:
        raise Unfit(f"not timed: one pass takes {entry.first_ms:.0f} ms")


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


class Timing(NamedTuple):
    """Holds the time of a forward and backward pass."""

    wall_s: float  # between events on a GPU
    cpu_s: float
    launch_s: float = 0.0  # what the host took on a GPU
    is_late: bool = False  # the GPU may have waited for launches


@dataclass
class Running:
    """Holds a runnable contender and its times in the present cell."""

    contender: Contender
    entry: Entry
    layer: Layer
    bank: Bank
    timings: list[Timing] = field(default_factory=list)
    launch_s: float = 0.0  # of the last pass

    def run_once(self, generator: torch.Generator) -> Timing:
        """Times a forward and backward pass with new routing, or one of several in a step."""
        calls, setting = self.contender.calls, self.bank.setting
        every = [draw_choices(setting, SKEW, generator) for _ in range(calls)]

        def passes() -> None:
            if calls > 1:
                run_calls(self.layer, self.bank, every)
            else:
                self.layer(self.bank.x_TD, every[0]).backward(self.bank.grad_TD)

        with exact_mode(self.contender.mode):
            gpu = self.bank.x_TD.is_cuda
            timing = timed_on_gpu(passes, self.launch_s) if gpu else timed(passes)
        clear((self.bank.x_TD, *self.layer.weights))  # room for contenders with other weights
        self.launch_s = timing.launch_s
        return timing._replace(wall_s=timing.wall_s / calls, cpu_s=timing.cpu_s / calls)

    @property
    def spent_s(self) -> float:
        """Returns the time of all passes of the cell."""
        return sum(timing.wall_s for timing in self.timings)


def timed(work: Callable[[], None]) -> Timing:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu)


def timed_on_gpu(work: Callable[[], None], launch_s: float) -> Timing:
    """Measures between two GPU events.

    The GPU sleeps for twice the time that the host took to launch the last pass, as in a training
    step, in which the host is ahead. Work that waits for the GPU is late by nature.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    cpu, wall = time.process_time(), time.perf_counter()
    torch.cuda._sleep(int(min(2 * launch_s + 1e-4, LONGEST_SLEEP_S) * CLOCK_HZ))
    start.record()
    work()
    end.record()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    is_late = start.query()
    torch.cuda.synchronize()
    return Timing(start.elapsed_time(end) / 1e3, cpu, wall, is_late)


def time_cell(
    running: Sequence[Running],
    threads: int,
    rounds: int,
    plan: SweepPlan,
    generator: torch.Generator,
    sheet: Sheet,
) -> None:
    """Runs rounds in turns until every contender has had its time."""
    for one in running:
        one.timings = []
    for number in range(rounds):
        for one in running:
            over = one.spent_s > plan.seconds or time.monotonic() > plan.deadline
            if one.entry.why_not or (number >= FEWEST and over):
                continue
            with sheet.attempt(one.entry):
                if number == 0 and one.bank.x_TD.is_cuda:
                    one.run_once(generator)  # kernels are compiled and memory is there
                one.timings.append(one.run_once(generator))
                write_cell(one, threads)


def write_cell(one: Running, threads: int) -> None:
    """Writes a contender's figures at a number of threads into its entry."""
    fastest, gpu = min(one.timings), one.bank.x_TD.is_cuda
    cell = {
        "threads": threads,
        "rounds": len(one.timings),
        "fastest_ms": fastest.wall_s * 1e3,
        "fastest_cpu_ms": min(timing.cpu_s for timing in one.timings) * 1e3,
        "late": sum(timing.is_late for timing in one.timings) if gpu else None,
    }
    others = [each for each in one.entry.cells if each["threads"] != threads]
    one.entry.cells = [*others, cell]


def _compare_with_ceilings(entries: Sequence[Entry]) -> None:
    """Divides the fastest ceiling's times by those of every cell."""
    for entry in entries:
        for cell in entry.cells:
            same = [
                other
                for ceiling in entries
                if ceiling.role == "ceiling"
                and (ceiling.setting, ceiling.dtype) == (entry.setting, entry.dtype)
                for other in ceiling.cells
                if other["threads"] == cell["threads"]
            ]
            # by processor time: what to read on a busy machine, at one thread
            by = {"of_ceiling": "fastest_ms", "of_ceiling_by_cpu_time": "fastest_cpu_ms"}
            for ratio, time_ms in by.items():
                best = min((other[time_ms] for other in same), default=None)
                cell[ratio] = None if best is None else best / cell[time_ms]
            if cell["late"] is not None:
                cell["of_ceiling_by_cpu_time"] = None


# Report -------------------------------------------------------------------------------------------


def line_of(entry: Entry) -> str:
    """Returns what is known of a contender before the table is complete."""
    head = f"{entry.setting}, {entry.dtype}, {entry.label}"
    if entry.why_not:
        return f"{head}: {entry.why_not}"
    error = "" if entry.error is None else f"error {entry.error:.0e}, "
    times = [cell_text(cell) for cell in entry.cells] or [f"first pass {entry.first_ms:.4g} ms"]
    return f"{head}: {error}{', '.join(times)}"


def cell_text(cell: dict[str, Any]) -> str:
    ratio = "" if cell["of_ceiling"] is None else f" {cell['of_ceiling']:.2f}"
    late = f" ({cell['late']} of {cell['rounds']} late)" if cell["late"] else ""
    return f"{cell['fastest_ms']:.4g}{ratio}{late}"


def table_of(title: str, entries: Sequence[Entry]) -> Table:
    threads = sorted({cell["threads"] for entry in entries for cell in entry.cells})
    heads = [f"{number} threads: ms, of ceiling" for number in threads] or ["time"]
    columns = ("", "error", "saved MiB", "over ideal", "peak MiB", *heads)
    table = Table(*columns, title=title, box=None)
    for entry in entries:
        style = {"ours": "bold green", "ceiling": "yellow", "dense": "cyan"}.get(entry.role, "")
        times = [cell_text(cell) for cell in entry.cells]
        table.add_row(
            entry.label,
            "" if entry.error is None else f"{entry.error:.0e}",
            mib(entry.saved_bytes),
            "" if entry.saved_over_ideal is None else f"{entry.saved_over_ideal:+.1%}",
            mib(entry.peak_bytes),
            *(times or [(entry.why_not or "not reached")[:100]]),
            style=style,
        )
    return table


def mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:,.0f}"


if __name__ == "__main__":
    main()
