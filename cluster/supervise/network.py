"""Which nodes of a job do not reach each other, although the supervisor reaches them all.

Where a cable, a switch's port or a firewall's rule fails between two nodes, their ranks wait for
each other and none of them is to blame; a new generation would wait in the same way. So when a
generation has failed and nobody killed a rank, every node is asked to open a connection to every
other, all at once: some milliseconds where all is well, some seconds where something is not.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

from ...train.config.errors import EXIT_MISTAKE
from ..job import RootCause
from ..nodes.provider import NodeLost, NodesUnavailable
from ..recovery.doors import Door
from .generation import Outcome

LOOK_S = 0.2  # between two looks at a network that has failed
_AT_ONCE = 32


class Neighbour(Protocol):
    """Declares what is asked of a node; every call may raise NodeLost."""

    def describe(self) -> dict[str, Any]: ...
    def unreached(self, doors: Sequence[Door]) -> list[int]: ...


def find_cuts(nodes: Sequence[Neighbour]) -> list[tuple[int, int]]:
    """Returns the pairs of nodes of which the first does not reach the second, by their numbers.

    A node that is lost meanwhile says nothing, and nor does one that has no door.
    """
    with ThreadPoolExecutor(min(_AT_ONCE, len(nodes))) as pool:
        doors = dict(enumerate(pool.map(_door_of, nodes)))
        others = [
            {number: door for number, door in doors.items() if door and number != own}
            for own in range(len(nodes))
        ]
        answers = list(pool.map(_unreached_by, nodes, others))
    return [(own, other) for own, answer in enumerate(answers) for other in answer]


def spell_cuts(cuts: Sequence[tuple[int, int]], nodes: Sequence[Neighbour]) -> str:
    """Returns who does not reach whom, in words; "" where nobody has such trouble."""
    spelled = []
    for own, other in cuts:
        if (other, own) not in cuts:
            spelled.append(f"{_name(own, nodes)} does not reach {_name(other, nodes)}")
        elif own < other:
            spelled.append(f"{_name(own, nodes)} and {_name(other, nodes)} do not reach each other")
    return ", ".join(spelled)


def blame_network(cause: RootCause, words: str) -> RootCause:
    """Returns the cause of a failure where nodes do not reach each other.

    It is the infrastructure's, and whatever error a rank had is no error of the run: the third one
    at the same step must not end the job.
    """
    return replace(
        cause, summary=f"{words} over the network: {cause.summary}", error=None, infrastructure=True
    )


class NetworkWatch:
    """Looks for a network that has failed, when a generation has."""

    def __init__(self) -> None:
        self._has_failed = False  # between the nodes of the last generation

    def explain(self, outcome: Outcome, nodes: Sequence[Neighbour]) -> Outcome:
        """Returns how a generation ended: with the network as the cause, where that failed.

        Its nodes are asked unless ranks were killed, or say that no restart would help.
        """
        cause = outcome.cause
        if outcome.state != "failed" or cause is None or cause.on_purpose or len(nodes) == 1:
            return outcome
        if cause.signal or cause.exit_code == EXIT_MISTAKE:
            return outcome
        words = spell_cuts(find_cuts(nodes), nodes)
        self._has_failed = bool(words)
        return replace(outcome, cause=blame_network(cause, words)) if words else outcome

    def wait(
        self,
        nodes: Sequence[Neighbour],
        while_waiting: Callable[[str], None],
        *,
        give_up_after_s: float | None,
    ) -> None:
        """Waits until nodes reach each other again that did not in the last generation.

        Args:
            nodes: of the next generation.
            while_waiting: called with what is waited for; its exceptions end the waiting.
            give_up_after_s: None: never.

        Raises:
            NodesUnavailable: they do not in this time.
        """
        started = time.monotonic()
        while self._has_failed:
            words = spell_cuts(find_cuts(nodes), nodes)
            self._has_failed = bool(words)
            if not words:
                return
            while_waiting(f"{words}; the job waits for the network between them")
            if give_up_after_s is not None and time.monotonic() - started > give_up_after_s:
                raise NodesUnavailable(f"{words}, for {give_up_after_s:g} s: mend the network")
            time.sleep(LOOK_S)


def _door_of(node: Neighbour) -> Door | None:
    try:
        return node.describe().get("door")
    except NodeLost:
        return None


def _unreached_by(node: Neighbour, others: Mapping[int, Door]) -> list[int]:
    numbers = list(others)
    try:
        return [numbers[place] for place in node.unreached([*others.values()])] if others else []
    except NodeLost:
        return []


def _name(number: int, nodes: Sequence[Neighbour]) -> str:
    door = _door_of(nodes[number])
    return f"node {number} ({door[0]})" if door else f"node {number}"
