"""What every rank of a run is doing now: `moebius top`.

Step, rate and phase come from the run folder's metrics and journal, processor time and memory from
psutil, for the ranks whose processes are on this machine (those of a simulated cluster and of
`moebius train` all are). A rank elsewhere is shown by its log: how long ago it last wrote.

Cost: a scan of this machine's processes per look, some 10 ms.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .. import processes
from ..job import METRICS, JobStatus, read_generation, read_status
from ..json_lines import JsonLinesTail
from ..summary import STATE_STYLES
from .run_report import RunReport, read_report

REFRESH_S = 1.0
SAMPLE_S = 0.2  # between two looks at processor times, where only one picture is wanted

# What rank 0 wrote last tells what all ranks are doing: they go in step.
_PHASES = {
    "start": "start",
    "eval": "eval",
    "train": "step",
    "checkpoint": "checkpoint",
    "data_wait": "data_wait",
}


@dataclass(frozen=True)
class RankView:
    """Holds what is known of one rank."""

    node: int
    rank: int
    address: str  # of its node
    pid: int | None  # None: its process is not on this machine, or has ended
    cpu_percent: float | None  # 100 is one processor
    memory_bytes: int | None  # resident
    log_age_s: float | None  # since the rank last wrote to its log; None: it never has

    def record(self) -> dict[str, Any]:
        """Returns the rank as plain values of JSON."""
        return dict(vars(self))


@dataclass
class Top:
    """Looks at a run again and again; processor use is that between two looks."""

    run_dir: Path
    _processes: dict[int, psutil.Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run_dir = self.run_dir.absolute()  # as the marks of its processes say it

    def look(self) -> tuple[RunReport, str | None, list[RankView]]:
        """Returns the run's report, the phase that its ranks are in, and each of them.

        Raises:
            JobError: there is no job in this folder.
        """
        report = read_report(self.run_dir)
        over = report.status.state.is_final
        return report, None if over else newest_phase(self.run_dir), [] if over else self._ranks()

    def _ranks(self) -> list[RankView]:
        generation = read_generation(self.run_dir)
        found = processes.find(str(self.run_dir), generation=generation)
        pids = {int(marks["RANK"]): pid for pid, marks in found.items() if "RANK" in marks}
        views = []
        for folder, attempt in _attempts(self.run_dir, generation):
            each = attempt["launch"]["ranks_per_node"]
            node = attempt["node_rank"]
            for rank in range(node * each, (node + 1) * each):
                cpu, memory = self._use_of(pids.get(rank))
                age = _age_s(folder / f"rank{rank}.log")
                views.append(
                    RankView(node, rank, attempt["address"], pids.get(rank), cpu, memory, age)
                )
        return sorted(views, key=lambda view: view.rank)

    def _use_of(self, pid: int | None) -> tuple[float | None, int | None]:
        if pid is None:
            return None, None
        try:
            process = self._processes.setdefault(pid, psutil.Process(pid))
            with process.oneshot():
                return process.cpu_percent(), process.memory_info().rss
        except psutil.Error:  # it has ended meanwhile
            self._processes.pop(pid, None)
            return None, None


def newest_phase(run_dir: Path) -> str | None:
    """Returns what the newest line of the metrics says the ranks are doing; None: nothing yet."""
    lines = JsonLinesTail.near_the_end(run_dir / METRICS, num_bytes=64 << 10).read()
    kinds = (str(line.get("kind")) for line in reversed(lines))
    return next((_PHASES[kind] for kind in kinds if kind in _PHASES), None)


def top_record(
    report: RunReport, phase: str | None, ranks: list[RankView], *, now: float
) -> dict[str, Any]:
    """Returns one look as plain values of JSON (docs/jobs.md names the keys)."""
    run = report.record()
    keys = ("run", "name", "state", "generation", "step", "total_steps", "loss", "tokens_per_s")
    return (
        {"time": now}
        | {key: run[key] for key in keys}
        | {"phase": phase, "ranks": [rank.record() for rank in ranks]}
    )


def look_once(run_dir: Path) -> dict[str, Any]:
    """Returns one look, with processor use over a fraction of a second."""
    top = Top(run_dir)
    if top.look()[2]:
        time.sleep(SAMPLE_S)
    return top_record(*top.look(), now=time.time())


def show_top(run_dir: Path, console: Console, *, once: bool) -> JobStatus:
    """Shows the ranks of a run, redrawn every second until the run has ended; or once."""
    if once or not console.is_terminal:
        console.print(render(look_once(run_dir)))
        return read_status(run_dir)
    with Live(console=console, auto_refresh=False) as screen:
        for record in _looks(run_dir):
            screen.update(render(record), refresh=True)
    return read_status(run_dir)


def _looks(run_dir: Path) -> Iterator[dict[str, Any]]:
    top = Top(run_dir)
    while True:
        looked = top.look()
        yield top_record(*looked, now=time.time())
        if looked[0].status.state.is_final:
            return
        time.sleep(REFRESH_S)


def render(record: Mapping[str, Any]) -> Group:
    """Returns one look as a heading and a table with a row per rank."""
    return Group(_heading(record), _rank_table(record["ranks"]))


def _heading(record: Mapping[str, Any]) -> Text:
    style = STATE_STYLES.get(record["state"], "bold")
    words: list[Any] = [(record["name"], "bold"), "  ", (record["state"], style)]
    if record["generation"]:
        words.append(f"  generation {record['generation']}")
    if record["step"] is not None:
        words.append(f"  step {record['step']}/{record['total_steps'] or '?'}")
    if isinstance(record["tokens_per_s"], float):
        words.append(f"  {record['tokens_per_s']:,.0f} tokens/s")
    if record["phase"]:
        words.append(f"  {record['phase']}")
    return Text.assemble(*words)


def _rank_table(ranks: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("node", "address", "rank", "pid", "CPU", "memory", "last wrote"):
        table.add_column(name, justify="left" if name == "address" else "right")
    for rank in ranks:
        cpu, memory, age = rank["cpu_percent"], rank["memory_bytes"], rank["log_age_s"]
        table.add_row(
            str(rank["node"]),
            Text(rank["address"]),
            str(rank["rank"]),
            "not here" if rank["pid"] is None else str(rank["pid"]),
            "" if cpu is None else f"{cpu:.0f} %",
            "" if memory is None else f"{memory / 2**20:,.0f} MiB",
            "" if age is None else f"{age:.0f} s ago",
        )
    return table


def _attempts(run_dir: Path, generation: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """What each node of a generation was told, and the folder that it writes its logs to."""
    for path in sorted((run_dir / "logs" / f"g{generation:03d}").glob("node*/attempt.json")):
        try:
            yield path.parent, json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # being written, or gone


def _age_s(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None
