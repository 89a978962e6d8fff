"""Finds network failures of a job: between its nodes, or to the head node.

If a cable, a switch port or a firewall rule fails between two nodes, both answer the supervisor, but their
ranks wait for each other and would do so again in a new generation. So after a generation fails without a
killed rank, every node connects to every other at once. This takes milliseconds, or seconds if a path is
broken.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ...train.config.errors import EXIT_MISTAKE
from ..job import Journal
from ..nodes.node import Address, can_connect
from ..nodes.provider import NodeHandle, NodeLost, NodesUnavailable
from .generation import Outcome

LOOK_S = 0.2  # between two looks at a failed network
ASK_EVERY_S = 5.0  # between two checks of the control store
TOLD_AFTER_S = 10.0
_RAY_WAITS_S = 60  # RAY_gcs_rpc_server_reconnect_timeout_s
_AT_ONCE = 32


def find_cuts(nodes: Sequence[NodeHandle]) -> list[tuple[int, int]]:
    """Returns pairs of node numbers: the first does not reach the second.

    Nodes that are lost meanwhile, and nodes without an address, are not reported.
    """
    with ThreadPoolExecutor(min(_AT_ONCE, len(nodes))) as pool:
        addresses = dict(enumerate(pool.map(_address_of, nodes)))
        others = [
            {number: address for number, address in addresses.items() if address and number != own}
            for own in range(len(nodes))
        ]
        answers = list(pool.map(_unreachable_from, nodes, others))
    return [(own, other) for own, answer in enumerate(answers) for other in answer]


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

    def wait(
        self,
        nodes: Sequence[NodeHandle],
        while_waiting: Callable[[str], None],
        *,
        give_up_after_s: float | None,
    ) -> None:
        """Waits until the network of a failed generation works between the next one's nodes.

        Args:
            while_waiting: called with the reason; its exceptions end the waiting.
            give_up_after_s: None: never.

        Raises:
            NodesUnavailable: the network still fails after this time.
        """
        started = time.monotonic()
        while self._has_failed:
            words = spell_cuts(find_cuts(nodes), nodes)
            self._has_failed = bool(words)
            if not words:
                return
            while_waiting(f"{words}; the job waits for the network between them")
            if give_up_after_s is not None and time.monotonic() - started > give_up_after_s:
                raise NodesUnavailable(f"{words} for {give_up_after_s:g} s: repair the network")
            time.sleep(LOOK_S)


class ControlStoreWatch:
    """Checks every few seconds, in a thread, whether Ray's control store answers.

    Ray waits a minute for its control store (the GCS on the head node) and then ends every process of the
    cluster, including the supervisor. This thread journals the reason before that, so that a LOST job is
    explained.
    """

    def __init__(self, run_dir: Path, address: str):
        self._journal = Journal(run_dir)
        self._address = address
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="control-store", daemon=True).start()

    def end(self) -> None:
        """Ends the thread that checks the control store."""
        self._ended.set()

    def _watch(self) -> None:
        heard_at, told = time.monotonic(), False
        while not self._ended.wait(ASK_EVERY_S):
            if listens(self._address):
                if told:
                    self._tell(f"the cluster's control store at {self._address} is back")
                heard_at, told = time.monotonic(), False
            elif not told and time.monotonic() - heard_at >= TOLD_AFTER_S:
                told = True
                self._tell(
                    f"the cluster's control store at {self._address} does not answer. Ray ends "
                    f"all its processes, including this job's, when it has waited {_RAY_WAITS_S} "
                    "s; then start the cluster again and run `moebius resume`"
                )

    def _tell(self, words: str) -> None:
        entries = self._journal.entries()
        if entries and not entries[-1].state.is_final:
            last = entries[-1]
            self._journal.append(last.state, generation=last.generation, reason=words)


def listens(address: str) -> bool:
    """Returns whether something accepts connections at host:port."""
    host, _, port = address.rpartition(":")
    return can_connect((host, int(port)), timeout_s=2.0)


def _address_of(node: NodeHandle) -> Address | None:
    try:
        return node.describe().get("listens_at")
    except NodeLost:
        return None


def _unreachable_from(node: NodeHandle, others: Mapping[int, Address]) -> list[int]:
    numbers = list(others)
    try:
        return [numbers[place] for place in node.unreachable([*others.values()])] if others else []
    except NodeLost:
        return []


def _name(number: int, nodes: Sequence[NodeHandle]) -> str:
    address = _address_of(nodes[number])
    return f"node {number} ({address[0]})" if address else f"node {number}"
