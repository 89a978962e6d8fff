"""Reports what each rank and node of a run is doing, for `moebius watch`.

* Ranks on this machine: phase, step and age come from their heartbeat pages, CPU and memory from psutil.
* Every node: the last line of its resources.jsonl, at most ten seconds old.
* The run folder: state, step, throughput, and when each rank last wrote to its log.

Cost: one scan of this machine's processes per reading, about 10 ms.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table
from rich.text import Text

from ..job import METRICS, read_generation
from ..nodes import processes
from ..watch.heartbeats import RankState, WatchedRanks, folder_of
from ..watch.resources import FILE as RESOURCES
from .data_progress import duration
from .json_lines import JsonLinesTail
from .run_report import RunReport, read_report

SAMPLE_S = 0.2  # between two readings of CPU times, where a single record is wanted
Record = Mapping[str, Any]

# The newest line of rank 0's metrics stands for all ranks: they move in step.
_PHASES = {"train": "step", **{name: name for name in ("start", "eval", "checkpoint", "data_wait")}}
_PHASE_STYLES = {
    "step": "green",
    "data_wait": "yellow",
    "ckpt": "blue",
    "eval": "cyan",
    "compile": "magenta",
}
_OF_RUN = ("run", "name", "state", "generation", "step", "total_steps", "loss", "tokens_per_s")
_OF_NODE = ("cpu_percent", "cpus", "memory_bytes", "memory_total_bytes")
_OF_NODE += ("received_bytes_per_s", "sent_bytes_per_s", "gpus")


class RunMonitor:
    """Reads the state of a run repeatedly; CPU use is measured between two readings."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir.absolute()  # as in the marks of its processes
        self._processes: dict[int, psutil.Process] = {}

    def look(self) -> dict[str, Any]:
        """Returns one reading as JSON values (docs/watch.md lists the keys).

        Raises:
            JobError: there is no job in this folder.
        """
        report = read_report(self.run_dir)
        nodes, ranks = self._nodes_and_ranks(report)
        run = report.record()
        return {
            "time": time.time(),
            **{key: run[key] for key in _OF_RUN},
            "phase": newest_phase(self.run_dir) if nodes else None,
            "nodes": nodes,
            "ranks": sorted(ranks, key=lambda rank: rank["rank"]),
        }

    def _nodes_and_ranks(
        self, report: RunReport
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        nodes: list[dict[str, Any]] = []
        ranks: list[dict[str, Any]] = []
        if report.status.state.is_final:
            return nodes, ranks
        generation = read_generation(self.run_dir)
        found = processes.find(str(self.run_dir), generation=generation)
        pids = {int(marks[processes.RANK]): pid for pid, marks in found.items() if "RANK" in marks}
        for folder, assignment in _assignments(self.run_dir, generation):
            line = _last_resources(folder)
            nodes.append(_node_record(assignment, line))
            ranks += self._ranks_of(folder, assignment, line, pids)
        return nodes, ranks

    def _ranks_of(
        self, folder: Path, assignment: Record, line: Record, pids: Mapping[int, int]
    ) -> list[dict[str, Any]]:
        node, each = assignment["node_rank"], assignment["launch"]["ranks_per_node"]
        ranks = range(node * each, (node + 1) * each)
        pages = WatchedRanks(folder_of(str(self.run_dir), assignment["generation"], node), ranks)
        here = {state.rank: state for state in pages.look()}
        told = {rank["rank"]: rank for rank in line.get("ranks", ())}
        return [
            {
                "node": node,
                "rank": rank,
                "address": assignment["address"],
                **_progress(here.get(rank), told.get(rank, {})),
                "pid": pids.get(rank),
                **self._use_of(pids.get(rank), told.get(rank, {})),
                "log_age_s": _age_s(folder / f"rank{rank}.log"),
            }
            for rank in ranks
        ]

    def _use_of(self, pid: int | None, told: Record) -> dict[str, Any]:
        """Returns a local process's CPU and memory use, or what its node last wrote."""
        if pid is None:
            return {key: told.get(key) for key in ("cpu_percent", "memory_bytes")}
        try:
            process = self._processes.setdefault(pid, psutil.Process(pid))
            with process.oneshot():
                cpu, memory = process.cpu_percent(), process.memory_info().rss
        except psutil.Error:  # it has ended meanwhile
            self._processes.pop(pid, None)
            cpu = memory = None
        return {"cpu_percent": cpu, "memory_bytes": memory}


def look_once(run_dir: Path) -> dict[str, Any]:
    """Returns one reading, with CPU use over a fraction of a second."""
    monitor = RunMonitor(run_dir)
    if monitor.look()["ranks"]:
        time.sleep(SAMPLE_S)
    return monitor.look()


def newest_phase(run_dir: Path) -> str | None:
    """Returns the ranks' phase by the newest line of the metrics; None if there is none."""
    lines = JsonLinesTail.near_the_end(run_dir / METRICS, num_bytes=64 << 10).read()
    kinds = (str(line.get("kind")) for line in reversed(lines))
    return next((_PHASES[kind] for kind in kinds if kind in _PHASES), None)


def _progress(state: RankState | None, told: Record) -> dict[str, Any]:
    """Returns a rank's phase and step: from its heartbeat, or as its node last wrote."""
    if state is None:
        return {"phase": told.get("phase"), "step": told.get("step"), "age_s": None}
    return {"phase": state.phase, "step": state.step, "age_s": round(state.age_s, 3)}


def _node_record(assignment: Record, line: Record) -> dict[str, Any]:
    return {
        "node": assignment["node_rank"],
        "address": assignment["address"],
        "age_s": max(0.0, time.time() - line["time"]) if line else None,
        **{key: line.get(key) for key in _OF_NODE},
    }


def _last_resources(folder: Path) -> dict[str, Any]:
    """Returns the newest line of a node's resources.jsonl; {} if there is none yet."""
    for name in (RESOURCES, Path(RESOURCES).with_suffix(".1.jsonl").name):
        lines = JsonLinesTail.near_the_end(folder / name, num_bytes=64 << 10).read()
        for line in reversed(lines):
            if _is_sound(line):
                return line
    return {}


def _is_sound(line: Record) -> bool:
    """Returns whether a line has the values that a node writes; people edit files."""

    def figures(record: object, *names: str) -> bool:
        values = [record.get(name) for name in names] if isinstance(record, dict) else [None]
        return all(isinstance(value, int | float) and math.isfinite(value) for value in values)

    gpus, ranks = line.get("gpus"), line.get("ranks")
    return (
        figures(line, "time", *_OF_NODE[:-1])
        and isinstance(gpus, list)
        and all(figures(gpu, "percent", "memory_bytes", "memory_total_bytes") for gpu in gpus)
        and isinstance(ranks, list)
        and all(figures(rank, "rank") for rank in ranks)
    )


def _assignments(run_dir: Path, generation: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields each node's log folder and assignment in a generation."""
    for path in sorted((run_dir / "logs" / f"g{generation:03d}").glob("node*/assignment.json")):
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # being written, or gone
        yield path.parent, {"generation": generation, **told}


def _age_s(path: Path) -> float | None:
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


# ---- tables


def node_table(nodes: Sequence[Record]) -> Table:
    """Returns a table with a row per node."""
    has_gpus = any(node["gpus"] for node in nodes)
    columns = ("node", "address", "CPU", "memory", *(["GPU", "GPU memory"] if has_gpus else []))
    table = _table(*columns, "network", "age", left="address", space=1)
    for node in nodes:
        gpus = node["gpus"] or []
        table.add_row(
            str(node["node"]),
            Text(node["address"]),
            _cpu_use(node),
            _share([node]),
            *((_gpu_use(gpus), _share(gpus)) if has_gpus else ()),
            _rate(node),
            "" if node["age_s"] is None else duration(node["age_s"]),
        )
    return table


def rank_table(ranks: Sequence[Record]) -> Table:
    """Returns a table with a row per rank."""
    columns = ("rank", "node", "pid", "phase", "step", "for", "CPU", "memory", "last wrote")
    table = _table(*columns, left="phase")
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


def _table(*columns: str, left: str, space: int = 2) -> Table:
    table = Table(box=None, padding=(0, space, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name == left else "right", no_wrap=True)
    return table


def _cpu_use(node: Record) -> str:
    if node["cpu_percent"] is None or not node["cpus"]:
        return ""
    return f"{node['cpu_percent'] / node['cpus']:.0f} % of {node['cpus']}"


def _share(holders: Sequence[Record]) -> str:
    """Formats used and total memory of a node, or of its GPUs together."""
    pairs = [(each["memory_bytes"], each["memory_total_bytes"]) for each in holders]
    if not pairs or None in pairs[0]:
        return ""
    used, total = (sum(column) for column in zip(*pairs, strict=True))
    return f"{used / 2**30:.0f}/{total / 2**30:.0f} GiB"


def _rate(node: Record) -> str:
    """Formats a node's network traffic, in and out together."""
    received, sent = node["received_bytes_per_s"], node["sent_bytes_per_s"]
    return "" if received is None or sent is None else f"{(received + sent) / 1e6:,.0f} MB/s"


def _gpu_use(gpus: Sequence[Record]) -> str:
    if not gpus:
        return ""
    return f"{sum(gpu['percent'] for gpu in gpus) / len(gpus):.0f} % of {len(gpus)}"
