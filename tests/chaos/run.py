"""Runs a small job on a simulated cluster under random faults; it must end with the weights of an undisturbed run.

    python -m tests.chaos.run --minutes 20 --seed 7 --nodes 4          (make chaos-run)

Four simulated nodes train with one rank each while their data is tokenized. Every 20 to 60 s a fault of
plan.py is injected; a node that is powered off is replaced some seconds later. Afterwards `moebius train`
makes the same run undisturbed. Compared are the SHA-256 of all tensors in the last checkpoint, including the
optimizer's; the sample digest and loss of each step; and the SHA-256 of the prepared data. The layout never
changes, so all must be equal bit for bit.

Token batches are not damaged: without a replica, that ends a run
(tests/data_pipeline/read/test_corruption.py).

A seed always gives the same plan, but what a fault meets depends on the machine's speed. Everything is kept in
build/chaos/seed-N, with the figures in report.json. Exit code 0: equal, and no process was left.
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
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import environment
from moebius.cluster.job import State, read_status
from moebius.cluster.liveness import LivenessWatch
from moebius.cluster.places.standing import StandingCluster, end_cluster, start_cluster
from moebius.cluster.submit import submit
from moebius.data_pipeline.make.prepare import prepare
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
from tests.chaos.plan import KINDS, Planned, make_plan
from tests.chaos.victims import Target
from tests.tiny_job import MOEBIUS

ROOT = Path(__file__).resolve().parents[2]
MARK = "MOEBIUS_CHAOS"  # in the environment of every process that a chaos run starts
START_S = 240.0  # until the first step
GRACE = 3.0  # times the planned minutes, and the start: then the job is given up


def main() -> int:
    """Runs the job under fire and compares; returns the exit code."""
    given = _arguments()
    folder = ROOT / "build" / "chaos" / f"seed-{given.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mark = secrets.token_hex(8)
    os.environ |= {
        MARK: mark,
        "XDG_STATE_HOME": str(folder / "state"),
        "SLOW_S": str(slowness(given.minutes, given.nodes)),
        "OMP_NUM_THREADS": "1",
    }
    print(f"seed {given.seed}", flush=True)
    write_texts(folder, given.minutes)
    report = vars(given) | _disturbed(folder, given) | {"left": processes_left(mark)}
    is_equal = report["state"] == State.SUCCEEDED
    if is_equal:
        one, other = _results(folder, given)
        report |= {"disturbed": one, "undisturbed": other}
        is_equal = one == other
    report["environment"] = environment()
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    verdict = "EQUAL" if is_equal else "NOT EQUAL to the undisturbed run, or not finished"
    print(f"{report['reason']}; {report['generations']} generations; left: {report['left']}")
    print(f"seed {given.seed}: {verdict}; see {folder}/report.json")
    return 0 if is_equal and not report["left"] else 1


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


def _disturbed(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Runs the job under fire until it ends."""
    overrides = changes(folder, "growing", minutes=given.minutes, nodes=given.nodes)
    config = configure([*overrides, "train.start_when=1"])
    cluster = start_cluster(given.nodes, cpus_per_node=CPUS_PER_NODE)
    run_dir = folder / "disturbed"
    try:
        submit(config, run_dir, address="simulated", detach=True)
        # The cluster must end in any case; until now Ray had its own handler.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        injected = _inject(cluster, run_dir, make_plan(given.seed, given.minutes * 60))
        _await_end(run_dir, given.minutes * 60 * GRACE + START_S)
    finally:
        end_cluster(cluster, force=True)
    status = read_status(run_dir)
    return {
        "state": status.state,
        "reason": status.reason,
        "generations": status.generation,
        "steps": status.step,
        "load_average": list(os.getloadavg()),
        "injected": injected,
    }


def _inject(cluster: StandingCluster, run_dir: Path, plan: list[Planned]) -> list[str]:
    """Injects the plan's faults from the first step on, while the job runs; returns what was hit."""
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
        step, after_s = read_status(run_dir).step, time.monotonic() - began
        victim = target.hit(planned) or "nobody was there"
        injected.append(f"{after_s:6.1f} s, step {step}: {KINDS[planned.kind]}: {victim}")
        print(injected[-1], flush=True)
    return injected


def _is_over(run_dir: Path) -> bool:
    return read_status(run_dir).state.is_final


def _await_end(run_dir: Path, timeout_s: float) -> None:
    liveness, deadline = LivenessWatch(run_dir), time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if read_status(run_dir, liveness=liveness).state.is_final:
            return
        time.sleep(0.5)


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


def _results(folder: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Makes the same run undisturbed on this machine; returns what came out of both."""
    print("the same run undisturbed …", flush=True)
    os.environ["SLOW_S"] = "0"
    overrides = changes(folder, "prepared", minutes=given.minutes, nodes=given.nodes)
    words = [*MOEBIUS, "train", "smoke", *overrides, "--run-dir", str(folder / "undisturbed")]
    with open(folder / "undisturbed.log", "wb") as log:
        subprocess.run(
            words, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True
        )
    config = configure(changes(folder, "growing", minutes=given.minutes, nodes=given.nodes))
    sys.path.insert(0, str(folder))  # for the rule that makes reading slow
    # the ranks may be done before the process that prepares
    prepare(config.prepare, config.data.directory)
    return [
        {
            "weights": weights_hash(folder / run),
            "data": data_hash(folder / data),
            "curve": curve(folder / run),
        }
        for run, data in (("disturbed", "growing"), ("undisturbed", "prepared"))
    ]


if __name__ == "__main__":
    sys.exit(main())
