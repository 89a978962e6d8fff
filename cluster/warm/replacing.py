"""Puts spare processes in the places of ranks that have died, on the agent's side.

When a rank dies torch's agent ends the others. Here it holds them instead, says in a file who has
died (recovery/round_of_node.py), and waits for what the supervision orders: a round, for which it
releases a spare with the dead rank's environment, or none, and then all goes as ever. It does not
hold where nothing could come of it: a rank says that no restart mends its error, a rank was not
among its steps, there are not enough spares.

The spares are forked with the ranks, before the agent has threads, and wait at pipes as these did.
Those of a generation are used once each; the next generation has new ones.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ...train.config.errors import EXIT_MISTAKE
from ...train.in_place.orders import (
    ROUND_NUMBER,
    RoundOrder,
    read_order,
    read_readiness,
    withdraw_readiness,
)
from ..job import write_atomically
from ..recovery.round_of_node import LOST

S = TypeVar("S")  # a process that waits

SPARES = 2  # of each node in a generation: so many deaths there are recovered in place
_HOLD_S = 30.0  # for an order; the supervision looks several times a second


class Replacements(Generic[S]):
    """The spares of one node, and the ranks that it holds."""

    def __init__(
        self,
        folder: Path,
        ranks: Sequence[int],
        spares: Sequence[S],
        describe: Callable[[int, ProcessFailure], Mapping[str, Any]],
    ) -> None:
        """Takes the spares.

        Args:
            folder: of the ranks' heartbeats.
            ranks: of this node, by local rank.
            spares: processes that wait.
            describe: says of a global rank how it has failed, for JSON.
        """
        self._folder, self._ranks = folder, list(ranks)
        self._spares = list(spares)
        self._describe = describe
        self.number = 0  # of the last round that was ordered
        self._told: set[int] = set()
        self._held_since_s = 0.0
        self.why_not = ""  # the last time that nobody was held, or no longer

    def look(self, dead: Mapping[int, ProcessFailure]) -> dict[int, S] | None:
        """Looks for an order; returns what takes the places of dead ranks now, by local rank.

        Args:
            dead: how they ended, by local rank.

        Returns:
            None: the ranks are not held, or no longer, and `why_not` says why.
        """
        order = read_order(self._folder)
        if order is not None and order.number > self.number:
            self.number = order.number
            if order.refused:
                self.why_not = order.refused
                return None if dead else {}
            self._told = set()
            found = self._replace(order, dead)
            return found if self._holds(dead.keys() - found.keys(), dead) else None
        return {} if self._holds(dead.keys(), dead) else None

    def _replace(self, order: RoundOrder, dead: Mapping[int, ProcessFailure]) -> dict[int, S]:
        found = {}
        for local_rank, rank in enumerate(self._ranks):
            if rank in order.lost and local_rank in dead:
                withdraw_readiness(self._folder, rank)
                Path(dead[local_rank].error_file).unlink(missing_ok=True)  # the next has its own
                found[local_rank] = self._spares.pop()
        return found

    def _holds(self, held: Set[int], dead: Mapping[int, ProcessFailure]) -> bool:
        """Whether the other ranks are held for these; tells of a new one."""
        if not held:
            return True
        if held <= self._told:
            if time.monotonic() - self._held_since_s < _HOLD_S:
                return True
            self.why_not = f"no order came within {_HOLD_S:g} s"
            return False
        if why_not := self._refusal(held, dead):
            self.why_not = why_not
            return False
        failures = [self._describe(self._ranks[each], dead[each]) for each in sorted(held)]
        lost = {"after_round": self.number, "failures": failures}
        write_atomically(self._folder / LOST, json.dumps(lost))
        self._told, self._held_since_s = set(held), time.monotonic()
        return True

    def _refusal(self, held: Set[int], dead: Mapping[int, ProcessFailure]) -> str:
        """Returns why a round could not help, or ""."""
        if any(dead[each].exitcode == EXIT_MISTAKE for each in held):
            return "no restart mends the error"
        if len(held) == len(self._ranks) > 1:
            return "no rank of the node lives"
        if len(held) > len(self._spares):
            return f"{len(held)} rank(s) have died, and {len(self._spares)} spare(s) are left"
        for rank in self._ranks:
            said = read_readiness(self._folder, rank)
            if said is None:
                return f"rank {rank} was not among its steps"
            if said:
                return said
        return ""


def environment_of(replaced: Mapping[str, str], number: int) -> dict[str, str]:
    """Returns the environment of a process that takes a rank's place in a round."""
    return {**replaced, ROUND_NUMBER: str(number)}
