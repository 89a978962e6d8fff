"""Runs a comparison's runs as separate processes, several at a time, and watches them.

A finished run is not started again; a killed one resumes from its checkpoint. On Ctrl-C or SIGTERM
every run saves at its next step boundary and ends. A second signal kills them, and they resume from
their existing checkpoints. A run reads from a pipe that only this process can write to, so it ends
with this process however that ends (one_run.py).

Only one process at a time works in a folder: it holds a lock on the file `lock`.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import moebius

from ..files import read_json, write_json
from .file import CompareError
from .one_run import SCORES, SCORING
from .plan import PlannedRun

State = Literal["waiting", "running", "finished", "stopped", "failed"]
Phase = Literal["train", "score"]
Command = Callable[[PlannedRun, Phase], Sequence[str]]
Scoring = Callable[[PlannedRun], Mapping[str, Any] | None]
"""Returns what is to be scored of a trained run; None: nothing."""

LOG = "output.log"
_LOOK_S = 0.2
_END_S = 600.0  # how long runs that were asked to stop may take for their step and checkpoint
_LOG_LINES = 12


@dataclass
class RunState:
    """Holds the progress of a run, updated by the loop below."""

    run: PlannedRun
    state: State = "waiting"
    phase: Phase = "train"
    step: int = 0
    loss: float | None = None  # of training
    why: str = ""  # it failed
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)
    was_asked: bool = False  # to stop
    history: moebius.RunHistory = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Begins to follow the run."""
        self.history = moebius.RunHistory(self.run.folder)

    def read_on(self) -> None:
        """Reads the run's progress."""
        for record in self.history.new_records():
            if record.get("kind") == "train":
                self.step, self.loss = record["step"], record["loss"]


OnChange = Callable[[Sequence[RunState]], None]
OnEnd = Callable[[RunState], None]


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the folder for this process.

    Raises:
        CompareError: another process works in it, or it is not writable.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+")
    except OSError as error:
        raise CompareError(f"{folder}: cannot be written ({error.strerror})") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise CompareError(
                f"{folder}: process {file.read().strip() or 'another'} works on this comparison; "
                "wait until it has ended, stop it with Ctrl-C there, or show the results so "
                "far with --table"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
        file.truncate(0)


def restart(runs: Sequence[PlannedRun], arms: Sequence[str]) -> None:
    """Removes the run folders of arms, so that they are trained again.

    Raises:
        CompareError: there is no such arm.
    """
    known = {run.arm for run in runs}
    for arm in arms:
        if arm not in known:
            raise CompareError(
                f"--restart {arm}: is not one of the arms: {', '.join(sorted(known))}"
            )
    for run in runs:
        if run.arm in arms and run.folder.exists():
            shutil.rmtree(run.folder)


def is_trained(run: PlannedRun) -> bool:
    """Tells whether a run completed all its steps successfully."""
    history = moebius.RunHistory(run.folder)
    states = [entry["state"] for entry in history.new_states()]
    if states[-1:] != ["SUCCEEDED"]:
        return False
    steps = [record["step"] for record in history.sample() if record.get("kind") == "train"]
    return max(steps, default=0) >= run.config.train.steps


def next_phase(run: PlannedRun, scoring: Scoring) -> Phase | None:
    """Returns the next phase of a run; None if it is done."""
    if not is_trained(run):
        return "train"
    request = scoring(run)
    if request is None or read_json(run.folder / SCORES).get("request") == dict(request):
        return None
    return "score"


def command_of(run: PlannedRun, phase: Phase) -> list[str]:
    """Returns the command that trains or scores."""
    return [sys.executable, "-m", "moebius_science.compare.one_run", phase, str(run.folder)]


def run_all(
    runs: Sequence[PlannedRun],
    *,
    at_once: int,
    scoring: Scoring = lambda run: None,
    on_change: OnChange = lambda states: None,
    on_end: OnEnd = lambda state: None,
    command: Command = command_of,
) -> list[RunState]:
    """Trains and scores all unfinished runs; returns how each of them ended.

    Args:
        runs: in starting order.
        at_once: number of concurrent runs.
        scoring: what to score after training, as plain values; nothing by default.
        on_change: called with the states of all runs several times a second.
        on_end: called for every run that has ended.
        command: starts a run; it must end when its standard input ends.
    """
    states = [RunState(run) for run in runs]
    for state in states:
        phase = next_phase(state.run, scoring)
        state.phase = phase or "train"
        if phase is None:
            state.state, state.step = "finished", state.run.config.train.steps
        else:
            state.read_on()
    with _asked_to_stop() as asked:
        try:
            _loop(states, at_once, scoring, on_change, on_end, command, asked)
        finally:
            for state in states:
                _kill(state)
    return states


def _loop(
    states: Sequence[RunState],
    at_once: int,
    scoring: Scoring,
    on_change: OnChange,
    on_end: OnEnd,
    command: Command,
    asked: "Asked",
) -> None:
    while True:
        running = [state for state in states if state.state == "running"]
        waiting = [state for state in states if state.state == "waiting"]
        if not asked.times:
            for state in waiting[: max(0, at_once - len(running))]:
                _begin(state, command, scoring)
                running.append(state)
        if not running:
            on_change(states)
            return
        if asked.times:
            _stop(running, at_once_killed=asked.times > 1 or asked.is_overdue)
        for state in running:
            if _has_ended(state, scoring):
                on_end(state)
        on_change(states)
        time.sleep(_LOOK_S)


def _begin(state: RunState, command: Command, scoring: Scoring) -> None:
    """Starts the process for a run's next phase."""
    run = state.run
    run.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if state.phase == "train":
        run.config.save(run.folder / "config.json")
    else:
        write_json(run.folder / SCORING, scoring(run))
    environment = os.environ | {"OMP_NUM_THREADS": str(run.config.train.threads or 1)}
    with (run.folder / LOG).open("ab") as log:
        state.process = subprocess.Popen(
            command(run, state.phase),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process, which asks the runs to stop
        )
    state.state = "running"


def _has_ended(state: RunState, scoring: Scoring) -> bool:
    """Checks a run's process; returns whether the run has ended."""
    state.read_on()
    assert state.process is not None
    code = state.process.poll()
    if code is None:
        return False
    _kill(state)
    phase = next_phase(state.run, scoring)
    if phase is None:
        state.state, state.step = "finished", state.run.config.train.steps
    elif phase != state.phase:  # trained, and now to be scored
        state.phase, state.state = phase, "waiting"
        return False
    elif state.was_asked:
        state.state = "stopped"
    else:
        state.state, state.why = "failed", _why(state, code)
    return True


def _why(state: RunState, code: int) -> str:
    """Returns the end of a failed run's output."""
    log = state.run.folder / LOG
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
    ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
    return "\n".join([f"{state.run.name}: ended with {ended}; the end of {log}:", *lines])


# Ending -------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """Counts requests to stop, and the time of the first."""

    times: int = 0
    since_s: float = 0.0

    @property
    def is_overdue(self) -> bool:
        """Tells whether the runs have had their time."""
        return time.monotonic() - self.since_s > _END_S


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[Asked]:
    """Counts SIGINT and SIGTERM instead of ending this process."""
    asked = Asked()

    def count(number: int, frame: object) -> None:
        asked.times += 1
        asked.since_s = asked.since_s or time.monotonic()

    before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(running: Sequence[RunState], *, at_once_killed: bool) -> None:
    """Asks runs to save and end, once; kills them if that takes too long or if they only score."""
    for state in running:
        assert state.process is not None
        if at_once_killed or state.phase == "score":
            _kill(state)
        elif not state.was_asked:
            state.process.send_signal(signal.SIGINT)
        state.was_asked = True


def _kill(state: RunState) -> None:
    """Ends a run's remaining processes."""
    process = state.process
    if process is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()  # its ranks, which are in sessions of their own, see this
    process.wait()
