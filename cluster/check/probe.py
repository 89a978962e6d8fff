"""What a node does when it is checked; on another machine as a Ray actor (ray_probes.py)."""

import contextlib
import secrets
import shutil
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from ..nodes.assignment import AgentReport, Assignment
from ..nodes.node import Node
from . import folder
from .exchange import RESULT
from .facts import NodeFacts, gather_facts
from .findings import Reached

_NONCE_BYTES = 16


class NodeSilent(Exception):
    """Says that a node gives no answer: it hangs, has gone, or cannot be reached."""


class NodeFault(Exception):
    """Says that a node answers, and cannot do what it is asked for; with its own words."""


class Probe:
    """Looks at the machine it runs on, and runs ranks there."""

    def __init__(self, address: str) -> None:
        """Takes the node's address, as the others reach it."""
        self._address = address
        self._node = Node(address)
        self._scratch: Path | None = None

    def facts(self) -> NodeFacts:
        """Returns what this node is."""
        return gather_facts(self._address)

    def clock(self) -> float:
        """Returns the seconds since the epoch, as this node has them."""
        return time.time()

    def listen(self) -> int:
        """Listens on a free port of the node's address, and sends back what it receives.

        The listener ends with this process; it answers with 16 bytes at most.
        """
        server = socket.create_server((self._address, 0), backlog=256)
        threading.Thread(target=_echo, args=(server,), daemon=True).start()
        return server.getsockname()[1]

    def connect(self, address: str, port: int, limit_s: float) -> Reached:
        """Sends a random number to another node's port, and waits for it to come back."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        started = time.perf_counter()
        try:
            with socket.create_connection((address, port), timeout=limit_s) as connection:
                connection.sendall(nonce)
                answer = _receive(connection, len(nonce))
        except OSError as error:
            return Reached(None, error.strerror or str(error) or type(error).__name__)
        if answer != nonce:
            return Reached(None, "somebody else answers there")
        return Reached(time.perf_counter() - started)

    publish = staticmethod(folder.publish)
    await_text = staticmethod(folder.await_text)
    claim = staticmethod(folder.claim)
    clean = staticmethod(folder.clean)

    def free_port(self) -> int:
        """Returns a port of this node's address that is free now."""
        return self._node.free_port()

    def start_exchange(self, assignment: Assignment, backend: str) -> None:
        """Starts this node's ranks of the self-test, in a private folder of this machine's own."""
        launch = assignment.launch
        scratch = Path(f"{launch.run_dir}-{assignment.node_rank}")
        scratch.mkdir(mode=0o700)  # its name is random: what is there is somebody else's
        self._scratch = scratch
        words = (str(scratch), str(launch.ranks_per_node), backend)
        command = (sys.executable, "-m", f"{__package__}.exchange", *words)
        launch = replace(launch, run_dir=str(scratch), command=command)
        self._node.start(replace(assignment, launch=launch))

    def exchange_report(self) -> AgentReport | None:
        """Returns how the ranks have ended; None while they run."""
        return self._node.poll()

    def exchange_result(self) -> str:
        """Returns what rank 0 has measured, as JSON."""
        assert self._scratch is not None, "start_exchange comes first"
        return (self._scratch / RESULT).read_text(encoding="utf-8")

    def end_exchange(self) -> None:
        """Ends the ranks and removes their folder."""
        self._node.stop()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


def _echo(server: socket.socket) -> None:
    with server:
        while True:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(5.0)
                    connection.sendall(_receive(connection, _NONCE_BYTES))


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size and (piece := connection.recv(size - len(received))):
        received += piece
    return received
