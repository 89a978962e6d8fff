"""Runs everything that needs a GPU in one call, in under ten minutes.

    pip install --no-deps --no-build-isolation -e . && python -m benchmarks.gpu --out FOLDER

The machine needs one H100 or H200, torch ≥ 2.11, Triton ≥ 3.6, and no network. Whether the kernels
are right comes first, what they cost second, what could make them faster last:

    doctor    every kernel and NCCL (`moebius doctor --gpu`)
    tests     those that need a GPU
    layer     expert_layer_gpu.json
    step      step_gpu.json
    train     a small recipe, one rank of which is killed, so that it resumes from a checkpoint
    ceilings  gpu_ceilings.json
    tuning    tune_tiles.json and the resulting tiles.py

Every part is a separate process with a time limit. It prints and writes its figures as they come, so
a part that fails, hangs or is killed costs neither its own nor the others'. What is printed is also
in FOLDER/gpu_log.txt.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.attempt import require_gpu
from benchmarks.report import ROOT, environment

LEAST_S = 20.0  # a part is not begun with less
TIME = "{seconds}"  # in a command: the seconds that the part may plan with
TO_END_S = 12.0  # between these and its limit
POLL_S = 0.2
WHOLE_S = 540.0
MOEBIUS = (sys.executable, "-c", "from moebius.cli.main import main; main()")
TESTS = (
    "tests/kernels/triton/test_gpu.py",
    "tests/test_gpu.py",
    "tests/model/test_varlen.py::test_bfloat16_is_as_exact_as_with_the_mask",
)
RUN = (
    *("mesh.ep=1", "mesh.dp_replicate=1", "job.num_nodes=1", "job.ranks_per_node=1"),
    *("train.device=cuda", "train.steps=60", "train.log_every=1", "train.eval_every=60"),
    *("checkpoint.every=20", "job.rehearse_failure_at_step=25"),
)


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

    def __str__(self) -> str:
        return f"{self.name}: {self.state} ({self.seconds:.0f} s)"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=WHOLE_S, help="for everything")
    parser.add_argument("--parts", nargs="+", help="by name; default: all")
    options = parser.parse_args()
    require_gpu()
    folder = options.out.resolve()  # parts run in the project's folder
    folder.mkdir(parents=True, exist_ok=True)
    facts = environment()
    print(f"{facts['gpu']}, driver {facts['driver']}, {facts['versions']}, {facts['commit']}")
    with tempfile.TemporaryDirectory() as runs:
        every = chosen(parts(folder, Path(runs) / "run"), options.parts)
        ended = run_all(every, options.seconds, folder / "gpu_log.txt")
    print(*(str(part) for part in ended), sep="\n")
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    raise SystemExit(0 if all(part.state == "ok" for part in ended) else 1)


def parts(out: Path, run_dir: Path) -> list[Part]:
    """Lists all parts in order of execution; their limits add up to less than the whole time."""
    python, to = sys.executable, ("--out", str(out))
    # A kernel that hangs lets no signal through: a thread ends its worker, and another takes over.
    pytest = ("pytest", "-q", "-n", "12", "--timeout", "60", "--timeout-method", "thread", "-rf")
    pytest += ("--tb", "line", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.pytest_plugin")
    layer = ("benchmarks.kernels.expert_layer", "--device", "cuda", "--dtypes", "bfloat16")
    step = ("benchmarks.step", "--device", "cuda", "--no-compile", "--pairs", "8")
    train = (*MOEBIUS, "train", "smoke", *RUN, "--run-dir", str(run_dir))
    return [
        Part("doctor", (*MOEBIUS, "doctor", "--gpu"), 60),
        Part("tests", (python, "-m", *pytest, *TESTS), 110),
        Part("layer", (python, "-m", *layer, "--limit", TIME, *to), 85),
        Part("step", (python, "-m", *step, "--limit", TIME, *to), 105),
        Part("train", train, 55),
        Part("ceilings", (python, "-m", "benchmarks.gpu.ceilings", *to), 35),
        Part("tuning", (python, "-m", "benchmarks.gpu.tune_tiles", "--seconds", TIME, *to), 85),
    ]


def chosen(every: Sequence[Part], names: Sequence[str] | None) -> list[Part]:
    """Returns the parts with these names, or all."""
    known = [part.name for part in every]
    if unknown := set(names or ()) - set(known):
        raise SystemExit(f"no part {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    return [part for part in every if not names or part.name in names]


def run_all(every: Sequence[Part], seconds: float, log: Path) -> list[Ended]:
    """Runs the parts in order, each within its own limit and the remaining time."""
    deadline, ended = time.monotonic() + seconds, []
    for part in every:
        left = deadline - time.monotonic()
        if left < LEAST_S:
            ended.append(Ended(part.name, f"not begun: {max(left, 0):.0f} s were left", 0.0))
        else:
            ended.append(run_part(part, min(part.limit_s, left), log))
        print(f"===== {ended[-1]}", flush=True)
    return ended


def run_part(part: Part, limit_s: float, log: Path) -> Ended:
    """Runs a part in a process group of its own, which ends with it; prints what it logs."""
    command = [f"{limit_s - TO_END_S:.0f}" if word == TIME else word for word in part.command]
    started, state = time.monotonic(), f"stopped after {limit_s:.0f} s"
    with log.open("ab") as written, log.open("rb") as read:
        read.seek(0, os.SEEK_END)
        written.write(f"\n===== {part.name}: {' '.join(command)}\n".encode())
        written.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while (left := started + limit_s - time.monotonic()) > 0:
                try:
                    code = process.wait(timeout=min(POLL_S, left))
                    state = "ok" if code == 0 else f"exit code {code}"
                    break
                except subprocess.TimeoutExpired:
                    show(read.read())
        finally:
            end_group(process)
            show(read.read())
    return Ended(part.name, state, time.monotonic() - started)


def show(output: bytes) -> None:
    print(output.decode("utf-8", errors="replace"), end="", flush=True)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a part's process and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of them have ended
    process.wait()


if __name__ == "__main__":
    main()
