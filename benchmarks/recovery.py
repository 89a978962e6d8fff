"""How long a job stands still after a kill, phase by phase: a rank, an agent, a node's actor.

    python -m benchmarks.recovery [--runs 5] [--keep FOLDER] [--no-warm-start] [--in-place] [--no-save]

A simulated cluster of 2 nodes × 2 ranks trains the recipe `smoke`, with a checkpoint every 5 steps.
One victim after the other is killed with SIGKILL a few steps after the last recovery. The time
counts from the kill to the time stamp of the first new step in metrics.jsonl, both on this machine's
clock; the phases are those of the journal (details.phases_s of RUNNING), and `detect` is what lies
between the kill and the supervisor's seeing it. Also `submit` to the first step, where `before` is
the start of the cluster and the preparation of the data. Medians are saved as
benchmarks/results/recovery.json.

With --in-place only ranks are killed, and replaced in place where that can be (`job.in_place`); every third of a node
is a new generation, for a node has two spares. With --vocabulary the model is larger, so that building it and
loading its checkpoint take time.

Cost: 3-5 minutes on two quiet cores.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import report
from moebius.cluster import processes
from moebius.cluster.job import IN_PLACE, JOURNAL, METRICS, request_stop
from moebius.cluster.json_lines import JsonLinesTail
from moebius.cluster.submit import submit
from moebius.train.config import Config
from moebius.train.recipes.smoke import smoke

T = TypeVar("T")
VICTIMS = ("rank", "agent", "actor")
PHASES = (
    *("before", "detect", "collect", "end", "wait", "place", "check", "data", "order", "processes"),
    *("leave", "join", "build", "load", "loader", "step"),
)
STEPS_BETWEEN = 8  # more than a checkpoint's interval: the next recovery begins from a newer one
WAIT_S = 120.0


@dataclass(frozen=True)
class Recovery:
    """What one kill cost."""

    victim: str
    seconds: float  # from the kill to the first new step
    phases_s: Mapping[str, float]


def config_for(
    steps: int, *, warm_start: bool, in_place: bool = False, vocabulary: int | None = None
) -> Config:
    """Returns the recipe with checkpoints every 5 steps and without a drill of its own.

    A larger `vocabulary` than the tokenizer's makes a larger model, whose steps take hardly longer.
    """
    recipe = smoke().model_dump()
    recipe["train"] |= {"steps": steps, "log_every": 1, "eval_every": 0}
    recipe["checkpoint"] |= {"every": 5}
    recipe["job"] |= {
        "rehearse_failure_at_step": None,
        "max_restarts": 1000,
        "warm_start": warm_start,
        "in_place": in_place,
        "snapshot_every": 5,
    }
    if vocabulary is not None:
        recipe["model"] |= {"vocab_size": vocabulary}
    recipe["data"] |= {"directory": str(Path(tempfile.gettempdir()) / "moebius-recovery-data")}
    return Config.model_validate(recipe)


class Observer:
    """Reads a run folder while the run goes on, and kills what belongs to it."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._metrics = JsonLinesTail(run_dir / METRICS)
        self._lines: list[dict[str, Any]] = []

    def first_step_of(self, start: int) -> dict[str, Any]:
        """Waits for the first step after a start or a recovery in place, counted from 1."""
        return self._await(lambda: next(self._steps_of(start), None))

    def await_steps(self, start: int, number: int) -> None:
        """Waits until so many steps were made after a start."""
        self._await(lambda: len(list(self._steps_of(start))) >= number or None)

    def phases_of(self, start: int) -> dict[str, float]:
        """Waits for the journal to tell the phases of a start."""
        return self._await(lambda: self._journal_of(start))["phases_s"]

    def was_in_place(self, start: int) -> bool:
        """Returns whether a start whose phases are told was a recovery in place."""
        return IN_PLACE in (self._journal_of(start) or {})

    def kill(self, victim: str) -> float:
        """Kills one process of the running generation; returns when."""
        pid = self._find(victim)
        now = time.time()
        processes.kill(pid)
        return now

    def _find(self, victim: str) -> int:
        found = processes.find(str(self.run_dir))
        ranks = {int(marks["RANK"]): pid for pid, marks in found.items() if "RANK" in marks}
        if victim == "rank":
            return ranks[max(ranks)]
        agent = psutil.Process(ranks[max(ranks)]).ppid()
        return agent if victim == "agent" else int(found[agent][processes.PARENT])

    def _journal_of(self, start: int) -> dict[str, Any] | None:
        details = [line["details"] for line in JsonLinesTail(self.run_dir / JOURNAL).read()]
        told = [entry for entry in details if "phases_s" in entry]
        return told[start - 1] if len(told) >= start else None

    def _steps_of(self, start: int) -> Iterator[dict[str, Any]]:
        self._lines += self._metrics.read()
        current = 0
        for line in self._lines:
            current += line["kind"] in ("start", "in_place")
            if line["kind"] == "train" and current == start:
                yield line

    def _await(self, look: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + WAIT_S
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.run_dir}: no sign of what was waited for in {WAIT_S} s")
            time.sleep(0.05)
        return found


def observe(run_dir: Path, began: float, victims: Sequence[str], found: list[Recovery]) -> None:
    """Kills one victim after the other; the first entry is the start of the job itself."""
    observer = Observer(run_dir)
    first = observer.first_step_of(1)
    found.append(_recovery("submit", first["time"] - began, observer.phases_of(1), "before"))
    for start, victim in enumerate(victims, start=1):
        observer.await_steps(start, STEPS_BETWEEN)
        killed = observer.kill(victim)
        line = observer.first_step_of(start + 1)
        phases = observer.phases_of(start + 1)
        if observer.was_in_place(start + 1):
            victim = f"{victim} in place"
        found.append(_recovery(victim, line["time"] - killed, phases, "detect"))
        print(f"{victim}: {found[-1].seconds:.2f} s, {_spell(found[-1].phases_s)}", flush=True)
    request_stop(run_dir)


def _recovery(victim: str, seconds: float, phases: Mapping[str, float], rest: str) -> Recovery:
    """Returns a recovery in which `rest` is the time that no phase of the journal tells."""
    return Recovery(victim, seconds, {rest: seconds - sum(phases.values()), **phases})


def measure(config: Config, victims: Sequence[str], run_dir: Path) -> list[Recovery]:
    """Runs the job under a simulated cluster while a thread kills parts of it."""
    found: list[Recovery] = []
    failed: list[BaseException] = []

    def watch() -> None:
        try:
            observe(run_dir, began, victims, found)
        except BaseException as error:
            failed.append(error)
            request_stop(run_dir, now=True)
            raise

    began = time.time()
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    submit(config, run_dir, console=Console(file=open(os.devnull, "w")))  # noqa: SIM115
    thread.join()
    if failed:
        raise failed[0]
    return found


def medians(found: list[Recovery]) -> dict[str, dict[str, Any]]:
    """Returns per victim the median of the whole and of each phase."""
    return {
        victim: {
            "runs": len(mine := [entry for entry in found if entry.victim == victim]),
            "seconds": round(statistics.median(entry.seconds for entry in mine), 2),
            "all_seconds": [round(entry.seconds, 2) for entry in mine],
            "phases_s": {
                phase: round(statistics.median(entry.phases_s.get(phase, 0) for entry in mine), 2)
                for phase in dict.fromkeys(phase for entry in mine for phase in entry.phases_s)
            },
        }
        for victim in dict.fromkeys(entry.victim for entry in found)
    }


def draw(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns the table of medians: a column for each victim, a row for each phase."""
    table = Table("", *figures, title="medians, in seconds")
    table.add_row("to the first step", *(f"{entry['seconds']:.2f}" for entry in figures.values()))
    told = {phase for entry in figures.values() for phase in entry["phases_s"]}
    for phase in (phase for phase in PHASES if phase in told):
        seconds = (entry["phases_s"].get(phase) for entry in figures.values())
        table.add_row(f"  {phase}", *("" if value is None else f"{value:.2f}" for value in seconds))
    return table


def _spell(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description="time from a kill to the first new step")
    parser.add_argument("--runs", type=int, default=5, help="kills of each kind (5)")
    parser.add_argument("--keep", type=Path, help="run folder to keep")
    parser.add_argument("--no-warm-start", action="store_true", help="job.warm_start=false")
    parser.add_argument("--in-place", action="store_true", help="ranks only, job.in_place=true")
    parser.add_argument("--vocabulary", type=int, help="of the model: a larger one, to load")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="moebius-recovery-"))
    try:
        config = config_for(
            100_000,
            warm_start=not options.no_warm_start,
            in_place=options.in_place,
            vocabulary=options.vocabulary,
        )
        kinds = VICTIMS[:1] if options.in_place else VICTIMS
        victims = [victim for victim in kinds for _ in range(options.runs)]
        figures = medians(measure(config, victims, folder))
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    Console().print(draw(figures))
    if options.no_save:
        print(json.dumps(figures))
    else:
        name = "recovery" if not options.no_warm_start else "recovery_as_programs"
        name += "_in_place" if options.in_place else ""
        print(report.save(name, {"load_average": os.getloadavg(), "kills": figures}))


if __name__ == "__main__":
    main()
