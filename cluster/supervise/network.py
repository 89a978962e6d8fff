"""Finds network failures between a job's nodes.

If a cable, a switch port or a firewall rule fails between two nodes, both answer the supervisor, but their
ranks wait for each other and would do so again in a new generation. So after a generation fails without a
killed rank, every node connects to every other at once. This takes milliseconds, or seconds if a path is
broken.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ...train.config.errors import EXIT_MISTAKE
from ..nodes.node import Address
from ..nodes.provider import NodeHandle, NodeLost
from .generation import Outcome

LOOK_S = 0.2  # between two looks at a failed network
_AT_ONCE = 32


def find_cuts(nodes: Sequence[NodeHandle]) -> list[tuple[int, int]]:
    """Returns pairs of node numbers: the first does not reach the second.

    Nodes that are lost meanwhile, and nodes without an address, are not reported.
    """
    with ThreadPoolExecutor(min(_AT_ONCE, len(nodes))) as pool:
        found = dict(enumerate(pool.map(_address_of, nodes)))
        addresses = {number: address for number, address in found.items() if address is not None}
        answers = list(pool.map(lambda node: _unreachable_from(node, addresses), nodes))
    return [(own, other) for own, answer in enumerate(answers) for other in answer if other != own]


def spell_cuts(cuts: Sequence[tuple[int, int]], nodes: Sequence[NodeHandle]) -> str:
    """Describes which nodes do not reach each other; "" if all do."""
    spelled = []
    for own, other in cuts:
        if (other, own) not in cuts:
            spelled.append(f"{_name(own, nodes)} cannot reach {_name(other, nodes)}")
        elif own < other:
            spelled.append(f"{_name(own, nodes)} and {_name(other, nodes)} cannot reach each other")
    return ", ".join(spelled)


class NetworkWatch:
    """Looks for cuts between the nodes after a generation has failed."""

    def __init__(self) -> None:
        self._has_failed = False  # between the nodes of the last generation

    def explain(self, outcome: Outcome, nodes: Sequence[NodeHandle]) -> Outcome:
        """Returns how a generation ended, with the network as its cause if a path is broken.

        Nodes are not asked if ranks were killed, or say that no restart would help.
        """
        cause = outcome.cause
        if outcome.state != "failed" or cause is None or cause.on_purpose or len(nodes) == 1:
            return outcome
        if cause.signal or cause.exit_code == EXIT_MISTAKE:
            return outcome
        words = spell_cuts(find_cuts(nodes), nodes)
        self._has_failed = bool(words)
        if not words:
            return outcome
        # errors of ranks are consequences: three equal ones must not end the job
        summary = f"{words} over the network: {cause.summary}"
        return replace(
            outcome, cause=replace(cause, summary=summary, error=None, infrastructure=True)
        )

    def wait(self, nodes: Sequence[NodeHandle], while_waiting: Callable[[str], None]) -> None:
        """Waits until the network of a failed generation works between the next one's nodes.

        Args:
            while_waiting: called with the reason; its exceptions end the waiting.
        """
        while self._has_failed:
            words = spell_cuts(find_cuts(nodes), nodes)
            self._has_failed = bool(words)
            if not words:
                return
            while_waiting(f"{words}; the job waits for the network between them")
            time.sleep(LOOK_S)


def _address_of(node: NodeHandle) -> Address | None:
    try:
        return node.describe().get("listens_at")
    except NodeLost:
        return None


def _unreachable_from(node: NodeHandle, addresses: Mapping[int, Address]) -> list[int]:
    numbers = list(addresses)
    try:
        return [numbers[place] for place in node.unreachable([*addresses.values()])]
    except NodeLost:
        return []


def _name(number: int, nodes: Sequence[NodeHandle]) -> str:
    address = _address_of(nodes[number])
    return f"node {number} ({address[0]})" if address else f"node {number}"
