"""Runs one generation of a job: starts its agents, watches them, and judges how they ended.

The job's supervisor (job_supervisor.py) decides what follows. The generation's progress is read from rank 0's
metrics.
"""

import contextlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ...data_pipeline.files import write_atomically
from ...train.record.heartbeat import PhaseClock
from ...train.record.untrusted import read_text
from ..job import METRICS, PAUSE, RESULT, Launch, RootCause, State, total_steps
from ..liveness import beat
from ..nodes.assignment import AgentReport, Assignment
from ..nodes.provider import NodeHandle, NodeLost
from ..report.history import describe_trouble
from ..report.json_lines import JsonLinesTail
from ..stop import STOP_NOW, STOP_PREEMPT, StopFlag
from ..watch.watcher import RankWatcher, read_limits
from .root_cause import find_root_cause, is_certain, left_early_cause, port_was_taken

POLL_S = 0.2
COLLECT_S = 3.0  # wait for the other nodes' reports after the first failure


@dataclass(frozen=True)
class Outcome:
    """Holds how a generation ended."""

    # "finished", "stopped" or "ended" (at once) by request, "paused", "failed", "port taken"
    state: str
    cause: RootCause | None = None
    step: int | None = None  # the generation's last


def _number(line: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    """Returns a number from a line of metrics, which a person may have edited."""
    value = line.get(name)
    return value if isinstance(value, int | float) else default


class RecoveryClock(PhaseClock):
    """Measures the phases between the end of one generation and the first step of the next.

    The journal has them in the details of RUNNING, as `phases_s` (docs/recover.md explains each). "collect" begins at
    the last look without a failure; "processes" is the rest, which neither supervisor nor ranks measure.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[str, float] = {}

    def take_start(self, line: Mapping[str, Any]) -> None:
        """Takes over the start times in rank 0's metrics."""
        self._ranks = {name: _number(line["start_s"], name) for name in line["start_s"]}

    def take_evaluation(self, line: Mapping[str, Any]) -> None:
        """Takes over the duration of an evaluation before the first step."""
        self._ranks["eval"] = _number(line, "seconds")

    def first_step(self, line: Mapping[str, Any], *, seen_after_s: float) -> dict[str, float]:
        """Returns all phases, given the metrics line of the first step.

        Args:
            seen_after_s: maximum age of the line.
        """
        self.mark("processes")
        self._ranks["step"] = _number(line, "step_s")
        now = time.time()
        age_s = min(max(0.0, now - _number(line, "time", now)), seen_after_s)
        self.seconds["processes"] -= age_s + sum(self._ranks.values())
        self.seconds |= self._ranks
        phases = self.rounded()
        self._ranks = {}
        self.restart()
        return phases


class GenerationOwner(Protocol):
    """Declares the parts of a job's supervisor that a generation uses."""

    run_dir: Path
    generation: int
    stop_flag: StopFlag
    clock: RecoveryClock

    def log(self, state: State, reason: str, **details: object) -> None: ...
    def beat(self) -> None: ...
    def look_after_data(self) -> None: ...
    def why_resize(self, current: int) -> str: ...
    def keep(self, name: str, text: str) -> None: ...
    def store_config(self) -> None: ...


class GenerationWatch:
    """Watches one generation from its start to its end."""

    def __init__(self, owner: GenerationOwner, nodes: Sequence[NodeHandle], launch: Launch):
        self.owner = owner
        self.nodes = nodes
        self.launch = launch
        self.run_dir = owner.run_dir
        self.generation = owner.generation
        metrics = self.run_dir / METRICS
        size = metrics.stat().st_size if metrics.exists() else 0
        self.metrics = JsonLinesTail(metrics, offset=size)
        self.step: int | None = None
        self.is_up = False  # has made a first evaluation or step
        self.started = time.monotonic()
        self.stopping = False
        self.pausing = False
        self.told_starved = False  # during the start
        self.rehearsed: RootCause | None = None
        self.ranks = RankWatcher(
            nodes,
            world_size=self.launch.world_size,
            limits=read_limits(self.run_dir / launch.config_file),
            stall_dir=f"logs/g{self.generation:03d}/stall",
            note=self.note,
        )

    def start(self) -> None:
        """Starts the generation's agents, node by node."""
        addresses = [self.address_of(node_rank) for node_rank in range(len(self.nodes))]
        port = self.nodes[0].free_port()
        secret = secrets.token_hex(32)
        for node_rank, node in enumerate(self.nodes):
            node.start(
                Assignment(
                    launch=self.launch,
                    generation=self.generation,
                    node_rank=node_rank,
                    master_address=addresses[0],
                    master_port=port,
                    address=addresses[node_rank],
                    secret=secret,
                )
            )
            beat(self.run_dir)
        self.owner.clock.mark("order")

    def address_of(self, node_rank: int) -> str:
        """Returns the address at which other nodes reach this one."""
        with _named(node_rank):
            return self.nodes[node_rank].describe()["address"]

    def until_the_end(self) -> Outcome:
        """Watches until all ranks have exited, or the generation must end."""
        while True:
            if self.step is not None:
                self.owner.clock.restart()  # all is well
            self.sign_of_life()
            self.read_metrics()
            self.rehearse()
            self.pause_if_wanted()
            self.owner.look_after_data()
            if (outcome := self.look()) is not None:
                return outcome
            time.sleep(POLL_S)

    def look(self) -> Outcome | None:
        """Returns how the generation ended; None while it runs."""
        reports = self.poll()
        if any(not report.ok for report in reports.values()):
            return self.failed(reports)
        if len(reports) == len(self.nodes):
            return self.all_ranks_exited()
        if self.owner.stop_flag.read() == STOP_NOW:
            return Outcome("ended", step=self.step)
        if cause := self.ranks.look():
            return Outcome("failed", cause, self.step)
        self.is_up |= self.ranks.all_have_started
        if not self.is_up and self.is_too_slow():
            return Outcome("failed", self.too_slow())
        return None

    def is_too_slow(self) -> bool:
        """Returns whether the start takes too long, not counting time without a CPU."""
        seconds, limit_s = time.monotonic() - self.started, self.launch.start_timeout_s
        if seconds <= limit_s:
            return False
        starved_s = max(node.starved_s() for node in self.nodes)
        if seconds - starved_s > limit_s:
            return True
        if not self.told_starved:
            self.told_starved = True
            self.note(
                f"the ranks have not started after {seconds:.0f} s, but had no CPU for "
                f"{starved_s:.0f} s of them: check what else is running there",
                starved={"seconds": round(starved_s, 1)},
            )
        return False

    def note(self, reason: str, **details: object) -> None:
        """Journals an event without changing the job's state."""
        running = State.RUNNING if self.step is not None else State.STARTING
        self.owner.log(State.STOPPING if self.stopping else running, reason, **details)

    def sign_of_life(self) -> None:
        """Sends a heartbeat; checks for a successor and a stop flag."""
        self.owner.beat()
        asked = self.owner.stop_flag.read()
        if asked and not self.stopping:
            self.stopping = True
            what = "a preemption was announced" if asked == STOP_PREEMPT else "a stop was asked for"
            self.owner.log(State.STOPPING, f"{what}; the ranks end at the next step boundary")

    def pause_if_wanted(self) -> None:
        """Asks the ranks to save and end if the run should continue on other nodes.

        Ranks that are still starting are not asked: they could not save.
        """
        if self.step is None or self.pausing or self.stopping:
            return
        if reason := self.owner.why_resize(len(self.nodes)):
            with contextlib.suppress(OSError):  # the disk is full: retried at the next look
                write_atomically(self.run_dir / PAUSE, "")
                self.owner.keep(PAUSE, "")
                self.pausing = True
                self.owner.log(State.RESIZING, f"{reason}; the ranks end at the next step boundary")

    def read_metrics(self) -> None:
        """Reads the metrics lines since the last look."""
        for line in self.metrics.read():
            self.is_up |= line.get("kind") in ("eval", "train", "data_wait")
            if trouble := describe_trouble(line):
                gap = {"gap": line} if line["kind"] == "gap" else {}
                self.note(trouble, **gap)
            match line:  # skips a line that a full disk has cut or a person has edited
                case {"kind": "start", "start_s": dict()}:
                    self.owner.clock.take_start(line)
                case {"kind": "eval"} if self.step is None:
                    self.owner.clock.take_evaluation(line)
                case {"kind": "train", "step": int(step)}:
                    if self.step is None:
                        self.log_first_step(line)
                    self.step = step

    def log_first_step(self, line: dict) -> None:
        """Journals the first step and the phases before it, and stores the run's new configuration."""
        self.owner.store_config()
        seconds = time.monotonic() - self.started
        words = f"first step ({line['step']}) after {seconds:.1f} s"
        self.owner.log(
            State.RUNNING,
            "; ".join([words, *self.cold_starts()]),
            first_step=line["step"],
            phases_s=self.owner.clock.first_step(line, seen_after_s=POLL_S),
        )

    def cold_starts(self) -> list[str]:
        """Returns why nodes could not fork agents and ranks."""
        nodes_of: dict[str, list[str]] = {}
        for node_rank, node in enumerate(self.nodes):
            with contextlib.suppress(NodeLost):  # the next look will notice
                _, _, why = str(node.describe().get("starts", "")).partition(": ")
                nodes_of.setdefault(why, []).append(str(node_rank))
        told = {why: nodes for why, nodes in nodes_of.items() if why}
        return [f"no warm start on node {', '.join(nodes)}: {why}" for why, nodes in told.items()]

    def rehearse(self) -> None:
        """Kills the last rank for the fault drill, once per run folder."""
        step = self.launch.rehearse_failure_at_step
        if step is None or self.rehearsed or self.generation != 1:
            return
        if self.step is None or self.step < step:
            return
        rank = self.launch.world_size - 1
        if self.nodes[-1].kill_rank(rank):
            summary = f"fault drill: rank {rank} was killed on purpose at step {self.step}"
            self.rehearsed = RootCause(
                summary, rank, len(self.nodes) - 1, exit_code=-9, on_purpose=True
            )

    def poll(self) -> dict[int, AgentReport]:
        """Returns the reports of nodes whose agent has ended."""
        reports = {}
        for node_rank, node in enumerate(self.nodes):
            with _named(node_rank):
                report = node.poll()
            if report is not None:
                reports[node_rank] = report
        return reports

    def failed(self, reports: dict[int, AgentReport]) -> Outcome:
        """Waits briefly for the other nodes' reports and finds the root cause."""
        if self.rehearsed:
            return Outcome("failed", self.rehearsed, self.step)
        if port_was_taken(reports):
            return Outcome("port taken")
        deadline = time.monotonic() + COLLECT_S
        while len(reports) < len(self.nodes) and not is_certain(reports):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
            reports = self.poll()
        left_early = self.ranks_that_left(reports)
        self.read_metrics()
        cause = find_root_cause(
            reports,
            left_early=left_early,
            ranks_per_node=self.launch.ranks_per_node,
            generation=self.generation,
        )
        return Outcome("failed", cause, self.step)

    def ranks_that_left(self, reports: dict[int, AgentReport]) -> list[int]:
        """Returns the ranks that exited with code 0 before others failed.

        An agent that waits for its peers has no ranks left.
        """
        left = []
        for node_rank, node in enumerate(self.nodes):
            first = node_rank * self.launch.ranks_per_node
            own = range(first, first + self.launch.ranks_per_node)
            report = reports.get(node_rank)
            if report is None:
                left += own if not node.running_ranks() else ()
            elif report.ok or report.failures:  # otherwise the agent itself failed
                left += set(own) - {failure.rank for failure in report.failures}
        return left

    def all_ranks_exited(self) -> Outcome:
        """Judges a generation whose ranks all exited with 0, by the result file."""
        self.read_metrics()
        result = _read_result(self.run_dir / RESULT)
        state, step = result.get("state"), result.get("step")
        total = total_steps(self.run_dir, self.launch.config_file)
        asked = self.owner.stop_flag.read()
        if (state == "finished" and total is None) or _is_last(step, total):
            self.owner.store_config()  # if no step was left to make
            return Outcome("finished", step=step)
        if state == "stopped" and (asked or self.pausing):
            return Outcome("stopped" if asked else "paused", step=step)
        cause = left_early_cause(
            range(self.launch.world_size),
            generation=self.generation,
            ranks_per_node=self.launch.ranks_per_node,
        )
        said = f"there is no {RESULT}"
        if state is not None:
            said = f"{RESULT} says {state!r} at step {step}"
        return Outcome("failed", replace(cause, summary=f"{cause.summary}: {said}"), self.step)

    def too_slow(self) -> RootCause:
        """Returns the cause for a generation without a step in time."""
        alive = sorted(rank for node in self.nodes for rank in node.running_ranks())
        return RootCause(
            summary=f"no step within start_timeout_s={self.launch.start_timeout_s:g}; ranks alive: "
            f"{alive}; see their logs"
        )


def _is_last(step: object, total: int | None) -> bool:
    """Returns whether the ranks ended at the run's last step, or behind it if it was moved forward."""
    return isinstance(step, int) and total is not None and step >= total


def _read_result(path: Path) -> dict[str, Any]:
    """Returns what the ranks wrote at their end; nothing if the file is missing or damaged."""
    try:
        result = json.loads(read_text(path) or "")
    except (ValueError, RecursionError):
        return {}
    return result if isinstance(result, dict) else {}


@contextlib.contextmanager
def _named(node_rank: int):
    """Adds the node's number to a NodeLost that is raised inside."""
    try:
        yield
    except NodeLost as error:
        raise NodeLost(f"node {node_rank} was lost: {error}") from error
