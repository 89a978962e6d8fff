"""What a step of every arm costs in time and memory, relative to the baseline's.

Apart from training, on a machine that does nothing else: one short run after the other, each in a
process of its own, the arms in turn and every round anew, so that what changes slowly (clock,
temperature) meets all arms alike. Times are paired by round: a ratio is that of two runs beside each
other. Memory is the peak above what the process held before the model was built: weights, gradients,
optimizer, activations.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebius.train.config.run_config import Config

from .environment import environment
from .file import CompareError, ComparisonFile
from .plan import Arm
from .runner import LOG, read_json
from .statistics import Spread, spread

REQUEST, MEASURED = "cost_request.json", "cost_measured.json"
_QUIET = 0.1  # of a core: what others may take without a word
_WATCH_S = 0.5


@dataclass(frozen=True)
class Measured:
    """Holds one short run of an arm."""

    step_s: float  # median, after warming up
    peak_bytes: int | None  # None: this system does not tell
    busy_cores: float  # taken by other processes just before


@dataclass(frozen=True)
class ArmCost:
    """Sums up an arm over the rounds."""

    arm: Arm
    step_s: Spread
    time_ratio: Spread  # to the baseline, by round
    peak_bytes: int | None  # the largest of the rounds
    memory_ratio: float | None


@dataclass(frozen=True)
class Costs:
    """Holds what was measured, and where."""

    file: ComparisonFile
    arms: tuple[ArmCost, ...]
    rounds: int
    steps: int
    busy_cores: float  # the largest before any run
    environment: dict[str, Any]

    @property
    def was_quiet(self) -> bool:
        """Returns whether the machine did nothing else."""
        return self.busy_cores <= _QUIET


Measure = Callable[[Arm, Path, int], Measured]


def measure_costs(
    file: ComparisonFile,
    arms: Sequence[Arm],
    folder: Path,
    *,
    rounds: int,
    steps: int,
    on_run: Callable[[str], None] = lambda words: None,
    measure: Measure | None = None,
) -> Costs:
    """Measures all arms in turn, round by round.

    Raises:
        CompareError: a run failed, or an arm has several ranks.
    """
    for arm in arms:
        if arm.config.world_size > 1:
            raise CompareError(
                f"arm {arm.name}: cost is measured on one rank, and job.ranks_per_node="
                f"{arm.config.job.ranks_per_node}: give job.ranks_per_node=1 mesh.ep=1"
            )
    measure = measure or _measure_in_process
    found: dict[str, list[Measured]] = {arm.name: [] for arm in arms}
    for number in range(rounds):
        for arm in arms:
            measured = measure(arm, folder / arm.name, steps)
            found[arm.name].append(measured)
            on_run(f"round {number + 1}, {arm.name}: {measured.step_s * 1e3:.1f} ms a step")
    return Costs(
        file=file,
        arms=tuple(_sum_up(arm, found[arm.name], found[file.baseline]) for arm in arms),
        rounds=rounds,
        steps=steps,
        busy_cores=max(run.busy_cores for runs in found.values() for run in runs),
        environment=environment(),
    )


def _sum_up(arm: Arm, runs: Sequence[Measured], baseline: Sequence[Measured]) -> ArmCost:
    ratios = [ours.step_s / theirs.step_s for ours, theirs in zip(runs, baseline, strict=True)]
    ours, theirs = _peak(runs), _peak(baseline)
    return ArmCost(
        arm=arm,
        step_s=spread([run.step_s for run in runs]),
        time_ratio=spread(ratios),
        peak_bytes=ours,
        memory_ratio=ours / theirs if ours is not None and theirs else None,
    )


def _peak(runs: Sequence[Measured]) -> int | None:
    peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
    return max(peaks) if peaks else None


def _measure_in_process(arm: Arm, folder: Path, steps: int) -> Measured:
    """Runs some steps of an arm in a new process, and waits for it."""
    folder.mkdir(parents=True, exist_ok=True)
    arm.config.save(folder / "config.json")
    (folder / REQUEST).write_text(json.dumps({"steps": steps}), encoding="utf-8")
    (folder / MEASURED).unlink(missing_ok=True)
    busy = busy_cores()
    command = [sys.executable, "-m", "moebius_science.compare.one_run", "cost", str(folder)]
    threads = {"OMP_NUM_THREADS": str(arm.config.train.threads or 1)}
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | threads,
            start_new_session=True,
        )
        try:
            code = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = read_json(folder / MEASURED)
    if code or not found:
        raise CompareError(
            f"arm {arm.name}: could not be measured (exit code {code}): {folder / LOG}"
        )
    return Measured(statistics.median(found["steps_s"]), found["peak_bytes"], busy)


def busy_cores() -> float:
    """Returns how many cores are taken by others, this process being asleep."""
    import psutil

    return psutil.cpu_percent(interval=_WATCH_S) / 100 * (psutil.cpu_count() or 1)


# In the process that is measured ------------------------------------------------------------------

_WARM_STEPS = 3


def measure_here(folder: Path) -> None:
    """Runs the steps that a folder asks for, and writes what they took beside its request."""
    config = Config.load(folder / "config.json")
    found = measure_steps(config, folder, read_json(folder / REQUEST)["steps"])
    (folder / MEASURED).write_text(json.dumps(found) + "\n", encoding="utf-8")


def measure_steps(config: Config, folder: Path, steps: int) -> Mapping[str, Any]:
    """Returns the seconds of every step after the first ones, and the peak of memory."""
    import time

    import torch

    from moebius.distributed.process.process import start_process
    from moebius.train.loop import step
    from moebius.train.optim import learning_rate_at
    from moebius.train.rank_data import open_loader
    from moebius.train.run import assemble

    from .peak_memory import peak_bytes

    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    seconds: list[float] = []
    with start_process(config.train.device) as process:

        def work() -> None:
            run = assemble(config, folder, process)
            with open_loader(run, None) as loader:
                for number in range(_WARM_STEPS + steps):
                    batch = next(loader)
                    began_s = time.perf_counter()
                    step(run, batch, learning_rate_at(config.optim, number))
                    if process.device.type == "cuda":
                        torch.cuda.synchronize(process.device)
                    seconds.append(time.perf_counter() - began_s)

        peak = peak_bytes(work, process.device)
    return {"steps_s": seconds[_WARM_STEPS:], "peak_bytes": peak}
