"""Runs a small job on a simulated cluster under random faults; it must end with the weights of an undisturbed run.

    python -m tests.chaos.run --minutes 20 --seed 7 --nodes 4          (make chaos-run)

Four simulated nodes train with one rank each while their data is tokenized. Every 20 to 60 s a fault of
plan.py is injected; a node that is powered off is replaced some seconds later. Afterwards `moebius train`
makes the same run undisturbed. Compared are the SHA-256 of all tensors in the last checkpoint, including the
optimizer's; the sample digest and loss of each step; and the SHA-256 of the prepared data. The layout never
changes, so all must be equal bit for bit.

Token batches are not damaged: without a replica, that ends a run as configured
(tests/data_pipeline/read/test_corruption.py).

The plan is printed first; a seed always gives the same plan, but what a fault meets depends on the machine's
speed. Everything is kept in build/chaos/seed-N; report.json there has the figures (record.py keeps them).
Exit code 0: equal, and no process was left.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.report import environment
from moebius.cluster.job import Journal, JournalEntry, State, read_status
from moebius.cluster.liveness import LivenessWatch
from moebius.cluster.places.standing import StandingCluster, end_cluster, start_cluster
from moebius.cluster.submit import submit
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.manifest import read_manifest
from tests.chaos.job_under_fire import (
    CPUS_PER_NODE,
    changes,
    configure,
    curve,
    data_hash,
    slowness,
    weights_hash,
    write_texts,
)
from tests.chaos.plan import KINDS, WITHOUT_RECOVERY, Planned, make_plan
from tests.chaos.victims import Target
from tests.tiny_job import MOEBIUS

ROOT = Path(__file__).resolve().parents[2]
MARK = "MOEBIUS_CHAOS"  # in the environment of every process that a chaos run starts
START_S = 240.0  # until the first step
GRACE = 3.0  # times the planned minutes, and the start: then the job is given up


@dataclass(frozen=True)
class Injected:
    """One injected fault, and the recovery that the journal shows."""

    at_s: float
    kind: str
    victim: str
    step: int | None
    generation: int
    recovery_s: float | None = None  # to the first step after it, as the journal tells
    way: str = ""  # in which the job recovered


def main() -> int:
    """Runs the job under fire and compares; returns the exit code."""
    given = _arguments()
    folder = ROOT / "build" / "chaos" / f"seed-{given.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark = secrets.token_hex(8)
    own = {
        MARK: mark,
        "XDG_STATE_HOME": str(folder / "state"),
        "SLOW_S": str(slowness(given.minutes, given.nodes)),
    }
    os.environ.update(own | {"OMP_NUM_THREADS": "1"})
    console = Console()
    plan = make_plan(given.seed, given.minutes * 60)
    console.print(_plan_table(given.seed, plan))
    write_texts(folder, given.minutes)
    injected, report = _disturbed(folder, plan, given, console)
    report["left"] = processes_left(mark)
    report["injected"] = [asdict(one) for one in injected]
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    if report["state"] == State.SUCCEEDED.value:
        report |= _compare(folder, given, console)
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    return _tell(injected, report, console)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=20.0, help="of injections")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10_000))
    parser.add_argument("--nodes", type=int, default=4)
    given = parser.parse_args()
    if given.minutes <= 0 or given.nodes < 2:
        parser.error("--minutes must be above 0, and --nodes at least 2")
    return given


def _disturbed(
    folder: Path, plan: list[Planned], given: argparse.Namespace, console: Console
) -> tuple[list[Injected], dict[str, Any]]:
    """Runs the job under fire until it ends."""
    overrides = changes(folder, "growing", minutes=given.minutes, nodes=given.nodes)
    overrides += ["train.start_when=1"]
    config = configure(overrides)
    cluster = start_cluster(given.nodes, cpus_per_node=CPUS_PER_NODE)
    run_dir = folder / "disturbed"
    try:
        submit(config, run_dir, address="simulated", detach=True, console=console)
        # The cluster must end in any case; until now Ray had its own handler.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        injected = _inject(cluster, run_dir, plan, console)
        _await_end(run_dir, given.minutes * 60 * GRACE + START_S)
    finally:
        end_cluster(cluster, force=True)
    status = read_status(run_dir)
    entries = Journal(run_dir).entries()
    report = {
        "seed": given.seed,
        "minutes": given.minutes,
        "nodes": given.nodes,
        "state": status.state.value,
        "reason": status.reason,
        "generations": status.generation,
        "steps": status.step,
        "took_s": round(entries[-1].time - entries[0].time, 1),
        "load_average": list(os.getloadavg()),
        "environment": environment(),
    }
    return [_with_recovery(one, entries) for one in injected], report


def _inject(
    cluster: StandingCluster, run_dir: Path, plan: list[Planned], console: Console
) -> list[Injected]:
    """Injects the plan's faults from the first step on, while the job runs."""
    deadline = time.monotonic() + START_S
    while read_status(run_dir).step is None and not _is_over(run_dir):
        if time.monotonic() > deadline:
            return []
        time.sleep(0.5)
    target, began, injected = Target(cluster, run_dir), time.monotonic(), []
    for planned in plan:
        while time.monotonic() - began < planned.at_s and not _is_over(run_dir):
            time.sleep(0.5)
        if _is_over(run_dir):
            break
        status, now = read_status(run_dir), time.time()
        victim = target.hit(planned)
        one = Injected(now, planned.kind, victim, status.step, status.generation)
        injected.append(one)
        seconds = time.monotonic() - began
        words = f"{seconds:6.1f} s, step {status.step}: {KINDS[planned.kind]}: {victim or 'nobody'}"
        console.print(Text(words))
    return injected


def _is_over(run_dir: Path) -> bool:
    return read_status(run_dir).state.is_final


def _await_end(run_dir: Path, timeout_s: float) -> None:
    liveness, deadline = LivenessWatch(run_dir), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if read_status(run_dir, liveness=liveness).state.is_final:
            return
        time.sleep(0.5)


def _with_recovery(one: Injected, entries: list[JournalEntry]) -> Injected:
    """Adds how the job recovered, and the time from the fault to the first step after it.

    A supervisor that takes over a running generation journals `unwatched_s`; steps continue meanwhile.
    """
    at_s, found = round(one.at_s - entries[0].time, 1), replace(one)
    if one.victim and one.kind not in WITHOUT_RECOVERY:
        is_recovering = False
        for entry in (entry for entry in entries if entry.time > one.at_s):
            is_recovering |= entry.state is State.RECOVERING
            taken_over = not is_recovering and "unwatched_s" in entry.details
            has_step = entry.state is State.RUNNING and "phases_s" in entry.details
            if taken_over or (is_recovering and has_step):
                way = "taken over" if taken_over else "a new generation"
                found = replace(one, recovery_s=round(entry.time - one.at_s, 1), way=way)
                break
    return replace(found, at_s=at_s)


def processes_left(mark: str, *, within_s: float = 10.0) -> list[str]:
    """Returns the command lines of this run's processes that are still alive."""
    deadline = time.monotonic() + within_s
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _marked(mark: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
        except (psutil.Error, OSError):
            continue
    return found


def _compare(folder: Path, given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Makes the same run undisturbed on this machine, and compares."""
    console.print("the same run undisturbed …")
    os.environ["SLOW_S"] = "0"
    overrides = changes(folder, "prepared", minutes=given.minutes, nodes=given.nodes)
    run_dir = folder / "undisturbed"
    with open(folder / "undisturbed.log", "wb") as log:
        subprocess.run(
            [*MOEBIUS, "train", "smoke", *overrides, "--run-dir", str(run_dir)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=True,
        )
    disturbed = folder / "disturbed"
    config = configure(changes(folder, "growing", minutes=given.minutes, nodes=given.nodes))
    directory = config.data.directory
    sys.path.insert(0, str(folder))  # for the rule that makes reading slow
    was_complete = read_manifest(directory).complete
    prepare(config.prepare, directory)  # the ranks may be done before the process that prepares
    one, other = curve(disturbed), curve(run_dir)
    return {
        "prepared to the end": was_complete,
        "weights": [weights_hash(disturbed), weights_hash(run_dir)],
        "data": [data_hash(folder / "growing"), data_hash(folder / "prepared")],
        "digests equal": {k: v[0] for k, v in one.items()} == {k: v[0] for k, v in other.items()},
        "losses equal": one == other,
    }


def _is_equal(report: dict[str, Any]) -> bool:
    return (
        report["state"] == State.SUCCEEDED.value
        and len(set(report["weights"])) == len(set(report["data"])) == 1
        and report["digests equal"]
        and report["losses equal"]
    )


def _tell(injected: list[Injected], report: dict[str, Any], console: Console) -> int:
    table = Table("after", "step", "injected", "hit", "goes on after", "by")
    for one in injected:
        recovery = "–" if one.recovery_s is None else f"{one.recovery_s:.1f} s"
        victim = Text(one.victim or "nobody was there")
        after = f"{one.at_s:.0f} s"
        table.add_row(after, str(one.step), KINDS[one.kind], victim, recovery, one.way)
    console.print(table)
    left, is_equal = report["left"], _is_equal(report)
    for key, value in report.items():
        if key not in ("injected", "left", "environment"):
            console.print(Text(f"{key}: {value}"), highlight=False)
    console.print(Text("processes left: " + ("none" if not left else "; ".join(left))))
    verdict = "EQUAL" if is_equal else "NOT EQUAL to the undisturbed run, or not finished"
    console.print(Text(f"seed {report['seed']}: {verdict}", style="green" if is_equal else "red"))
    return 0 if is_equal and not left else 1


def _plan_table(seed: int, plan: list[Planned]) -> Table:
    table = Table("after", "injected", "draw", title=f"plan of seed {seed}")
    for planned in plan:
        table.add_row(f"{planned.at_s:.1f} s", KINDS[planned.kind], f"{planned.draw:.3f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
