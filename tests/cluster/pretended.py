"""Provides a node without processes, and scripts of what its generations do."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moebius.cluster.job import JobStatus, Journal, Launch, begin_submission, read_status
from moebius.cluster.nodes.assignment import AgentReport, Assignment, RankFailure
from moebius.cluster.nodes.node_check import NodeCheck
from moebius.cluster.nodes.provider import Capacity
from moebius.cluster.supervise.job_supervisor import supervise
from moebius.cluster.watch.evidence import Evidence
from moebius.cluster.watch.heartbeats import RankState

Act = Callable[[Path], AgentReport | None]  # what a generation does when it is asked for a report
OK = AgentReport(ok=True)


class PretendedNode:
    """A node whose generations follow a script; it is its own provider."""

    def __init__(self, run_dir: Path, script: Iterable[Act] = (), spare: Any = None):
        self.run_dir, self.script, self.spare = run_dir, iter(script), spare
        self.assignments: list[Assignment] = []
        self.runs: list[int] = []  # generation and node rank
        self.stuck = ""
        self.starved = 0.0
        self.is_released = False

    def describe(self) -> dict[str, Any]:
        return {"address": "127.0.0.1", "runs": self.runs}

    def unkillable(self, run_dir: str) -> str:
        return self.stuck

    def check(self, wanted: NodeCheck) -> str:
        return wanted.faults()

    def free_port(self) -> int:
        return 1000 + len(self.assignments)

    def start(self, assignment: Assignment) -> None:
        self.assignments.append(assignment)
        self.runs = [assignment.generation, assignment.node_rank]
        self.act = next(self.script)

    def poll(self) -> AgentReport | None:
        return self.act(self.run_dir)

    def heartbeats(self) -> list[RankState]:
        return []

    def gather_evidence(self) -> list[Evidence]:
        return []

    def starved_s(self) -> float:
        return self.starved

    def unreachable(self, others: Any) -> list[int]:
        return []

    def running_ranks(self) -> list[int]:
        return [0]

    def kill_rank(self, rank: int) -> bool:
        return True

    def stop(self) -> None:
        self.runs = []

    def capacity(self) -> Capacity:
        return Capacity(1, 1)

    def provide_nodes(self, num_nodes: int, while_waiting: Callable[[str], None]) -> list[Any]:
        while_waiting("")
        return [self.spare if self.stuck else self]

    def adopt_nodes(self) -> list[Any]:
        return [self] if self.runs else []

    def exclude(self, node: Any, why: str) -> None:
        assert node is self

    def release(self) -> None:
        self.is_released = True


def live(run_dir: Path, *script: Act, **values: Any) -> tuple[JobStatus, PretendedNode]:
    """Runs a job to its end; returns its status and its node."""
    launch = Launch(str(run_dir), **(dict[str, Any](backoff_s=0.001) | values))
    node = PretendedNode(run_dir, script)
    begin_submission(launch)
    supervise(launch, node)
    assert node.is_released
    return read_status(run_dir), node


def states(run_dir: Path) -> list[str]:
    return [entry.state.value for entry in Journal(run_dir).entries()]


def in_turn(*acts: Act) -> Act:
    """Returns an act that does another thing at each look."""
    looks = iter(acts)
    return lambda run_dir: next(looks)(run_dir)


def failed(error: str = "ValueError: bad", *, exit_code: int = 1) -> AgentReport:
    return AgentReport(ok=False, failures=(RankFailure(0, exit_code, 1.0, error),))


def ends(report: AgentReport) -> Act:
    return lambda run_dir: report


def fails(error: str = "ValueError: bad", *, exit_code: int = 1) -> Act:
    return ends(failed(error, exit_code=exit_code))


def raises(error: Exception) -> Act:
    def act(run_dir: Path) -> AgentReport | None:
        raise error

    return act


def with_result(text: str) -> Act:
    def act(run_dir: Path) -> AgentReport:
        (run_dir / "result.json").write_text(text)
        return OK

    return act


finishes = with_result('{"state": "finished", "step": 5}')
stops = with_result('{"state": "stopped", "step": 3}')


def writes(*lines: dict[str, Any], then: Act) -> Act:
    """Returns an act that writes metrics lines and continues with another act."""

    def act(run_dir: Path) -> AgentReport | None:
        with open(run_dir / "metrics.jsonl", "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        return then(run_dir)

    return act


def makes_steps(*steps: int, then: Act) -> Act:
    return writes(*({"kind": "train", "step": step, "loss": 1.0} for step in steps), then=then)
