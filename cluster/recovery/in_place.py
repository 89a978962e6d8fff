"""Recovery in place, as the supervision of a generation orders it: a rank has died, and the others
go on with a spare process in its place.

    agent holds its ranks ─> may it be? ─ no ──> a new generation, as ever; the journal says why not
                                  │ yes
                                  ▼
            order a round on every node ─> rank 0 says that the state is there ─> the first new step
                                  │
            another death, or no step in time ──> a new generation

What each node and rank do is in warm/replacing.py and train/in_place/. A round is charged like a
restart: the same error three times at the same step ends the job in either way.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...data_pipeline.errors import PreparationFailedError
from ...train.in_place.orders import RoundOrder
from ..job import IN_PLACE, RootCause, State, as_details
from ..nodes.agent import AgentReport
from ..supervise.budgets import Verdict
from ..supervise.root_cause import find_root_cause

# Errors that the supervision has an answer of its own to.
_ANSWERED_OTHERWISE = (PreparationFailedError.__name__, "SaveFailedError")


class OrderedNode(Protocol):
    """Declares what a node is told; may raise NodeLost."""

    def order_round(self, order: RoundOrder) -> None: ...


@dataclass(frozen=True)
class Circumstances:
    """How a generation stands when a rank has died."""

    step: int | None  # the last one that was made
    ranks_end: bool  # they were asked to, or have
    is_drill: bool  # which rehearses a restart
    round_is_under_way: bool


def why_not_in_place(reports: Mapping[int, AgentReport], now: Circumstances) -> str:
    """Returns why dead ranks are not replaced in place, or "".

    Args:
        reports: of the nodes that have one, by node.
        now: how the generation stands.
    """
    if ended := [node for node, report in reports.items() if not report.holds]:
        said = [reports[node].not_in_place for node in ended]
        return next(filter(None, said), f"the agent of node {ended[0]} has ended")
    if now.round_is_under_way:
        return "another rank has died before the last recovery in place was done"
    if now.step is None:
        return "no step was made yet"
    if now.ranks_end:
        return "the ranks were asked to end"
    if now.is_drill:
        return "the drill rehearses a restart"
    errors = [failure.error or "" for report in reports.values() for failure in report.failures]
    kinds = [error.partition(":")[0].rpartition(".")[2] for error in errors]
    return next((f"it was a {kind}" for kind in kinds if kind in _ANSWERED_OTHERWISE), "")


@dataclass(frozen=True)
class _Round:
    order: RoundOrder
    cause: RootCause
    began_s: float


class RoundDirector:
    """Orders the rounds of one generation."""

    def __init__(
        self,
        nodes: Sequence[OrderedNode],
        *,
        charge: Callable[[RootCause, int | None], Verdict],
        log: Callable[..., None],
        timeout_s: float,
        ranks_per_node: int,
        generation: int,
        last_round: int = 0,
    ) -> None:
        """Takes up the watch.

        Args:
            nodes: in the order of their numbers.
            charge: counts a failure, unless it would end the job; says which.
            log: writes a state into the journal.
            timeout_s: from an order to the first new step.
            ranks_per_node: of the job.
            generation: its number.
            last_round: the number of the last one that was ordered, by a supervisor before this one.
        """
        self._nodes, self._charge, self._log = nodes, charge, log
        self._timeout_s = timeout_s
        self._ranks_per_node, self._generation = ranks_per_node, generation
        self._number = last_round
        self._round: _Round | None = None
        self._told: Mapping[str, Any] | None = None  # what rank 0 said of the round under way
        self.why_not = ""  # why the failure that ends the generation was not recovered in place

    @property
    def is_under_way(self) -> bool:
        """Whether a round was ordered, and no step was made since."""
        return self._round is not None

    def answer(self, reports: dict[int, AgentReport], now: Circumstances) -> dict[int, AgentReport]:
        """Orders a round if ranks are held and it may be; returns the reports that are left.

        Some node's report says that its ranks have failed.
        """
        self.why_not = why_not_in_place(reports, now)
        if not self.why_not:
            cause = self._cause_of(reports)
            verdict = self._charge(cause, now.step)
            if not verdict.given_up:
                self._order(reports, cause, verdict, now.step)
                return {}
            self.why_not = verdict.words
        self._refuse()
        return reports

    def overdue(self) -> RootCause | None:
        """Returns the cause if a round takes too long."""
        if self._round is None or time.monotonic() - self._round.began_s < self._timeout_s:
            return None
        ranks = ", ".join(map(str, self._round.order.lost))
        self.why_not = f"no step within {self._timeout_s:g} s of the order"
        return RootCause(f"the recovery in place of rank {ranks} was not done: {self.why_not}")

    def hear(self, line: Mapping[str, Any]) -> bool:
        """Takes note of what rank 0 has written; returns whether it is of the round under way."""
        if self._round is None or line.get("round") != self._round.order.number:
            return False
        self._told = line
        return True

    def first_step(self, line: Mapping[str, Any], phases_s: Mapping[str, float]) -> None:
        """Journals that the run goes on; `line` is the first step's since rank 0 said so."""
        assert self._round is not None, "a round is under way"
        assert self._told is not None, "rank 0 has told of it"
        order, told = self._round.order, self._told
        seconds = time.monotonic() - self._round.began_s
        ranks = ", ".join(map(str, order.lost))
        self._log(
            State.RUNNING,
            f"rank {ranks} was replaced in place, from {told['restored_from']}: first step "
            f"({line['step']}) {seconds:.1f} s after the order",
            first_step=line["step"],
            phases_s=dict(phases_s),
            **{IN_PLACE: {"round": order.number, "ranks": list(order.lost)}},
            restored_from=told["restored_from"],
            restored_step=told["step"],
        )
        self._round = self._told = None

    @property
    def awaits_step(self) -> bool:
        """Whether rank 0 has said that the state is there, and the next step is the first."""
        return self._told is not None

    def _cause_of(self, reports: Mapping[int, AgentReport]) -> RootCause:
        return find_root_cause(
            reports,
            left_early=[],
            ranks_per_node=self._ranks_per_node,
            generation=self._generation,
        )

    def _order(
        self,
        reports: Mapping[int, AgentReport],
        cause: RootCause,
        verdict: Verdict,
        step: int | None,
    ) -> None:
        self._number += 1
        lost = sorted(f.rank for report in reports.values() for f in report.failures)
        order = RoundOrder(self._number, tuple(lost))
        for node in self._nodes:
            node.order_round(order)
        self._round = _Round(order, cause, time.monotonic())
        self._told = None
        ranks = ", ".join(map(str, lost))
        self._log(
            State.RECOVERING,
            f"{cause.summary} (at step {step}, {verdict.words}); in place: a spare process becomes "
            f"rank {ranks}, the others stay",
            root_cause=as_details(cause),
            step=step,
            **{IN_PLACE: {"round": order.number, "ranks": lost}},
            **verdict.details,
        )

    def _refuse(self) -> None:
        """Tells ranks and agents that wait for an order that none will come."""
        self._number += 1
        order = RoundOrder(self._number, refused=self.why_not)
        for node in self._nodes:
            node.order_round(order)
