"""Watches the ranks of one generation for hangs, waits for data, and slow ranks.

About once a second it asks all nodes for their heartbeats in parallel. A slow node delays no other, and is asked
again after it has answered.

* If all ranks are over the limit of their phase, evidence is gathered from every node (evidence.py), the rank
  that the others wait for is named (stalls.py), and the generation ends with that root cause.
* A long wait for data is journaled after a minute, then whenever it has doubled.
* A slow rank is journaled once, and so are ranks that are over their limit for lack of a CPU.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from ...train.config.job_config import PhaseLimits
from ...train.record.untrusted import read_text
from ..job import RootCause
from ..nodes.provider import NodeHandle, NodeLost
from .evidence import Evidence
from .heartbeats import GONE, STOPPED, RankState
from .stalls import Stall, Stragglers, find_behind, is_stalled, limit_of

LOOK_S = 1.0
ANSWER_S = 1.0  # how long one look waits for nodes
DATA_WAIT_S = 60.0  # after which a wait for data is journaled
_AT_ONCE = 32  # nodes that gather evidence concurrently
_SPELLED = {GONE: "its process has ended", "D": "stuck in the kernel (state D)"} | dict.fromkeys(
    STOPPED, "its process is stopped (SIGSTOP, or a debugger)"
)


class RankWatcher:
    """Watches the ranks of one generation."""

    def __init__(
        self,
        nodes: Sequence[NodeHandle],
        *,
        world_size: int,
        limits: Mapping[str, float | None],
        stall_dir: str,
        note: Callable[..., None],
    ) -> None:
        """Prepares to watch; asks nothing yet.

        Args:
            nodes: in the order of their numbers.
            limits: `PhaseLimits` as plain values.
            stall_dir: folder of the evidence, relative to the run folder.
            note: writes a line with details into the journal.
        """
        self._nodes = nodes
        self._world_size = world_size
        self._limits = limits
        self._stall_dir = stall_dir
        self._note = note
        self._looked_s = float("-inf")
        self._data_wait_told: dict[int, float] = {}
        self._starved_told = False
        self._stragglers = Stragglers()
        self.states: dict[int, RankState] = {}
        self._node_of: dict[int, int] = {}
        self._questions = _Questions(nodes)

    @property
    def all_have_started(self) -> bool:
        """Returns whether every rank has built its model and begun the run."""
        return len(self.states) == self._world_size and all(
            state.phase != "start" for state in self.states.values()
        )

    def look(self) -> RootCause | None:
        """Looks at all ranks once per LOOK_S; returns why the generation must end, or None."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return None
        self._looked_s = now_s
        self.states = {}
        for number, states in self._questions.ask().items():
            self.states |= {state.rank: state for state in states}
            self._node_of |= {state.rank: number for state in states}
        self._tell_waits_for_data()
        if len(self.states) < self._world_size:
            # some ranks have not begun, which has its own limit, or a node does not answer: a failing
            # call will tell
            return None
        if is_stalled(self.states.values(), self._limits):
            return self._explain_stall()
        self._tell_starvation()
        self._tell_stragglers()
        return None

    def _explain_stall(self) -> RootCause:
        evidence = self._gather()
        stall = find_behind(self.states, evidence)
        found = evidence.get(stall.state.rank)
        node = self._node_of[stall.state.rank]
        who = f"rank {stall.state.rank} on node {node} hangs" if stall.behind else "all ranks hang"
        return RootCause(
            summary=f"{who}: {self._spell(stall, found)}; stacks in {self._stall_dir}",
            rank=stall.state.rank if stall.behind else None,
            node=node if stall.behind else None,
            # without varying figures: the same error three times ends a job
            error=f"{who} in phase {stall.state.phase}",
            where=(found.where or None) if found else None,
            log=f"{self._stall_dir}/rank{stall.state.rank}.txt",
        )

    def _spell(self, stall: Stall, found: Evidence | None) -> str:
        state = stall.state
        limit_s = limit_of(state, self._limits)
        parts = [
            f"in phase {state.phase} of step {state.step} for {state.age_s:.1f} s (limit {limit_s:g} s)"
        ]
        if found is not None:
            parts += [f"at {found.where}"] if found.where else []
            parts += [_SPELLED[found.process]] if found.process in _SPELLED else []
        if len(stall.behind) > 1:
            parts.append(f"and so do ranks {', '.join(map(str, stall.behind[1:]))}")
        if stall.waiting_in:
            parts.append(f"the others wait in {stall.waiting_in}")
        elif not stall.behind:
            parts.append("none of them is behind the others")
        return ", ".join(parts)

    def _gather(self) -> dict[int, Evidence]:
        """Gathers evidence from all nodes at once."""
        with ThreadPoolExecutor(min(_AT_ONCE, len(self._nodes))) as pool:
            answers = list(pool.map(_evidence_of, self._nodes))
        return {found.rank: found for answer in answers for found in answer}

    def _tell_waits_for_data(self) -> None:
        for rank, state in self.states.items():
            if state.phase != "data_wait":
                self._data_wait_told.pop(rank, None)
            elif state.age_s >= self._data_wait_told.get(rank, DATA_WAIT_S):
                self._data_wait_told[rank] = 2 * state.age_s
                self._note(
                    f"rank {rank} on node {self._node_of[rank]} has waited {state.age_s:.0f} s for "
                    f"the data of step {state.step + 1}",
                    data_wait={"rank": rank, "seconds": round(state.age_s, 1)},
                )

    def _tell_starvation(self) -> None:
        states = self.states.values()
        if self._starved_told or not is_stalled(states, self._limits, forgive_starved=False):
            return
        worst = max(states, key=lambda state: state.starved_s)
        if worst.starved_s < worst.age_s / 2:
            return  # starvation does not explain it
        self._starved_told = True
        self._note(
            f"rank {worst.rank} on node {self._node_of[worst.rank]} gets no CPU: for "
            f"{worst.starved_s:.0f} of {worst.age_s:.0f} s in step {worst.step}, it was ready to "
            "run but had to wait. It does not hang; check what else is running there",
            starved={"rank": worst.rank, "seconds": round(worst.starved_s, 1)},
        )

    def _tell_stragglers(self) -> None:
        for slow in self._stragglers.find_new(self.states):
            node = self._node_of[slow.rank]
            host = self._nodes[node].describe().get("host", "")
            self._note(
                f"rank {slow.rank} on node {node} ({host}) is slow: it computes {slow.own_s:.3g} "
                f"s per step, {slow.ratio:.2f} × the others' median, and the others wait for it",
                straggler={
                    "rank": slow.rank,
                    "node": node,
                    "host": host,
                    "ratio": round(slow.ratio, 3),
                    "step": self.states[slow.rank].step,
                },
            )


class _Questions:
    """Asks all nodes for heartbeats at once, with at most one open question per node."""

    def __init__(self, nodes: Sequence[NodeHandle]) -> None:
        self._nodes = nodes
        self._pool = ThreadPoolExecutor(len(nodes), thread_name_prefix="heartbeats")
        self._open: dict[int, Future[list[RankState]]] = {}

    def ask(self) -> dict[int, list[RankState]]:
        """Returns the answers so far, by node number.

        Raises:
            NodeLost: one of them is lost.
        """
        if len(self._nodes) == 1:  # no other node to delay
            return {0: self._answer(0, self._nodes[0].heartbeats)}
        for number, node in enumerate(self._nodes):
            if number not in self._open:
                self._open[number] = self._pool.submit(node.heartbeats)
        wait(self._open.values(), ANSWER_S)
        done = [number for number, answer in self._open.items() if answer.done()]
        answers = {number: self._open.pop(number) for number in done}
        return {number: self._answer(number, told.result) for number, told in answers.items()}

    def _answer(self, number: int, ask: Callable[[], list[RankState]]) -> list[RankState]:
        try:
            return ask()
        except NodeLost as error:
            raise NodeLost(f"node {number} was lost: {error}") from error


def read_limits(config_file: Path) -> dict[str, float | None]:
    """Returns a run's `PhaseLimits` from its configuration, as plain values."""
    try:
        saved = json.loads(read_text(config_file) or "")["job"]["limits"]
        return PhaseLimits.model_validate(saved).model_dump()
    except (KeyError, TypeError, ValueError, RecursionError):
        return PhaseLimits().model_dump()  # an older run without them


def _evidence_of(node: NodeHandle) -> list[Evidence]:
    """Returns a node's evidence; none if the node is lost meanwhile, or has no room for it."""
    try:
        return node.gather_evidence()
    except (NodeLost, OSError):
        return []
