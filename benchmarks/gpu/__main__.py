"""Runs everything that needs a GPU in one call, in under ten minutes.

    pip install --no-deps --no-build-isolation -e . && python -m benchmarks.gpu --out FOLDER

The machine needs one H100 or H200, torch ≥ 2.11, Triton ≥ 3.6, and no network. Every part is a
separate process with a time limit that writes its figures as they come, so a failed or hung part
does not affect the others. FOLDER receives gpu_ceilings.json, tune_tiles.json and the resulting
tiles.py, expert_layer_gpu.json, step_gpu.json, and gpu_log.txt with the parts' output. Parts after
the tuning use its tiles.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console

from benchmarks.report import ROOT

LEAST_S = 30.0  # a part is not begun with less
TIME = "{seconds}"  # in a command: the seconds that the part may plan with
TO_END_S = 20.0  # between these and its limit
TESTS = "tests/kernels"  # which skips what wants a GPU where there is none


@dataclass(frozen=True)
class Part:
    """Describes a command and its time limit."""

    name: str
    command: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True)
class Ended:
    """Describes how a part ended: "ok", "exit code 3", "stopped after 60 s", "not begun: …"."""

    name: str
    state: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--parts", nargs="+", help="by name; default: all")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here: this script times nothing else")
    folder = options.out.resolve()  # parts run in the project's folder
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(width=140)
    console.print(f"[bold]{torch.cuda.get_device_name(0)}[/bold], torch {torch.__version__}")
    with (folder / "gpu_log.txt").open("w", encoding="utf-8") as log:
        ended = run_all(chosen(parts(folder), options.parts), options.seconds, log, console)
    console.print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    raise SystemExit(0 if all(part.state == "ok" for part in ended) else 1)


def parts(out: Path) -> list[Part]:
    """Lists all parts in order of execution; slow ones run with tuned tiles."""
    python, to = sys.executable, ("--out", str(out))
    layer = (python, "-m", "benchmarks.kernels.expert_layer", "--device", "cuda", "--limit", TIME)
    step = (python, "-m", "benchmarks.step", "--device", "cuda", "--limit", TIME)
    tune = (python, "-m", "benchmarks.gpu.tune_tiles", "--seconds", TIME)
    tests = (python, "-m", "pytest", "-q", "-n", "8", "-k", "gpu", TESTS)
    return [
        Part("ceilings", (python, "-m", "benchmarks.gpu.ceilings", *to), 50),
        Part("tests", tests, 110),
        Part("tuning", (*tune, *to), 95),
        Part("expert layer", (*layer, *to), 125),
        Part("whole step", (*step, *to), 200),
    ]


def chosen(every: Sequence[Part], names: Sequence[str] | None) -> list[Part]:
    """Returns the parts with these names, or all."""
    known = [part.name for part in every]
    if unknown := set(names or ()) - set(known):
        raise SystemExit(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    return [part for part in every if not names or part.name in names]


def run_all(every: Sequence[Part], seconds: float, log: TextIO, console: Console) -> list[Ended]:
    """Runs the parts in order, each within its own limit and the remaining time."""
    deadline, ended = time.monotonic() + seconds, []
    for part in every:
        left = deadline - time.monotonic()
        if left < LEAST_S:
            ended.append(Ended(part.name, f"not begun: {max(left, 0):.0f} s were left", 0.0))
        else:
            ended.append(run_part(part, min(part.limit_s, left), log))
        console.print(f"{ended[-1].name}: {ended[-1].state} ({ended[-1].seconds:.0f} s)")
    return ended


def run_part(part: Part, limit_s: float, log: TextIO) -> Ended:
    """Runs a part in a process group of its own, which ends with it."""
    command = [f"{limit_s - TO_END_S:.0f}" if word == TIME else word for word in part.command]
    log.write(f"\n===== {part.name}: {' '.join(command)}\n")
    log.flush()
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(timeout=limit_s)
        state = "ok" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        state = f"stopped after {limit_s:.0f} s"
    finally:
        end_group(process)
    return Ended(part.name, state, time.monotonic() - started)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a part's process and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of them have ended
    process.wait()


if __name__ == "__main__":
    main()
