"""Describes a job by its run folder: what was asked for, what happened, and its current state.

The run folder is the only truth. The supervisor appends every change of state to `journal.jsonl` (one fsync
per line), touches `heartbeat` about twice a second, and announces each generation in `generation` before it
starts. Whoever can read the folder knows the job's state without Ray, even after the cluster is gone. A job
whose supervisor sends no heartbeat is LOST, never RUNNING.

Cost: one fsync per change of state (a handful per job), one utime per second, nothing per training step.
"""

import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..data_pipeline.files import append_line, write_atomically
from ..data_pipeline.words import is_published, is_run, runs_near
from ..train.record.redaction import redact, redact_values
from ..train.record.untrusted import read_text
from . import liveness
from .liveness import LivenessWatch, beat, silence_s
from .report.json_lines import JsonLinesTail

JOURNAL = "journal.jsonl"
METRICS = "metrics.jsonl"
GENERATION = "generation"
CONFIG = "config.json"
NEXT_CONFIG = "config.next.json"  # of a continued run that has not made its first step yet
SOURCE = "source.json"
SUPERVISOR = "supervisor"
RESULT = "result.json"
STOP = "stop"
PAUSE = "pause"  # set by the supervisor when a generation must make way for another
SCALE = "scale.json"

EXIT_PREEMPTED = 75
_LOOK_S = 0.2  # between two looks for a heartbeat
_USUAL_SILENCE_S = 2.0  # between two heartbeats on a busy machine
_MOST_DIGITS = 9  # of a generation or supervisor
THIS_MACHINE, SIMULATED = "this machine", "simulated for this job"  # of Launch.where


class JobError(ValueError):
    """Says why the job cannot be run as asked, and what to do."""


class State(StrEnum):
    """Names the state of a job; the last four are final, and LOST is never written to the journal."""

    SUBMITTED = "SUBMITTED"  # no supervisor has started yet
    PLACING = "PLACING"  # waiting for nodes
    PREPARING = "PREPARING"  # waiting until enough data is sealed for the ranks to begin
    STARTING = "STARTING"  # a generation has not made its first step yet
    RUNNING = "RUNNING"  # steps are being made
    RECOVERING = "RECOVERING"  # a generation has failed; the next one follows
    RESIZING = "RESIZING"  # the ranks end at a step boundary, to continue on other nodes
    STOPPING = "STOPPING"  # a stop was requested; the ranks end at a step boundary
    LOST = "LOST"  # the supervisor sends no heartbeat
    SUCCEEDED = "SUCCEEDED"
    STOPPED = "STOPPED"
    PREEMPTED = "PREEMPTED"  # saved and ended because the machines are taken away
    FAILED = "FAILED"

    @property
    def is_final(self) -> bool:
        """Returns whether the job has ended."""
        return self in (State.SUCCEEDED, State.STOPPED, State.PREEMPTED, State.FAILED)


@dataclass(frozen=True)
class Launch:
    """Holds all that the supervisor needs to start a job, as plain values."""

    run_dir: str  # absolute, reachable from every node
    num_nodes: int = 1
    ranks_per_node: int = 1
    name: str = "run"
    # of one rank; empty: the training loop, with the Python of its node
    command: tuple[str, ...] = ()
    # of ranks, over the node's; includes API keys
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    gpus_per_node: int | None = None  # None: ranks see all GPUs of the machine; 0: none
    max_restarts: int = 3
    start_timeout_s: float = 120.0  # from a generation's start to its first evaluation or step
    place_timeout_s: float = 30.0  # for a cluster that has never been large enough to grow
    backoff_s: float = 1.0  # before a restart when no step was made; doubles each time, up to 30 s
    rehearse_failure_at_step: int | None = None
    warm_start: bool = True  # agents and ranks are forks of a process that has imported everything
    prepares_data: bool = False  # beside the ranks, as the run's configuration says
    where: str = ""  # THIS_MACHINE, SIMULATED, or a cluster's address
    needs_gpus: int = 0  # of each node; checked before ranks start
    min_nodes: int | None = None  # enough to continue when nodes are lost; None: all
    wait_for_node_s: float = 60.0  # for a replacement, before continuing on fewer nodes
    reset_restarts_after_steps: int | None = 1000
    max_node_losses: int = 100
    # possible numbers of nodes, with the mesh keys that change; None: any number
    layouts: Mapping[int, Mapping[str, Any]] | None = None
    # mesh keys that change in this generation
    mesh: Mapping[str, Any] = field(default_factory=dict)
    supervisor_timeout_s: float = 120.0  # of silence, after which a node ends its ranks
    configuration: str = field(default="", repr=False)  # text of the run's config.json
    config_file: str = CONFIG  # that ranks read; a continued run keeps its own until a step is made
    source: str = field(default="", repr=False)  # text of its source.json; empty: drawn weights
    # tells its submission in the journal from others
    id: str = field(default_factory=lambda: secrets.token_hex(8), compare=False)

    @property
    def world_size(self) -> int:
        """Returns the number of ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node

    def rank_command(self) -> list[str]:
        """Returns the command line of one rank on this machine."""
        return list(self.command) or python_module("moebius.train", self.run_dir)


@dataclass(frozen=True)
class RootCause:
    """Describes why a generation ended: the failure that is not a consequence of another."""

    summary: str  # one line
    rank: int | None = None
    node: int | None = None
    exit_code: int | None = None  # negative: minus the signal
    error: str | None = None  # the exception's last line
    where: str | None = None  # file:line of the innermost frame
    traceback: str | None = None
    log: str | None = None  # relative to the run folder
    on_purpose: bool = False
    infrastructure: bool = False  # a node or an agent failed, not a rank

    @property
    def signal(self) -> str | None:
        """Returns the name of the signal that ended the rank; None without one."""
        return signal_name(self.exit_code)

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> "RootCause":
        """Reads a cause from the journal, ignoring unknown fields."""
        known = {entry.name for entry in fields(cls)}
        return cls(**{key: value for key, value in details.items() if key in known})


@dataclass(frozen=True)
class JobStatus:
    """Holds the state of a job, as the files of its run folder show it."""

    run_dir: Path
    state: State
    generation: int = 0
    restarts: int = 0
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    reason: str = ""
    root_cause: RootCause | None = None  # of the last generation that failed
    heartbeat_age_s: float | None = None
    submitted_at: float | None = None
    ended_at: float | None = None
    source: str | None = None  # what the run started from, in words; None: drawn weights
    gaps: tuple[str, ...] = ()  # in metrics.jsonl and the sinks, in words

    def __fspath__(self) -> str:
        """Returns the run folder, so that a status can be given where a run is."""
        return str(self.run_dir)

    @property
    def exit_code(self) -> int:
        """Returns the exit code of a command that watches the job.

        1 if it failed or is lost; 75 (EX_TEMPFAIL) if it was preempted; otherwise 0.
        """
        if self.state is State.PREEMPTED:
            return EXIT_PREEMPTED
        return 1 if self.state in (State.FAILED, State.LOST) else 0


class TrainingFailed(RuntimeError):
    """Reports that a run failed; the message is its root cause, `status` has the details."""

    def __init__(self, status: JobStatus):
        words = [status.reason]
        if status.root_cause is not None and status.root_cause.summary not in status.reason:
            words.append(status.root_cause.summary)
        logs = status.run_dir / "logs"
        super().__init__(f"{status.run_dir}: {status.state}: {': '.join(words)}; see {logs}")
        self.status = status


def ended_well(status: JobStatus) -> JobStatus:
    """Returns the status of a run that ended well, or continues without this process.

    Raises:
        TrainingFailed: it ended otherwise.
    """
    if status.state in (State.FAILED, State.LOST):
        raise TrainingFailed(status)
    return status


@dataclass(frozen=True)
class JournalEntry:
    """Holds one line of the journal, decoded."""

    time: float
    state: State
    generation: int
    reason: str
    details: dict[str, Any]


class Journal:
    """Appends a job's states to a file; a line is on disk before the call returns."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / JOURNAL

    def append(
        self,
        state: State,
        *,
        generation: int,
        reason: str,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Appends one state and syncs it to disk."""
        self.write(entry_of(state, generation=generation, reason=reason, details=details))

    def write(self, entry: Mapping[str, Any]) -> None:
        """Appends an entry of `entry_of`.

        Raises:
            OSError: the entry may be missing, torn or whole on disk. Writing it again is safe.
        """
        with open(self.path, "ab+", buffering=0) as file:
            append_line(file, line_of(entry))
            os.fsync(file.fileno())

    def entries(self) -> list[JournalEntry]:
        """Returns all whole entries; torn lines are skipped."""
        return parse_entries(JsonLinesTail(self.path).read())


def entry_of(
    state: State, *, generation: int, reason: str, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns a journal line of this moment as plain values, without secrets."""
    return {
        "time": time.time(),
        "state": state.value,
        "generation": generation,
        "reason": redact(reason),
        "details": redact_values(dict(details or {})),
    }


def line_of(entry: Mapping[str, Any]) -> str:
    """Returns a line of the journal, without its newline."""
    return json.dumps(entry, ensure_ascii=False)


def parse_entries(lines: Iterable[Mapping[str, Any]]) -> list[JournalEntry]:
    """Returns the journal entries among decoded lines.

    Skips the second of two lines with equal time and state: it was written again because the disk had not
    confirmed the first.
    """
    found: list[JournalEntry] = []
    for line in lines:
        try:
            entry = JournalEntry(
                float(line["time"]),
                State(line["state"]),
                int(line["generation"]),
                str(line["reason"]),
                dict(line["details"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            continue  # of another kind or of a later version
        if not found or (entry.time, entry.state) != (found[-1].time, found[-1].state):
            found.append(entry)
    return found


def current_submission(entries: list[JournalEntry]) -> list[JournalEntry]:
    """Returns the entries since the job was last submitted."""
    start = max(
        (number for number, entry in enumerate(entries) if entry.state is State.SUBMITTED),
        default=0,
    )
    return entries[start:]


def submitted_to(run_dir: Path) -> str:
    """Returns where the last job of a run folder ran (`Launch.where`); "" if that is not known."""
    entries = current_submission(Journal(run_dir).entries())
    return str(entries[0].details.get("where", "")) if entries else ""


def read_status(run_dir: Path, *, liveness: LivenessWatch | None = None) -> JobStatus:
    """Returns the state of the job in a run folder.

    Args:
        liveness: of a watcher that has looked before; a single look must trust the files' times.

    Raises:
        JobError: there is no job in this folder.
    """
    entries = Journal(run_dir).entries()
    if not entries and not run_dir.is_dir():
        raise JobError(f"{run_dir}: there is no such folder{runs_near(run_dir)}")
    if not entries:
        again = f": enter `moebius train` or `moebius submit` again with --run-dir {run_dir}"
        hint = f"; `moebius resume {run_dir}` starts one" if is_run(run_dir) else runs_near(run_dir)
        if (run_dir / CONFIG).exists() and not is_run(run_dir) and not is_published(run_dir):
            hint = again
        raise JobError(f"{run_dir}: no job was started in this folder (it has no {JOURNAL}){hint}")
    current = current_submission(entries)
    last = current[-1]
    silent_s = None
    if not last.state.is_final:
        silent_s = silence_s(run_dir) if liveness is None else liveness.silent_s()
    state, reason = _judge_life(last, silent_s)
    newest = last_train_line(run_dir)
    causes = [entry.details["root_cause"] for entry in current if "root_cause" in entry.details]
    source = current[0].details.get("source")
    return JobStatus(
        run_dir=run_dir,
        state=state,
        generation=last.generation,
        restarts=sum(entry.state is State.RECOVERING for entry in current),
        step=newest["step"] if newest else _told_step(current),
        total_steps=total_steps(run_dir),
        # text if it is not finite, None if no target counted
        loss=None if newest is None or newest["loss"] is None else float(newest["loss"]),
        reason=reason,
        root_cause=RootCause.from_details(causes[-1]) if causes else None,
        heartbeat_age_s=silent_s,
        submitted_at=current[0].time,
        ended_at=last.time if last.state.is_final else None,
        source=source if isinstance(source, str) else None,
        gaps=_gaps(entries),
    )


def _told_step(entries: Sequence[JournalEntry]) -> int | None:
    """Returns the newest step that the journal names, for runs whose metrics were deleted."""
    steps = [entry.details.get(name) for entry in entries for name in ("first_step", "step")]
    return next((step for step in reversed(steps) if isinstance(step, int)), None)


def _gaps(entries: Sequence[JournalEntry]) -> tuple[str, ...]:
    """Returns what the records lack by now: the last word on each of them."""
    gaps: dict[str, str] = {}
    for entry in entries:
        match entry.details.get("gap"):
            case {"of": str(name), "lost": lost}:
                gaps[name] = entry.reason if lost else ""
    return tuple(filter(None, gaps.values()))


def _judge_life(last: JournalEntry, silent_s: float | None) -> tuple[State, str]:
    if silent_s is None or silent_s <= liveness.LOST_AFTER_S:
        return last.state, last.reason
    return (
        State.LOST,
        f"was {last.state} ({last.reason}); its supervisor has sent no heartbeat for "
        f"{silent_s:.0f} s",
    )


def last_train_line(run_dir: Path) -> dict[str, Any] | None:
    """Returns the newest metrics line about a step; None before the first.

    It reads the end of the file first, since followers call this several times a second.
    """
    for num_bytes in (32 << 10, 256 << 10, 4 << 20):
        for line in reversed(
            JsonLinesTail.near_the_end(run_dir / METRICS, num_bytes=num_bytes).read()
        ):
            if line.get("kind") == "train":
                return line
    return None


def total_steps(run_dir: Path, config_file: str = CONFIG) -> int | None:
    """Returns the number of steps in the run's configuration; None if it is missing there."""
    try:
        steps = json.loads(read_text(run_dir / config_file) or "")["train"]["steps"]
    except (KeyError, ValueError, TypeError, RecursionError):
        return None
    return steps if isinstance(steps, int) and 0 < steps < 2**63 else None


def refuse_if_running(run_dir: Path, *, tell: Callable[[str], object] = lambda words: None) -> None:
    """Raises JobError if a live supervisor is at work in this folder.

    A supervisor that was killed a moment ago has left a fresh heartbeat. So this waits for the next one, at
    most until the job counts as LOST.

    Args:
        tell: called if the wait takes more than a moment, with how long it may take.
    """
    try:
        status = read_status(run_dir)
    except JobError:
        return
    if status.state.is_final or status.state is State.LOST:
        return
    watch, told = LivenessWatch(run_dir), False
    silent_s = watch.silent_s()
    while silent_s <= liveness.LOST_AFTER_S:
        time.sleep(_LOOK_S)
        before_s, silent_s = silent_s, watch.silent_s()
        if silent_s < before_s:
            raise JobError(
                f"{run_dir}: a job is already running here ({status.state}, generation "
                f"{status.generation}): stop it with `moebius stop`, or choose another run folder"
            )
        if not told and silent_s > _USUAL_SILENCE_S:
            told = True
            tell(
                f"{run_dir}: a job was running here {silent_s:.0f} s ago ({status.state}); "
                f"without a heartbeat for another {liveness.LOST_AFTER_S - silent_s:.0f} s, it "
                "counts as dead and the folder is free"
            )


def begin_submission(launch: Launch, **details: Any) -> None:
    """Opens the job's journal, stores its configuration, and removes flags of an earlier submission.

    It checks again that no job runs here: preparing the data may have taken an hour since the first check.

    Raises:
        JobError: a job is running here, or the folder cannot be written.
    """
    run_dir = Path(launch.run_dir)
    refuse_if_running(run_dir)
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in (STOP, PAUSE, SCALE, NEXT_CONFIG):
            (run_dir / left).unlink(missing_ok=True)
        if launch.configuration:
            write_atomically(run_dir / launch.config_file, launch.configuration)
        if launch.source:
            write_atomically(run_dir / SOURCE, launch.source)
        beat(run_dir)
        Journal(run_dir).append(
            State.SUBMITTED,
            generation=read_generation(run_dir),
            reason=f"{launch.num_nodes} node(s) × {launch.ranks_per_node} rank(s)",
            details={"id": launch.id, "name": launch.name, "where": launch.where} | details,
        )
    except OSError as error:
        raise JobError(
            f"{run_dir}: the run folder cannot be written ({error.strerror}); choose another one"
        ) from None


def read_generation(run_dir: Path) -> int:
    """Returns the number of the last generation; 0 before the first.

    The journal and the logs count too, because a copied or damaged file `generation` must not lead to a number
    that is used twice. If the file is lost, the last generation may have been announced without starting.
    """
    known = [entry.generation for entry in Journal(run_dir).entries()]
    last = max(*known, last_logged(run_dir), 0)
    announced = _whole_number(run_dir / GENERATION)
    if announced is not None:
        return max(announced, last)
    return last + 1 if last or (run_dir / GENERATION).exists() else 0


def last_logged(run_dir: Path) -> int:
    """Returns the highest number of a generation that left logs; 0 without any."""
    names = [path.name[1:] for path in (run_dir / "logs").glob("g[0-9][0-9][0-9]*")]
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=0)


def _whole_number(path: Path) -> int | None:
    """Returns the number in a file; None if there is none."""
    text = (read_text(path) or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


class ReplacedError(Exception):
    """Says that another supervisor has taken over this one's nodes."""


@dataclass(frozen=True)
class SupervisorNumber:
    """Identifies one supervisor of a run; each takes the next number when it begins.

    One that finds a higher number has a successor: it writes and ends nothing more, and nodes refuse calls with
    a lower number than the last caller's. (The generation's number fences ranks. A generation may outlive its
    supervisor, so supervisors have their own number.)
    """

    run_dir: Path
    number: int

    @classmethod
    def take(cls, run_dir: Path) -> "SupervisorNumber":
        """Takes the next number, which replaces all earlier supervisors."""
        number = last_supervisor(run_dir) + 1
        write_atomically(run_dir / SUPERVISOR, str(number))
        return cls(run_dir, number)

    def check(self) -> None:
        """Raises ReplacedError if this supervisor has a successor; restores a lost or damaged number."""
        if (current := last_supervisor(self.run_dir)) > self.number:
            raise ReplacedError(f"supervisor {self.number} was replaced by {current}")
        if current < self.number:
            with contextlib.suppress(OSError):  # retried at the next look
                write_atomically(self.run_dir / SUPERVISOR, str(self.number))


def last_supervisor(run_dir: Path) -> int:
    """Returns the number of the last supervisor; 0 before the first, and if the file is damaged."""
    return _whole_number(run_dir / SUPERVISOR) or 0


def python_module(name: str, *words: str) -> list[str]:
    """Returns the command that runs a module with this Python.

    Files of the working folder shadow no module (-P): a `token.py` there would end Python itself. A user's own
    parts are found there nevertheless, after everything else (plugins.py).
    """
    return [sys.executable, "-P", "-m", name, *words]


def signal_name(exit_code: int | None) -> str | None:
    """Returns the signal that an exit code stands for: SIGKILL for -9, None for 1."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def as_details(cause: RootCause) -> dict[str, Any]:
    """Returns a root cause as the journal stores it, without empty values."""
    return {
        key: value
        for key, value in asdict(cause).items()
        if value is not None and value is not False
    }
