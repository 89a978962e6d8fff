"""A job as its run folder tells it: what was asked for, what happened, how it stands.

The run folder is the only truth. The supervisor appends every change of state to `journal.jsonl`
(fsync per line), touches `heartbeat` about twice a second and announces each attempt in `generation`
before it starts. Anybody who can read the folder can therefore tell how a job stands, without Ray
and after the cluster is gone; a job whose supervisor has stopped breathing is reported as LOST,
never as RUNNING.

Cost: one fsync per change of state (a handful per job), one utime per second, nothing per training
step.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from ..train.record.process_log import MAX_BYTES, PIECES
from ..train.record.redaction import redact, redact_values
from . import liveness
from .liveness import LivenessWatch, beat, silence_s
from .report.json_lines import JsonLinesTail

JOURNAL = "journal.jsonl"
METRICS = "metrics.jsonl"
GENERATION = "generation"
RESULT = "result.json"
STOP = "stop"
PAUSE = "pause"  # set by the supervision, for a generation that is to make way for another
SCALE = "scale.json"

EXIT_PREEMPTED = 75
_LOOK_S = 0.2  # between two looks for a sign of life
_USUAL_SILENCE_S = 2.0  # between two signs of life on a busy machine
THIS_MACHINE, SIMULATED = "this machine", "simulated"  # of Launch.where


class JobError(ValueError):
    """Says why the job cannot be run as asked, and what to do."""


class State(StrEnum):
    """Names where a job stands.

    The last four are ends; LOST is only ever reported, never written.
    """

    SUBMITTED = "SUBMITTED"  # handed over; nobody has taken it up yet
    PLACING = "PLACING"  # waiting for nodes
    PREPARING = "PREPARING"  # waiting until so much data is sealed that the ranks may begin
    STARTING = "STARTING"  # a generation's processes are on their way to their first step
    RUNNING = "RUNNING"  # steps are being made
    RECOVERING = "RECOVERING"  # a generation has failed; the next one follows
    RESIZING = "RESIZING"  # the ranks end at a step boundary, to go on with other nodes
    STOPPING = "STOPPING"  # a stop was asked for; the ranks end at a step boundary
    LOST = "LOST"  # the supervisor gives no sign of life
    SUCCEEDED = "SUCCEEDED"
    STOPPED = "STOPPED"
    PREEMPTED = "PREEMPTED"  # saved and ended because the machines are taken away
    FAILED = "FAILED"

    @property
    def is_final(self) -> bool:
        """Whether the job has ended."""
        return self in (State.SUCCEEDED, State.STOPPED, State.PREEMPTED, State.FAILED)


@dataclass(frozen=True)
class Launch:
    """Says what is to be started, and where: all that the supervisor needs, as plain values."""

    run_dir: str  # absolute, reachable from every node
    num_nodes: int = 1
    ranks_per_node: int = 1
    name: str = "run"
    # Of one rank; empty: the training loop, with the Python of the node it runs on.
    command: tuple[str, ...] = ()
    # of ranks, over the node's; keys of services are among it
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    gpus_per_node: int | None = None  # None: ranks see what the machine has; 0: they see no GPU
    max_restarts: int = 3
    start_timeout_s: float = 120.0  # from a generation's start to its first evaluation or step
    place_timeout_s: float = 30.0  # for a cluster that has never held the job to get larger
    backoff_s: float = 1.0  # before a restart when no step was made; doubles each time, up to 30 s
    rehearse_failure_at_step: int | None = None
    warm_start: bool = True  # agents and ranks are forks of a process that has imported everything
    placed_ahead: bool = False  # its nodes are being started already
    prepares_data: bool = False  # beside the ranks, as the run folder's configuration says
    where: str = ""  # it was submitted to: THIS_MACHINE, SIMULATED, or a cluster's address
    needs_gpus: int = 0  # of each node; looked for before ranks are started
    min_nodes: int | None = None  # to go on with when nodes are lost; None: all of them
    wait_for_node_s: float = 60.0  # for a replacement, before it goes on with fewer
    give_up_after_s: float | None = None  # without enough nodes; None: never
    reset_restarts_after_steps: int | None = 1000
    max_node_losses: int = 100
    # The numbers of nodes that fit, with the keys of the mesh that change; None: any number does.
    layouts: Mapping[int, Mapping[str, Any]] | None = None
    mesh: Mapping[str, Any] = field(default_factory=dict)  # its keys that change, of a generation
    supervisor_timeout_s: float = 120.0  # a node that hears nothing for so long ends its ranks
    log_max_bytes: int = MAX_BYTES
    log_pieces: int = PIECES

    @property
    def world_size(self) -> int:
        """Returns the number of ranks on all nodes."""
        return self.num_nodes * self.ranks_per_node

    def rank_command(self) -> list[str]:
        """Returns the command line of one rank on the machine where this is called."""
        return list(self.command) or [sys.executable, "-m", "moebius.train", self.run_dir]


@dataclass(frozen=True)
class RootCause:
    """Says why a generation ended: the failure that is not a mere consequence of another."""

    summary: str  # one line
    rank: int | None = None
    node: int | None = None
    exit_code: int | None = None  # negative: minus the signal
    error: str | None = None  # the exception's last line
    where: str | None = None  # file:line of the innermost frame
    traceback: str | None = None
    log: str | None = None  # relative to the run folder
    on_purpose: bool = False
    infrastructure: bool = False  # a node or an agent died, not what ran on it

    @property
    def signal(self) -> str | None:
        """Returns the name of the signal that ended the rank, if one did."""
        return signal_name(self.exit_code)

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> "RootCause":
        """Reads a cause from the journal; fields that are not known are left out."""
        known = {entry.name for entry in fields(cls)}
        return cls(**{key: value for key, value in details.items() if key in known})


@dataclass(frozen=True)
class JobStatus:
    """Says how a job stands, from the files of its run folder alone."""

    run_dir: Path
    state: State
    generation: int = 0
    restarts: int = 0
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    reason: str = ""
    root_cause: RootCause | None = (
        None  # of the last generation that failed, even if the job recovered
    )
    heartbeat_age_s: float | None = None
    submitted_at: float | None = None
    ended_at: float | None = None

    @property
    def exit_code(self) -> int:
        """Returns the exit code of a command that watched the job.

        1 if it failed or is lost; 75 (EX_TEMPFAIL: try again) if it was preempted.
        """
        if self.state is State.PREEMPTED:
            return EXIT_PREEMPTED
        return 1 if self.state in (State.FAILED, State.LOST) else 0


@dataclass(frozen=True)
class JournalEntry:
    """Holds one line of the journal."""

    time: float
    state: State
    generation: int
    reason: str
    details: dict[str, Any]


class Journal:
    """Records a job's states, append-only; a line is on disk before the call returns."""

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
        """Appends one state and makes sure that it is on disk."""
        self.write(entry_of(state, generation=generation, reason=reason, details=details))

    def write(self, entry: Mapping[str, Any]) -> None:
        """Appends an entry that `entry_of` has made.

        Raises:
            OSError: it is not certain to be on disk: none, part or all of it may be. It may be
                written again.
        """
        line = json.dumps(entry, ensure_ascii=False) + "\n"
        with open(self.path, "ab+") as file:
            if file.tell() and not _ends_with_newline(file):
                # a writer was killed mid-line: its fragment must not swallow this entry
                line = "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def entries(self) -> list[JournalEntry]:
        """Returns all whole entries; a line that was torn by a kill is skipped."""
        return parse_entries(JsonLinesTail(self.path).read())


def entry_of(
    state: State, *, generation: int, reason: str, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns a line of the journal as plain values, of this moment, without secrets."""
    return {
        "time": time.time(),
        "state": state.value,
        "generation": generation,
        "reason": redact(reason),
        "details": redact_values(dict(details or {})),
    }


def parse_entries(lines: Iterable[Mapping[str, Any]]) -> list[JournalEntry]:
    """Returns the journal entries of decoded lines; lines that are none are skipped.

    So is the second of two lines of one moment: it was written again, because the disk did not
    confirm the first.
    """
    states = {state.value: state for state in State}
    found: list[JournalEntry] = []
    for line in lines:
        if line.get("state") not in states or "time" not in line:
            continue
        state = states[line["state"]]
        entry = JournalEntry(
            line["time"], state, line["generation"], line["reason"], line["details"]
        )
        if not found or (entry.time, state) != (found[-1].time, found[-1].state):
            found.append(entry)
    return found


def current_submission(entries: list[JournalEntry]) -> list[JournalEntry]:
    """Returns the entries since the job was last submitted.

    A run folder may be submitted again, to go on.
    """
    start = max(
        (number for number, entry in enumerate(entries) if entry.state is State.SUBMITTED),
        default=0,
    )
    return entries[start:]


def read_status(run_dir: Path, *, liveness: LivenessWatch | None = None) -> JobStatus:
    """Returns how the job of a run folder stands.

    Args:
        liveness: of one who watches and has looked before; a single look must trust the times of
            the folder's files.

    Raises:
        JobError: there is no job in this folder.
    """
    entries = Journal(run_dir).entries()
    if not entries and not run_dir.is_dir():
        raise JobError(f"{run_dir}: there is no such folder")
    if not entries:
        raise JobError(f"{run_dir}: no job was started in this folder (it has no {JOURNAL})")
    current = current_submission(entries)
    last = current[-1]
    silent_s = None
    if not last.state.is_final:
        silent_s = silence_s(run_dir) if liveness is None else liveness.silent_s()
    state, reason = _judge_life(last, silent_s)
    newest = last_train_line(run_dir)
    causes = [entry.details["root_cause"] for entry in current if "root_cause" in entry.details]
    return JobStatus(
        run_dir=run_dir,
        state=state,
        generation=last.generation,
        restarts=sum(entry.state is State.RECOVERING for entry in current),
        step=newest["step"] if newest else None,
        total_steps=total_steps(run_dir),
        loss=float(newest["loss"]) if newest else None,  # what is not finite is a string there
        reason=reason,
        root_cause=RootCause.from_details(causes[-1]) if causes else None,
        heartbeat_age_s=silent_s,
        submitted_at=current[0].time,
        ended_at=last.time if last.state.is_final else None,
    )


def _judge_life(last: JournalEntry, silent_s: float | None) -> tuple[State, str]:
    if silent_s is None or silent_s <= liveness.LOST_AFTER_S:
        return last.state, last.reason
    return (
        State.LOST,
        f"was {last.state} ({last.reason}); its supervisor has sent no heartbeat for "
        f"{silent_s:.0f} s",
    )


def last_train_line(run_dir: Path) -> dict[str, Any] | None:
    """Returns the newest line about a step in the run's metrics; None before the first.

    Looks at the end of the file first: who follows a job asks this several times a second.
    """
    for num_bytes in (32 << 10, 256 << 10, 4 << 20):
        for line in reversed(
            JsonLinesTail.near_the_end(run_dir / METRICS, num_bytes=num_bytes).read()
        ):
            if line.get("kind") == "train":
                return line
    return None


def total_steps(run_dir: Path) -> int | None:
    """Returns how many steps the run was asked to make, or None where its config does not say."""
    try:
        steps = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))["train"]["steps"]
    except (FileNotFoundError, KeyError, ValueError, TypeError, RecursionError):
        return None
    return steps if isinstance(steps, int) and 0 < steps < 2**63 else None


def refuse_if_running(run_dir: Path, *, tell: Callable[[str], object] = lambda words: None) -> None:
    """Raises JobError when a live supervisor is at work in this folder.

    Two would train on top of each other. A supervisor that was killed a moment ago has left a fresh
    sign of life, so the next one is waited for, at most until the job counts as LOST.

    Args:
        run_dir: of the job.
        tell: is told how long the waiting may take, if it takes more than a moment.
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


def begin_submission(launch: Launch, *, note: str = "", **details: Any) -> None:
    """Opens the job's journal, with a note beside its size; clears what an earlier one left.

    Whether a job is at work here is asked once more: since the command first asked, the data may
    have been prepared for an hour, and another job begun.

    Raises:
        JobError: a job is at work here, or the folder cannot be written.
    """
    run_dir = Path(launch.run_dir)
    refuse_if_running(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for flag in (STOP, PAUSE, SCALE):
            (run_dir / flag).unlink(missing_ok=True)
        beat(run_dir)
        Journal(run_dir).append(
            State.SUBMITTED,
            generation=read_generation(run_dir),
            reason=f"{launch.num_nodes} node(s) × {launch.ranks_per_node} rank(s){note}",
            details={"name": launch.name, "where": launch.where} | details,
        )
    except OSError as error:
        raise JobError(
            f"{run_dir}: the run folder cannot be written ({error.strerror}); choose another one"
        ) from None


def announced_generation(run_dir: Path) -> int | None:
    """Returns the number in the file `generation`, 0 where there is none; None: it is damaged."""
    try:
        return int((run_dir / GENERATION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0
    except ValueError:
        return None


def read_generation(run_dir: Path) -> int:
    """Returns the number of the last generation that was announced; 0 before the first.

    Where the file is damaged, it is one more than the journal and the logs know of: the last one may
    have been announced and never have begun, and its number must not be given out twice.
    """
    announced = announced_generation(run_dir)
    if announced is not None:
        return announced
    known = [entry.generation for entry in Journal(run_dir).entries()]
    known += [int(path.name[1:]) for path in (run_dir / "logs").glob("g[0-9][0-9][0-9]*")]
    return max(known, default=0) + 1


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that a reader sees either whole or not at all.

    It survives a power cut once this returns.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def signal_name(exit_code: int | None) -> str | None:
    """Returns the name of the signal that an exit code means: SIGKILL for -9, None for 1."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def as_details(cause: RootCause) -> dict[str, Any]:
    """Returns a root cause as the journal keeps it; empty values are left out."""
    return {
        key: value
        for key, value in asdict(cause).items()
        if value is not None and value is not False
    }


def _ends_with_newline(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
