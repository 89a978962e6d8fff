"""What of a job's network has failed: the paths between its nodes, or the way to the head node.

Where a cable, a switch port or a firewall rule fails between two nodes that the supervisor reaches,
their ranks wait for each other and none of them is to blame; a new generation would wait in the
same way. So when a generation has failed and nobody killed a rank, every node opens a connection to
every other, all at once: some milliseconds where all is well, some seconds where something is not.
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

LOOK_S = 0.2  # between two looks at a network that has failed
ASK_EVERY_S = 5.0  # of the control store
TOLD_AFTER_S = 10.0
_RAY_WAITS_S = 60  # RAY_gcs_rpc_server_reconnect_timeout_s
_AT_ONCE = 32


def find_cuts(nodes: Sequence[NodeHandle]) -> list[tuple[int, int]]:
    """Returns the pairs of nodes of which the first does not reach the second, by their numbers.

    A node that is lost meanwhile says nothing, nor does one that listens nowhere.
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
    """Returns who does not reach whom, in words; "" where nobody has such trouble."""
    spelled = []
    for own, other in cuts:
        if (other, own) not in cuts:
            spelled.append(f"{_name(own, nodes)} cannot reach {_name(other, nodes)}")
        elif own < other:
            spelled.append(f"{_name(own, nodes)} and {_name(other, nodes)} cannot reach each other")
    return ", ".join(spelled)


class NetworkWatch:
    """Looks for cuts between the nodes when a generation has failed."""

    def __init__(self) -> None:
        self._has_failed = False  # between the nodes of the last generation

    def explain(self, outcome: Outcome, nodes: Sequence[NodeHandle]) -> Outcome:
        """Returns how a generation ended, with the network as the cause where that failed.

        Its nodes are asked unless ranks were killed, or say that no restart would help.
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
        # Whatever error a rank had, it is none of the run's: three alike must not end the job.
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
                raise NodesUnavailable(f"{words} for {give_up_after_s:g} s: repair the network")
            time.sleep(LOOK_S)


class ControlStoreWatch:
    """Asks every few seconds, from a thread, whether Ray's control store still listens.

    Ray waits a minute for its control store (the GCS on the head node), and then ends every process
    of the cluster, the supervisor among them. The watch writes the reason into the journal while it
    still can, so that people learn why a job is LOST.
    """

    def __init__(
        self,
        run_dir: Path,
        address: str,
        *,
        ask_every_s: float = ASK_EVERY_S,
        told_after_s: float = TOLD_AFTER_S,
    ):
        self._journal = Journal(run_dir)
        self._address = address
        self._ask_every_s, self._told_after_s = ask_every_s, told_after_s
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="control-store", daemon=True).start()

    def end(self) -> None:
        """Stops the thread that watches the control store."""
        self._ended.set()

    def _watch(self) -> None:
        heard_at, told = time.monotonic(), False
        while not self._ended.wait(self._ask_every_s):
            if listens(self._address):
                if told:
                    self._tell(f"the cluster's control store at {self._address} is back")
                heard_at, told = time.monotonic(), False
            elif not told and time.monotonic() - heard_at >= self._told_after_s:
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
