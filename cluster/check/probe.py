"""Does on one node what a check asks; on another machine as a Ray actor (ray_probes.py)."""

import contextlib
import os
import secrets
import shutil
import socket
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from ..nodes.assignment import AgentReport, Assignment
from ..nodes.node import Node
from .exchange import RESULT
from .facts import NodeFacts, gather_facts
from .findings import Reached, Written

LOOK_EVERY_S = 0.01
PREFIX = ".moebius-doctor-"  # of files in the shared folder
_NONCE_BYTES = 16


class NodeSilent(Exception):
    """Says that a node does not answer: it hangs, is gone, or cannot be reached."""


class NodeFault(Exception):
    """Says that a node answers but cannot do what it is asked; with its own message."""


@dataclass(frozen=True)
class Seen:
    """Holds the result of waiting for a file's new content."""

    seconds: float | None  # None: it did not appear
    why: str = ""
    gap: str = ""  # what was read between the old and the new content, if anything


class Probe:
    """Examines the machine it runs on, and runs ranks there."""

    def __init__(self, address: str) -> None:
        """Takes the address at which other nodes reach this one."""
        self._address = address
        self._node = Node(address)
        self._scratch: Path | None = None

    def facts(self) -> NodeFacts:
        """Returns the facts of this node."""
        return gather_facts(self._address)

    def clock(self) -> float:
        """Returns this node's clock in seconds since the epoch."""
        return time.time()

    def listen(self) -> int:
        """Starts a server on a free port that echoes 16 bytes; it ends with this process."""
        server = socket.create_server((self._address, 0), backlog=256)
        threading.Thread(target=_echo, args=(server,), daemon=True).start()
        return server.getsockname()[1]

    def connect(self, address: str, port: int, limit_s: float) -> Reached:
        """Sends a random number to another node's port and checks the echo."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        started = time.perf_counter()
        try:
            with socket.create_connection((address, port), timeout=limit_s) as connection:
                connection.sendall(nonce)
                answer = _receive(connection, len(nonce))
        except OSError as error:
            return Reached(None, error.strerror or str(error) or type(error).__name__)
        if answer != nonce:
            return Reached(None, "another program answered on this port")
        return Reached(time.perf_counter() - started)

    # Runs rely on three properties of the shared folder: a file that one node wrote and renamed is whole on
    # the others, a rename replaces a file without a gap, and exclusive creation succeeds once (so that a
    # checkpoint is committed once).

    @staticmethod
    def publish(path: str, text: str) -> Written:
        """Writes a file under another name, syncs it and renames it into place."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f"{target.name}.{os.getpid()}")
        started = time.perf_counter()
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
        return Written(time.perf_counter() - started, shutil.disk_usage(target.parent).free)

    @staticmethod
    def await_text(path: str, text: str, limit_s: float, before: str | None = None) -> Seen:
        """Waits until a file holds `text`; the content `before` is not a gap."""
        started, gap, why = time.perf_counter(), "", ""
        while (elapsed := time.perf_counter() - started) < limit_s:
            try:
                found = Path(path).read_text(encoding="utf-8")
            except OSError as error:
                found, why = None, error.strerror or str(error)
            if found == text:
                return Seen(elapsed, gap=gap)
            if before is not None and found != before:
                gap = "no file" if found is None else f"{len(found)} of {len(text)} characters"
            if found is not None:
                why = "its content differs"
            time.sleep(LOOK_EVERY_S)
        return Seen(None, why, gap)

    @staticmethod
    def claim(path: str) -> bool:
        """Creates a file exclusively; returns False if it exists."""
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True

    @staticmethod
    def clean(folder: str, token: str) -> None:
        """Removes the files of the check with this token."""
        for path in Path(folder).glob(f"{PREFIX}{token}*"):
            path.unlink(missing_ok=True)

    def free_port(self) -> int:
        """Returns a port of this node's address that is free now."""
        return self._node.free_port()

    def start_exchange(self, assignment: Assignment, backend: str) -> None:
        """Starts this node's ranks of the self-test in a private local folder."""
        launch = assignment.launch
        scratch = Path(f"{launch.run_dir}-{assignment.node_rank}")
        scratch.mkdir(mode=0o700)  # its name is random: an existing folder is somebody else's
        self._scratch = scratch
        words = (str(scratch), str(launch.ranks_per_node), backend)
        command = (sys.executable, "-m", f"{__package__}.exchange", *words)
        launch = replace(launch, run_dir=str(scratch), command=command)
        self._node.start(replace(assignment, launch=launch))

    def exchange_report(self) -> AgentReport | None:
        """Returns how the ranks ended; None while they run."""
        return self._node.poll()

    def exchange_result(self) -> str:
        """Returns rank 0's measurements as JSON."""
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
