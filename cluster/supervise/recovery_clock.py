"""Where the time goes between the end of one generation and the first step of the next.

    collect    from the last look at which all was well: the failure is seen, reports come in
    end        what is left of the old generation is ended on every node
    wait       back-off, after a generation without a step
    place      nodes are found, or lost ones replaced
    check      every node is asked whether it has what ranks need
    data       the job's data is prepared so far that ranks can begin
    order      agents are ordered, node by node
    processes  agents and ranks come up and meet; what the ranks' own clocks do not tell
    join, build, load, loader   rank 0: process groups, model, checkpoint, data
    eval       the evaluation before the first step of a run
    step       the first step

The journal has them in the details of RUNNING, as `phases_s`.
"""

import time
from collections.abc import Mapping
from typing import Any

from ...train.record.heartbeat import PhaseClock


class RecoveryClock(PhaseClock):
    """Counts the phases of one start or recovery, the ranks' own included."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[str, float] = {}

    def take_start(self, line: Mapping[str, Any]) -> None:
        """Takes over what rank 0 says of its start in the metrics."""
        self._ranks = dict(line.get("start_s", {}))

    def take_evaluation(self, line: Mapping[str, Any]) -> None:
        """Takes over how long an evaluation before the first step has taken."""
        self._ranks["eval"] = line.get("seconds", 0.0)

    def first_step(self, line: Mapping[str, Any], *, seen_after_s: float) -> dict[str, float]:
        """Returns all phases, now that the metrics hold a first step.

        Args:
            line: the step's.
            seen_after_s: how old the line may be at most.
        """
        self.mark("processes")
        self._ranks["step"] = line.get("step_s", 0.0)
        age_s = min(max(0.0, time.time() - line.get("time", time.time())), seen_after_s)
        self.seconds["processes"] -= age_s + sum(self._ranks.values())
        self.seconds |= self._ranks
        phases = self.rounded()
        self._ranks = {}
        self.restart()
        return phases
