"""What every rank and node of a run is doing now: `moebius top`.

Three sources, by what can be seen from here:

* ranks of this machine (those of a simulated cluster and of `moebius train` all are): phase, step
  and how long they have been in it from their heartbeats' pages in memory, processor time and memory
  from psutil;
* every node, wherever it is: the last line of its resources.jsonl, which is up to ten seconds old.
  It has the machine's processors, memory and GPUs, and of every rank phase, step and use;
* the run folder: state, step, rate, and how long ago a rank last wrote to its log.

Cost: a scan of this machine's processes per look, some 10 ms.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..job import METRICS, JobStatus, read_generation, read_status
from ..nodes import processes
from ..watch.heartbeats import RankState, WatchedRanks, folder_of
from ..watch.resources import FILE as RESOURCES
from .data_progress import duration
from .json_lines import JsonLinesTail
from .run_report import RunReport, read_report
from .summary import STATE_STYLES

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


_PHASE_STYLES = {
    "step": "green",
    "data_wait": "yellow",
    "ckpt": "blue",
    "eval": "cyan",
    "start": "dim",
    "compile": "magenta",
    "end": "dim",
}


@dataclass(frozen=True)
class RankView:
    """Holds what is known of one rank."""

    node: int
    rank: int
    address: str  # of its node
    phase: str | None  # a heartbeat's; None: it has not begun
    step: int | None  # that is being made
    age_s: float | None  # of the phase, from the heartbeat; None: that is on another machine
    pid: int | None  # None: its process is not on this machine, or has ended
    cpu_percent: float | None  # 100 is one processor
    memory_bytes: int | None  # resident
    log_age_s: float | None  # since the rank last wrote to its log; None: it never has

    def record(self) -> dict[str, Any]:
        """Returns the rank as plain values of JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class NodeView:
    """Holds what is known of one node: the last line of its resources.jsonl, or nothing."""

    node: int
    address: str
    age_s: float | None = None  # since the line was written
    cpu_percent: float | None = None  # of the machine; 100 is one processor
    cpus: int | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    received_bytes_per_s: float | None = None
    sent_bytes_per_s: float | None = None
    gpus: tuple[Mapping[str, int], ...] = ()

    @classmethod
    def of_line(cls, node: int, address: str, line: Mapping[str, Any], now: float) -> "NodeView":
        """Returns what a line of resources.jsonl says."""
        names = {entry.name for entry in fields(cls)} - {"node", "address", "age_s", "gpus"}
        known = {name: line.get(name) for name in names}
        age_s = max(0.0, now - line["time"]) if "time" in line else None
        return cls(node, address, age_s, gpus=tuple(line.get("gpus") or ()), **known)

    def record(self) -> dict[str, Any]:
        """Returns the node as plain values of JSON."""
        return dict(vars(self)) | {"gpus": [dict(gpu) for gpu in self.gpus]}


@dataclass(frozen=True)
class Look:
    """Holds one look at a run."""

    report: RunReport
    phase: str | None
    nodes: list[NodeView]
    ranks: list[RankView]


@dataclass
class Top:
    """Looks at a run again and again; processor use is that between two looks."""

    run_dir: Path
    _processes: dict[int, psutil.Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run_dir = self.run_dir.absolute()  # as the marks of its processes say it

    def look(self) -> Look:
        """Returns the run's report, the phase that its ranks are in, and each node and rank.

        Raises:
            JobError: there is no job in this folder.
        """
        report = read_report(self.run_dir)
        if report.status.state.is_final:
            return Look(report, None, [], [])
        nodes, ranks = self._nodes_and_ranks()
        return Look(report, newest_phase(self.run_dir), nodes, ranks)

    def _nodes_and_ranks(self) -> tuple[list[NodeView], list[RankView]]:
        generation = read_generation(self.run_dir)
        found = processes.find(str(self.run_dir), generation=generation)
        pids = {int(marks["RANK"]): pid for pid, marks in found.items() if "RANK" in marks}
        nodes, ranks = [], []
        for folder, attempt in _attempts(self.run_dir, generation):
            each, node = attempt["launch"]["ranks_per_node"], attempt["node_rank"]
            address = attempt["address"]
            line = _last_resources(folder)
            nodes.append(NodeView.of_line(node, address, line, time.time()))
            told = {rank.get("rank"): rank for rank in line.get("ranks") or ()}
            here = self._heartbeats(generation, node, range(node * each, (node + 1) * each))
            ranks += [
                self._rank(node, rank, address, pids.get(rank), here.get(rank), told, folder)
                for rank in range(node * each, (node + 1) * each)
            ]
        return nodes, sorted(ranks, key=lambda view: view.rank)

    def _heartbeats(self, generation: int, node: int, ranks: range) -> dict[int, RankState]:
        folder = folder_of(str(self.run_dir), generation, node)
        return {state.rank: state for state in WatchedRanks(folder, ranks).look()}

    def _rank(
        self,
        node: int,
        rank: int,
        address: str,
        pid: int | None,
        state: RankState | None,
        told: Mapping[int, Mapping[str, Any]],
        folder: Path,
    ) -> RankView:
        """Joins what is known of a rank: by its heartbeat, else by what its node has written."""
        line = told.get(rank, {})
        cpu, memory = self._use_of(pid)
        return RankView(
            node,
            rank,
            address,
            phase=line.get("phase") if state is None else state.phase,
            step=line.get("step") if state is None else state.step,
            age_s=None if state is None else round(state.age_s, 3),
            pid=pid,
            cpu_percent=line.get("cpu_percent") if pid is None else cpu,
            memory_bytes=line.get("memory_bytes") if pid is None else memory,
            log_age_s=_age_s(folder / f"rank{rank}.log"),
        )

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


def top_record(look: Look, *, now: float) -> dict[str, Any]:
    """Returns one look as plain values of JSON (docs/jobs.md names the keys)."""
    run = look.report.record()
    keys = ("run", "name", "state", "generation", "step", "total_steps", "loss", "tokens_per_s")
    return (
        {"time": now}
        | {key: run[key] for key in keys}
        | {"phase": look.phase}
        | {"nodes": [node.record() for node in look.nodes]}
        | {"ranks": [rank.record() for rank in look.ranks]}
    )


def look_once(run_dir: Path) -> dict[str, Any]:
    """Returns one look, with processor use over a fraction of a second."""
    top = Top(run_dir)
    if top.look().ranks:
        time.sleep(SAMPLE_S)
    return top_record(top.look(), now=time.time())


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
        look = top.look()
        yield top_record(look, now=time.time())
        if look.report.status.state.is_final:
            return
        time.sleep(REFRESH_S)


def render(record: Mapping[str, Any]) -> Group:
    """Returns one look as a heading, a table with a row per node, and one with a row per rank."""
    parts: list[Text | Table] = [_heading(record)]
    if record["nodes"]:
        parts += [Text(""), _node_table(record["nodes"]), Text(""), _rank_table(record["ranks"])]
    return Group(*parts)


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


def _table(*columns: str, left: Sequence[str], space: int = 2) -> Table:
    table = Table(box=None, padding=(0, space, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def _node_table(nodes: list[dict[str, Any]]) -> Table:
    has_gpus = any(node["gpus"] for node in nodes)
    columns = ("node", "address", "CPU", "memory", *(["GPU", "GPU memory"] if has_gpus else []))
    table = _table(*columns, "network", "age", left=("address",), space=1)
    for node in nodes:
        gpus = (_gpu_use(node["gpus"]), _gpu_memory(node["gpus"])) if has_gpus else ()
        table.add_row(
            str(node["node"]),
            Text(node["address"]),
            _cpu_use(node),
            _share(node["memory_bytes"], node["memory_total_bytes"]),
            *gpus,
            _rate(node),
            "" if node["age_s"] is None else duration(node["age_s"]),
        )
    return table


def _rank_table(ranks: list[dict[str, Any]]) -> Table:
    columns = ("rank", "node", "pid", "phase", "step", "for", "CPU", "memory", "last wrote")
    table = _table(*columns, left=("phase",))
    for rank in ranks:
        cpu, memory, age = rank["cpu_percent"], rank["memory_bytes"], rank["log_age_s"]
        table.add_row(
            str(rank["rank"]),
            str(rank["node"]),
            "not here" if rank["pid"] is None else str(rank["pid"]),
            Text(rank["phase"] or "", style=_PHASE_STYLES.get(rank["phase"], "")),
            "" if rank["step"] is None else str(rank["step"]),
            "" if rank["age_s"] is None else f"{rank['age_s']:.1f} s",
            "" if cpu is None else f"{cpu:.0f} %",
            "" if memory is None else f"{memory / 2**20:,.0f} MiB",
            "" if age is None else f"{age:.0f} s ago",
        )
    return table


def _cpu_use(node: Mapping[str, Any]) -> str:
    if node["cpu_percent"] is None or not node["cpus"]:
        return ""
    return f"{node['cpu_percent'] / node['cpus']:.0f} % of {node['cpus']}"


def _share(used: int | None, total: int | None) -> str:
    return "" if used is None or total is None else f"{used / 2**30:.0f}/{total / 2**30:.0f} GiB"


def _rate(node: Mapping[str, Any]) -> str:
    """Returns what goes in and out of a node's network, together."""
    received, sent = node["received_bytes_per_s"], node["sent_bytes_per_s"]
    return "" if received is None or sent is None else f"{(received + sent) / 1e6:,.0f} MB/s"


def _gpu_use(gpus: Sequence[Mapping[str, int]]) -> str:
    if not gpus:
        return ""
    return f"{sum(gpu['percent'] for gpu in gpus) / len(gpus):.0f} % of {len(gpus)}"


def _gpu_memory(gpus: Sequence[Mapping[str, int]]) -> str:
    if not gpus:
        return ""
    used, total = (sum(gpu[key] for gpu in gpus) for key in ("memory_bytes", "memory_total_bytes"))
    return _share(used, total)


def _last_resources(folder: Path) -> dict[str, Any]:
    """Returns the newest line of a node's resources.jsonl; {} if there is none yet."""
    for name in (RESOURCES, Path(RESOURCES).with_suffix(".1.jsonl").name):
        lines = JsonLinesTail.near_the_end(folder / name, num_bytes=64 << 10).read()
        for line in reversed(lines):
            if _is_sound(line):
                return line
    return {}


def _is_sound(line: Mapping[str, Any]) -> bool:
    """Whether a line holds what a node writes; people edit files."""
    gpus, ranks = line.get("gpus"), line.get("ranks")
    figures = ["time", "cpu_percent", "cpus", "memory_bytes", "memory_total_bytes"]
    figures += ["received_bytes_per_s", "sent_bytes_per_s"]
    return (
        all(_is_number(line.get(name)) for name in figures)
        and isinstance(gpus, list)
        and all(isinstance(gpu, dict) and all(map(_is_number, gpu.values())) for gpu in gpus)
        and all({"percent", "memory_bytes", "memory_total_bytes"} <= set(gpu) for gpu in gpus)
        and isinstance(ranks, list)
        and all(isinstance(rank, dict) and _is_number(rank.get("rank")) for rank in ranks)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _attempts(run_dir: Path, generation: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """What each node of a generation was told, and the folder that it writes its logs to."""
    for path in sorted((run_dir / "logs" / f"g{generation:03d}").glob("node*/assignment.json")):
        try:
            yield path.parent, json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # being written, or gone


def _age_s(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None
