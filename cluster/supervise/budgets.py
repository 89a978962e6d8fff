"""Decides how often a job may restart, with two budgets.

Lost nodes should not use up the restarts meant for failures, nor the other way round:

* failures: ranks that raise, crash, hang or leave early. `max_restarts`, reset when the run has made
  `reset_restarts_after_steps` new steps since the last one;
* infrastructure: lost nodes, and agents and actors that die. `max_node_losses`.

Whatever the budget, the job ends when the same error occurs at the same step three times, since another
restart would not help. Lost nodes are exempt: they say nothing about the run.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..job import JournalEntry, Launch, RootCause

SAME_ERROR_LIMIT = 3
FAILURES, INFRASTRUCTURE = "failures", "infrastructure"


@dataclass(frozen=True)
class Verdict:
    """Holds the budget that a failure was charged to, and whether a restart may follow."""

    charged_to: str
    left: int  # restarts in this budget after the next one
    words: str
    given_up: bool

    @property
    def details(self) -> dict[str, Any]:
        """Returns the verdict as the journal keeps it."""
        return {"charged_to": self.charged_to, "left": self.left}


@dataclass
class RestartBudgets:
    """Counts a job's failures per budget and decides whether it may restart."""

    launch: Launch
    used: Counter[str] = field(default_factory=Counter)
    seen: Counter[tuple[str, int | None]] = field(default_factory=Counter)
    last_failure_step: int = 0  # how far the run was at its last failure

    @classmethod
    def from_journal(cls, launch: Launch, entries: Sequence[JournalEntry]) -> "RestartBudgets":
        """Returns the budgets after the failures in the journal of this submission."""
        budgets = cls(launch)
        for entry in entries:
            if (cause := entry.details.get("root_cause")) and not cause.get("on_purpose"):
                budgets.charge(RootCause.from_details(cause), _step_of(entry.details))
        return budgets

    def charge(self, cause: RootCause, step: int | None) -> Verdict:
        """Charges a failure at `step` (None: before the generation's first step) and judges it."""
        account = self._count(cause, step)
        left = self._limit(account) - self.used[account]
        words = f"{left} restart(s) left after this one, charged to {account}"
        if given_up := left < 0:
            words = self._used_up_words(account)
        if _has_signature(cause):
            signature = (cause.error or cause.summary, step)
            self.seen[signature] += 1
            if self.seen[signature] >= SAME_ERROR_LIMIT:
                given_up = True
                words = (
                    f"{SAME_ERROR_LIMIT} times; the same error at the same step: a restart would "
                    "not help. See the log, fix the cause, and submit again"
                )
        return Verdict(account, max(0, left), words, given_up)

    def _count(self, cause: RootCause, step: int | None) -> str:
        account = INFRASTRUCTURE if cause.infrastructure else FAILURES
        anew = self.launch.reset_restarts_after_steps
        if step is not None and account == FAILURES:
            if anew is not None and step - self.last_failure_step >= anew:
                self.used[FAILURES] = 0
            self.last_failure_step = max(self.last_failure_step, step)
        self.used[account] += 1
        return account

    def _limit(self, account: str) -> int:
        return self.launch.max_restarts if account == FAILURES else self.launch.max_node_losses

    def _used_up_words(self, account: str) -> str:
        name = "max_restarts" if account == FAILURES else "max_node_losses"
        limit = self._limit(account)
        return f"{name}={limit} used up" if limit else "no restarts allowed"


def _has_signature(cause: RootCause) -> bool:
    """Returns whether a cause says something about the run: a lost node does not, an agent's error does."""
    return not cause.infrastructure or cause.error is not None


def _step_of(details: Mapping[str, Any]) -> int | None:
    step = details.get("step")
    return step if isinstance(step, int) else None
