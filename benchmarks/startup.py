"""Measures how long commands take to answer, and the imports of a job's processes.

    python -m benchmarks.startup [--runs 15] [--before FOLDER] [--steps 160] [--only NAME …]

Each case is a separate process, started repeatedly, with the cases taking turns. It reports minimum
and median of wall time, processor time and peak memory. The first round, which fills the page
cache, does not count. `import torch` and a bare Python serve as references. `--before` names a
folder with another version of the package as FOLDER/moebius, and measures the same cases there. On
a busy machine, trust the processor times and the minimum of wall time.

`--steps` sets the length of the finished run that the commands look at, with a line for every step;
`--steps 1000000 --only status watch picture history compare` shows how they grow
(startup_1000000_steps.json beside startup_1000_steps.json). `compare` reads two runs, as the command of
moebius-science does.

The measuring process imports no torch before measuring: Linux counts a parent's memory at the fork
as the child's, so no figure is below this process's 15 MiB.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

# Before 0.1.0 the command was one module, moebius.cli.
_COMMAND = """
import sys
try:
    from moebius.cli.main import main
except ImportError:
    from moebius.cli import main
main(sys.argv[1:])
"""
_AGENT = """
import moebius.cluster.nodes.agent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
"""


_PICTURE = """
import sys
from pathlib import Path
from moebius.cluster.report.summary import draw_summary
draw_summary(Path(sys.argv[1]))
"""
_HISTORY = """
import sys
import moebius
assert moebius.history(sys.argv[1]).sample()
"""
_COMPARE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from moebius_science.compare.results import read_run
config = SimpleNamespace(train=SimpleNamespace(steps=int(sys.argv[2])))
for seed in range(2):
    run = SimpleNamespace(arm="a", seed=seed, config=config, folder=Path(sys.argv[1]))
    assert read_run(run) is not None
"""


@dataclass(frozen=True)
class Case:
    """Describes one process to measure."""

    name: str
    code: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Start:
    """Holds the cost of one start of a process."""

    wall_s: float
    processor_s: float
    peak_mib: float


def cases(run_dir: Path, num_steps: int = 1000) -> list[Case]:
    """Returns all cases; the commands look at the finished run of `run_dir`."""
    run = str(run_dir)
    commands = [
        ("--help",),
        *((name, run) for name in ("status", "logs", "stop")),
        ("watch", run),
    ]
    return [
        Case("python", "pass"),
        Case("import moebius", "import moebius"),
        *(Case(f"moebius {words[0]}", _COMMAND, words) for words in commands),
        Case("picture", _PICTURE, (run,)),
        Case("history", _HISTORY, (run,)),
        Case("compare", _COMPARE, (run, str(num_steps))),
        Case("import torch", "import torch"),
        Case("an agent's imports", _AGENT),
        Case("a rank's imports", "import moebius.train.__main__"),
    ]


def measure(case: Case, packages: Path) -> Start:
    """Starts the process once and waits for its end; `packages` contains the package `moebius`.

    Raises:
        RuntimeError: its exit code is not 0.
    """
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", case.code, *case.arguments],
        env=os.environ | {"PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{case.name} in {packages} ended with exit code {process.returncode}")
    return Start(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def summarise(starts: list[Start]) -> dict[str, Any]:
    """Returns minimum and median of every figure."""
    figures: dict[str, Any] = {}
    for name, digits in (("wall_s", 3), ("processor_s", 3), ("peak_mib", 1)):
        values = [getattr(start, name) for start in starts]
        figures[name] = {
            "min": round(min(values), digits),
            "median": round(statistics.median(values), digits),
        }
    return figures


def write_run(folder: Path, num_steps: int) -> Path:
    """Writes a finished run, as a job leaves it."""
    log = folder / "logs" / "g001" / "node0" / "rank0.log"
    log.parent.mkdir(parents=True)
    log.write_text("a line of a log\n" * 100, encoding="utf-8")
    settings = {"train": {"steps": num_steps}}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    entries = [
        {"state": "SUBMITTED", "generation": 0, "reason": "1 node(s) × 1 rank(s)"},
        {"state": "SUCCEEDED", "generation": 1, "reason": f"finished at step {num_steps}"},
    ]
    _write_lines(folder / "journal.jsonl", [{"details": {}, **entry} for entry in entries])
    _write_lines(folder / "metrics.jsonl", _metrics(num_steps))
    return folder


def _metrics(num_steps: int) -> Iterator[dict[str, Any]]:
    """Yields the lines of a run with 8 experts in two depth steps, evaluated every 1,000 steps."""
    experts = {
        "expert_load": [[0.125] * 8] * 2,
        "max_violation": [0.5] * 2,
        "effective_experts": [7.5] * 2,
    }
    for step in range(1, num_steps + 1):
        yield {
            "kind": "train",
            "step": step,
            "loss": 8 / step,
            "learning_rate": 1e-3,
            "grad_norm": 1.0,
            "tokens": step * 8192,
            "tokens_per_s": 20_000.0,
            "step_s": 0.4,
            **experts,
        }
        if step % 1000 == 0:
            yield {"kind": "eval", "step": step, "loss": 8 / step}


def _write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Writes JSON lines, each with the time that all readers expect."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line | {"time": time.time()}) + "\n" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    """Measures all cases, prints them and writes benchmarks/results/startup.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=15, metavar="N", help="starts of every case")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="holds an older moebius/")
    parser.add_argument("--steps", type=int, default=1000, help="of the finished run")
    parser.add_argument("--only", nargs="+", help="cases whose names end like this")
    options = parser.parse_args(arguments)
    versions = {"now": ROOT.parent}
    if options.before is not None:
        versions["before"] = options.before.absolute()
    with tempfile.TemporaryDirectory(prefix="moebius-startup-") as folder:
        measured = cases(write_run(Path(folder) / "run", options.steps), options.steps)
        if options.only:
            measured = [case for case in measured if case.name.endswith(tuple(options.only))]
        figures = _measure_all(measured, versions, options.runs)
    _show(figures)
    facts: dict[str, Any] = {"runs": options.runs, "steps": options.steps}
    if options.before is not None:
        facts["commit_before"] = _commit_of(options.before / "moebius")
    from benchmarks.report import save

    name = f"startup_{options.steps}_steps" if options.only else "startup"
    print(f"written: {save(name, facts | figures)}")


def _measure_all(
    measured: list[Case], versions: dict[str, Path], runs: int
) -> dict[str, dict[str, Any]]:
    """Returns the figures of every case and version; the first round only fills the page cache."""
    starts: dict[tuple[str, str], list[Start]] = {}
    for attempt in range(runs + 1):
        for version, packages in versions.items():
            for case in measured:
                start = measure(case, packages)
                if attempt:
                    starts.setdefault((version, case.name), []).append(start)
    return {
        version: {case.name: summarise(starts[version, case.name]) for case in measured}
        for version in versions
    }


def _commit_of(folder: Path) -> str:
    """Returns a folder's commit."""
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _show(figures: dict[str, dict[str, Any]]) -> None:
    """Prints a line per case: minimum wall time, median processor time, peak memory."""
    for version, by_case in figures.items():
        print(f"{version:22}  wall (min)  processor (median)  peak memory")
        for name, one in by_case.items():
            print(
                f"  {name:20}  {one['wall_s']['min']:8.3f} s"
                f"  {one['processor_s']['median']:16.3f} s  {one['peak_mib']['median']:7.1f} MiB"
            )


if __name__ == "__main__":
    main()
