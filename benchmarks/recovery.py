"""Measures how long a job stands still after a kill, and how long it takes to start, by phase.

    python -m benchmarks.recovery [--runs 5] [--only rank,node] [--minutes 9] [--no-save]

A simulated cluster of 3 nodes trains the recipe `smoke` on 2 of them, 2 ranks each, with a
checkpoint every 3 steps; the third node is a spare. One victim after the other gets SIGKILL a few
steps after the last recovery:

    rank, agent, template, actor   a process of that layer
    hang         a rank is stopped (SIGSTOP); a step may take 5 s (job.limits.step_s)
    supervisor   its process; counts until the job is watched again, with `next_step`, the first step
                 after the kill, because ranks do not wait for a supervisor
    node         the raylet and everything below it, at once; a new spare joins afterwards

The time runs from the kill to the time stamp of the first new step in metrics.jsonl, both on this
machine's clock. Phases come from the journal (details.phases_s of RUNNING); `detect` is the time
between the kill and its detection by the supervisor. In addition:

    submit       starts a cluster of its own and prepares the data
    submit again to the running cluster, with prepared data

Both count from the call of `submit` to the first step; `before` is the time outside all phases.
`program`, the start of Python and the imports before the call, is not counted.

All are measured in rounds until --runs or --minutes are reached. A failed sample is reported and
counted, and the job restarted. Medians go to benchmarks/results/recovery.json; --only updates the
named victims.

Cost: 90 s per round on two quiet cores.
"""

import argparse
import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import report
from moebius.cluster.job import JOURNAL, METRICS, JobError, read_generation
from moebius.cluster.nodes import processes
from moebius.cluster.places.standing import StandingCluster, end_cluster, start_cluster
from moebius.cluster.report.json_lines import JsonLinesTail
from moebius.cluster.stop import request_stop, stop
from moebius.data_pipeline.manifest import is_prepared
from moebius.train.config.run_config import Config
from moebius.train.recipes.smoke import smoke

T = TypeVar("T")
SUBMIT, SUBMIT_AGAIN = "submit", "submit again"
KILLS = ("rank", "agent", "template", "actor", "hang", "supervisor", "node")
VICTIMS = (SUBMIT, SUBMIT_AGAIN, *KILLS)
PHASES = (
    *("program", "before", "detect", "collect", "end", "wait", "place", "check", "data", "order"),
    *("processes", "join", "build", "load", "loader", "eval", "step", "next_step"),
)
NOT_COUNTED = ("program", "next_step")
STEPS_BETWEEN = 4  # more than a checkpoint's interval: the next recovery begins from a newer one
WAIT_S = 90.0
_SUBMIT = """
import sys, time
from pathlib import Path
from rich.console import Console
from moebius.cluster.submit import submit
from moebius.train.config.run_config import Config
config, run_dir, address = sys.argv[1:]
asked = Config.load(Path(config))
print(time.time(), flush=True)
submit(asked, Path(run_dir), address=address or None, detach=bool(address), console=Console(quiet=True))
"""


@dataclass(frozen=True)
class Recovery:
    """Holds the cost of one kill."""

    victim: str
    seconds: float  # from the kill to the first new step
    phases_s: Mapping[str, float]
    failure: str = ""  # why there is no time


def config_for(data: Path) -> Config:
    """Returns the recipe with checkpoints every 3 steps and without a rehearsed failure."""
    recipe = smoke().model_dump()
    recipe["train"] |= {"steps": 1_000_000, "log_every": 1, "eval_every": 0}
    recipe["checkpoint"] |= {"every": 3}
    recipe["job"] |= {
        "rehearse_failure_at_step": None,
        "max_restarts": 1000,
        "max_node_losses": 1000,
        "limits": recipe["job"]["limits"] | {"step_s": 5.0},
    }
    recipe["data"] |= {"directory": str(data)}
    return Config.model_validate(recipe)


class Observer:
    """Reads the folder of a running job, and kills its processes."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self._metrics = JsonLinesTail(run_dir / METRICS)
        self._steps: list[tuple[float, int]] = []  # when, and which

    def await_steps(self, number: int) -> None:
        """Waits until that many steps have passed."""
        began = time.time()
        self._await(lambda: len(self.steps_since(began)) >= number or None)

    def start_of(self, began: float) -> tuple[float, dict[str, float]]:
        """Waits for the first step after `began`; returns its time and the journal's phases."""
        entry = self._await(lambda: self._entry(began, "phases_s"))
        first = entry["details"]["first_step"]
        made = [when for when, step in self.steps_since(began) if step == first]
        return (made or [entry["time"]])[0], dict(entry["details"]["phases_s"])

    def takeover_of(self, began: float) -> tuple[float, dict[str, float]]:
        """Waits for the next supervisor; returns when it started watching, and the time of the next
        step.

        If a new generation had to follow, its start counts.
        """
        entry = self._await(lambda: self._entry(began, "unwatched_s"))
        if entry["state"] == "RECOVERING":
            return self.start_of(began)
        next_step = self._await(lambda: self.steps_since(began) or None)[0][0]
        return entry["time"], {"next_step": next_step - began}

    def steps_since(self, began: float) -> list[tuple[float, int]]:
        """Returns time and number of the steps since then."""
        self._steps += [
            (line["time"], line["step"])
            for line in self._metrics.read()
            if line.get("kind") == "train"
        ]
        return [made for made in self._steps if made[0] > began]

    def pid_of(self, victim: str, cluster: StandingCluster) -> int:
        """Returns the process to kill."""
        if victim == "supervisor":
            return next(pid for pid in processes.descendants(cluster.host_pid) if _supervises(pid))
        found = processes.find(str(self.run_dir), generation=read_generation(self.run_dir))
        ranks = {int(marks["RANK"]): pid for pid, marks in found.items() if "RANK" in marks}
        last = ranks[max(ranks)]
        if victim in ("rank", "hang"):
            return last
        agent = psutil.Process(last).ppid()
        if victim == "agent":
            return agent
        return psutil.Process(agent).ppid() if victim == "template" else _parent(found[agent])

    def last_node(self) -> int:
        """Returns a node used by the job that is not the cluster's head."""
        generation = read_generation(self.run_dir)
        attempts = self.run_dir.glob(f"logs/g{generation:03d}/node*/assignment.json")
        addresses = [json.loads(path.read_text())["address"] for path in attempts]
        return max(int(address.rpartition(".")[2]) - 2 for address in addresses)

    def _entry(self, began: float, key: str) -> dict[str, Any] | None:
        for line in JsonLinesTail(self.run_dir / JOURNAL).read():
            if line["time"] > began and key in line["details"]:
                return line
        return None

    def _await(self, look: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + WAIT_S
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.run_dir}: no sign of what was waited for in {WAIT_S} s")
            time.sleep(0.05)
        return found


def _supervises(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline()).startswith("ray::Supervisor")
    return False


def _parent(marks: Mapping[str, str]) -> int:
    return int(marks[processes.PARENT])


class Bench:
    """Holds the cluster, the victim job and the samples."""

    def __init__(self, folder: Path):
        """Takes the folder for all files."""
        self._folder = folder
        self._cluster: StandingCluster | None = None
        self._observer: Observer | None = None

    def sample(self, victim: str) -> Recovery:
        """Takes one sample."""
        if victim == SUBMIT:
            self.end_job()  # it would take the processors
            return self._submit(victim, self._new_folder("data"), address="")
        cluster = self._cluster_that_is_up()
        data = self._folder / "data"
        if self._observer is None and not (victim == SUBMIT_AGAIN and is_prepared(data)):
            self._submit(victim, data, address="simulated")
        if victim == SUBMIT_AGAIN:
            self.end_job()
            return self._submit(victim, data, address="simulated")
        assert self._observer is not None
        self._observer.await_steps(STEPS_BETWEEN)
        return self._kill(victim, cluster, self._observer)

    def end_job(self) -> None:
        """Ends the job on the cluster, if there is one."""
        if self._observer is not None:
            run_dir, self._observer = self._observer.run_dir, None
            request_stop(run_dir, now=True)
            with contextlib.suppress(JobError):
                stop(run_dir, now=True, timeout_s=30)

    def end(self) -> None:
        """Ends the cluster and everything in it."""
        self._observer = None
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            end_cluster(cluster, force=True)

    def _cluster_that_is_up(self) -> StandingCluster:
        if self._cluster is None or not self._cluster.is_alive():
            self._observer = None
            self._cluster = start_cluster(3, cpus_per_node=3)
        return self._cluster

    def _new_folder(self, name: str) -> Path:
        return self._folder / f"{name}-{secrets.token_hex(3)}"

    def _submit(self, victim: str, data: Path, *, address: str) -> Recovery:
        run_dir, asked = self._new_folder("run"), self._folder / "asked.json"
        config_for(data).save(asked)
        started = time.time()
        command = [sys.executable, "-c", _SUBMIT, str(asked), str(run_dir), address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            try:
                assert program.stdout is not None
                called = float(program.stdout.readline())
                observer = Observer(run_dir)
                first, phases = observer.start_of(started)
                if address:
                    self._observer = observer
                else:
                    request_stop(run_dir, now=True)
                program.wait(WAIT_S)
            except BaseException:
                program.kill()
                raise
        taken = _recovery(victim, first - called, phases, "before")
        return Recovery(victim, taken.seconds, {"program": called - started, **taken.phases_s})

    def _kill(self, victim: str, cluster: StandingCluster, observer: Observer) -> Recovery:
        if victim == "node":
            node, killed = observer.last_node(), time.time()
            cluster.ask("kill-node", node=node)
            when, phases = observer.start_of(killed)
            cluster.ask("add-node")
            return _recovery(victim, when - killed, phases, "detect")
        pid, killed = observer.pid_of(victim, cluster), time.time()
        os.kill(pid, signal.SIGSTOP if victim == "hang" else signal.SIGKILL)
        look = observer.takeover_of if victim == "supervisor" else observer.start_of
        when, phases = look(killed)
        return _recovery(victim, when - killed, phases, "detect")


def _recovery(victim: str, seconds: float, phases: Mapping[str, float], rest: str) -> Recovery:
    """Returns a recovery in which `rest` is the time outside all phases of the journal."""
    told = sum(value for phase, value in phases.items() if phase not in NOT_COUNTED)
    return Recovery(victim, seconds, {rest: seconds - told, **phases})


def measure(runs: int, victims: Sequence[str], bench: Bench, *, minutes: float) -> list[Recovery]:
    """Takes samples in rounds until there are enough or time is up; includes failures."""
    found: list[Recovery] = []
    deadline = time.monotonic() + 60 * minutes
    try:
        for victim in (victim for _ in range(runs) for victim in victims):
            if time.monotonic() > deadline:
                print(f"{minutes:g} minutes are used up", flush=True)
                break
            try:
                found.append(bench.sample(victim))
            except Exception as error:  # noqa: BLE001 - the others go on
                found.append(Recovery(victim, 0.0, {}, f"{type(error).__name__}: {error}"))
                with contextlib.suppress(Exception):
                    bench.end_job()
            last = found[-1]
            told = last.failure or f"{last.seconds:.2f} s, {_spell(last.phases_s)}"
            print(f"{victim}: {told}", flush=True)
    finally:
        with contextlib.suppress(JobError):
            bench.end_job()
        bench.end()
    return found


def medians(found: list[Recovery]) -> dict[str, dict[str, Any]]:
    """Returns the medians of the whole and of each phase per victim, and the failures."""
    return {
        victim: _median([entry for entry in found if entry.victim == victim])
        for victim in dict.fromkeys(entry.victim for entry in found)
    }


def _median(mine: list[Recovery]) -> dict[str, Any]:
    good = [entry for entry in mine if not entry.failure]
    failures = [entry.failure for entry in mine if entry.failure]
    if not good:
        return {"runs": 0, "failures": failures}
    return {
        "runs": len(good),
        "seconds": round(statistics.median(entry.seconds for entry in good), 2),
        "all_seconds": [round(entry.seconds, 2) for entry in good],
        "phases_s": {
            phase: round(statistics.median(entry.phases_s.get(phase, 0) for entry in good), 2)
            for phase in dict.fromkeys(phase for entry in good for phase in entry.phases_s)
        },
    } | ({"failures": failures} if failures else {})


def draw(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """Returns the table of medians, with a column per victim and a row per phase."""
    table = Table("", *figures, title="medians, in seconds")
    _row(table, "to the first step", [entry.get("seconds") for entry in figures.values()])
    told = {phase for entry in figures.values() for phase in entry.get("phases_s", ())}
    for phase in (phase for phase in PHASES if phase in told):
        name = f"  ({phase})" if phase in NOT_COUNTED else f"  {phase}"
        _row(table, name, [entry.get("phases_s", {}).get(phase) for entry in figures.values()])
    if any("failures" in entry for entry in figures.values()):
        failed = [str(len(entry.get("failures", ())) or "") for entry in figures.values()]
        table.add_row("failed", *failed)
    return table


def _row(table: Table, name: str, seconds: list[float | None]) -> None:
    table.add_row(name, *("" if value is None else f"{value:.2f}" for value in seconds))


def _spell(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())


def _victims(text: str) -> tuple[str, ...]:
    chosen = tuple(name.strip() for name in text.split(","))
    if unknown := [name for name in chosen if name not in VICTIMS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose of {', '.join(VICTIMS)}")
    return chosen


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description="time from a kill to the first new step")
    parser.add_argument("--runs", type=int, default=5, help="samples of each kind (5)")
    parser.add_argument("--only", type=_victims, default=VICTIMS, help=", ".join(VICTIMS))
    parser.add_argument("--minutes", type=float, default=8.5, help="then no sample is begun (8.5)")
    parser.add_argument("--no-save", action="store_true", help="print only")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what is up is ended
    with tempfile.TemporaryDirectory(prefix="moebius-recovery-") as folder:
        os.environ["XDG_STATE_HOME"] = f"{folder}/state"  # the cluster's note
        bench = Bench(Path(folder))
        found = measure(options.runs, options.only, bench, minutes=options.minutes)
    figures = medians(found)
    Console().print(draw(figures))
    if options.no_save:
        print(json.dumps(figures))
    else:
        print(
            report.save_parts("recovery", figures, {"load_average": os.getloadavg()}, under="kills")
        )


if __name__ == "__main__":
    main()
