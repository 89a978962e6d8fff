"""Runs the tests that want a GPU in several processes, which compile their kernels side by side.

    python -m benchmarks.gpu.parallel_tests [FILES] [--processes 8] [--seconds 100]

Most of such a test's time is Triton's compiler, some 0.3 s for each of 400 kernels on one core;
tests share the GPU, and compiled kernels through Triton's cache. What a process says is printed
when it ends, and every failure with it; processes that are late are ended, and the others' results
stay. Exits with 1 unless every test passed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT

_SHARE = (
    "MOEBIUS_TEST_SHARE"  # tells a process which tests are its own: "2 8" is every 8th from 2 on
)
_MOST = 8  # processes with a context on one GPU
_NONE_RAN = 5  # pytest's exit status where there was no test
_PLUGIN = "benchmarks.gpu.parallel_tests"


@dataclass(frozen=True)
class Share:
    """A process with its share of the tests, and where it writes."""

    process: subprocess.Popen[str]
    log: Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*", help="default: all that ask for a GPU")
    parser.add_argument("--processes", type=int, default=min(_MOST, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=100.0, help="until late ones are ended")
    parser.add_argument("--out", type=Path, required=True, help="folder of the processes' logs")
    options = parser.parse_args()
    shares = start(options.files or gpu_tests(), options.processes, options.out)
    raise SystemExit(finish(shares, time.monotonic() + options.seconds))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leaves a process its share of the tests: this module is its plugin.

    Dealt out like cards, for neighbours take alike long.
    """
    first, step = map(int, os.environ[_SHARE].split())
    items[:] = items[first::step]


def gpu_tests() -> list[str]:
    """The test files that ask for a GPU."""
    kernels = sorted((ROOT / "tests" / "kernels").rglob("test_*.py"))
    asking = [path for path in kernels if "cuda.is_available" in path.read_text(encoding="utf-8")]
    return [str(path) for path in (ROOT / "tests" / "test_gpu.py", *asking)]


def start(files: Sequence[str], num_processes: int, folder: Path) -> list[Share]:
    """Starts the processes, each with its share of the files' tests."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        _PLUGIN,
        *files,
    ]
    shares = []
    for number in range(num_processes):
        log = folder / f"tests_{number}.txt"
        with log.open("w", encoding="utf-8") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env=os.environ | {_SHARE: f"{number} {num_processes}"},
            )
        shares.append(Share(process, log))
    return shares


def finish(shares: Sequence[Share], deadline: float) -> int:
    """Waits for all, prints what each says as it ends, and returns 0 if every test passed."""
    waiting, status = list(shares), 0
    while waiting:
        ended = [share for share in waiting if share.process.poll() is not None]
        if not ended and time.monotonic() > deadline:
            for share in waiting:
                share.process.kill()
                share.process.wait()
            print(f"{len(waiting)} processes were ended: their time was over", flush=True)
            ended, status = waiting, 1
        for share in ended:
            print(share.log.read_text(encoding="utf-8"), flush=True)
            status = max(status, int(share.process.returncode not in (0, _NONE_RAN)))
        waiting = [share for share in waiting if share not in ended]
        time.sleep(0.05)
    return status


if __name__ == "__main__":
    main()
