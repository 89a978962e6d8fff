"""Pretended machines with addresses and a network of their own, for tests (switch.py makes them).

Root, or leave to make user namespaces, is needed, and Linux with /dev/net/tun; `why_not` says what
is missing. A machine sees its own processes, network, /dev/shm and host name; the file system is
everybody's, as a cluster's shared one is. From outside, their processes are seen as all others are.
"""

import contextlib
import functools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.network.switch import PRIVATE, READY_S, address_of

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")
ANSWER_S = 60.0
_PREFIX = "moebius-net-"


class Network:
    """Machines on one switch."""

    def __init__(self, folder: Path, switch: subprocess.Popen[str], pids: Sequence[int]) -> None:
        self.folder = folder
        self.own = folder / PRIVATE  # each machine has another file system there
        self.addresses = [address_of(number) for number in range(len(pids))]
        self._switch, self.pids = switch, pids

    def slow(self, delay_s: float, *nodes: int) -> None:
        """Keeps back each frame, in each direction; of all wires, a machine's, or between two."""
        self._set(nodes, delay_s=delay_s)

    def lose(self, share: float, *nodes: int) -> None:
        """Loses a share of the frames."""
        self._set(nodes, loss=share)

    def cut(self, *nodes: int) -> None:
        """Lets nothing pass any more."""
        self._set(nodes, is_cut=True)

    def heal(self, *nodes: int) -> None:
        """Lets pass again what was cut."""
        self._set(nodes, is_cut=False)

    def reset(self) -> None:
        """Makes all wires as they were at first, with counters at 0 and the same draws."""
        self._ask(do="reset")

    def wire(self, source: int, goal: int) -> dict[str, int]:
        """Returns how many frames were carried, lost and refused in one direction."""
        wires = self._ask(do="wires")["wires"]
        return next(wire for wire in wires if (wire["from"], wire["to"]) == (source, goal))

    def command(self, node: int, *command: str) -> list[str]:
        """Returns the command line that executes a command on a machine."""
        user = ["--user", "--preserve-credentials"] if os.geteuid() else []
        enter = ["nsenter", "--target", str(self.pids[node]), *user]
        return [*enter, "--net", "--mount", "--pid", "--uts", *command]

    def run(
        self, node: int, *command: str, timeout_s: float = 60.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Executes a command on a machine, in the folder /, and returns when it has ended."""
        return subprocess.run(
            self.command(node, *command),
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def start(
        self, node: int, *command: str, log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Starts a command on a machine; it ends with the machine at the latest."""
        with open(log, "ab") as file:
            return subprocess.Popen(
                self.command(node, *command),
                env=os.environ | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def _set(self, nodes: Sequence[int], **values: float | bool) -> None:
        self._ask(do="set", nodes=nodes, values=values)

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps(request) + "\n")
        self._switch.stdin.flush()
        return _read(self._switch, ANSWER_S)


@contextlib.contextmanager
def network(count: int, *, seed: int = 0) -> Iterator[Network]:
    """Starts so many machines; all of them, and what runs there, are gone afterwards.

    Raises:
        OSError: they are refused; the message says what was.
    """
    _remove_what_the_dead_left()
    # not below $TMPDIR: paths of sockets must be short
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir="/tmp"))
    user = ["--user", "--map-root-user"] if os.geteuid() else []
    command = ["unshare", "--net", *user, sys.executable, "-m", "tests.network.switch"]
    with open(folder / "switch.log", "wb") as log:
        switch = subprocess.Popen(
            [*command, str(folder), str(count), str(seed)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        told = _read(switch, READY_S)
        if "pids" not in told:
            said = told.get("error", "") + (folder / "switch.log").read_text()
            raise OSError(f"network namespaces are refused here: {said.strip()}")
        yield Network(folder, switch, told["pids"])
    finally:
        switch.communicate()  # closes its input
        shutil.rmtree(folder, ignore_errors=True)


def _remove_what_the_dead_left() -> None:
    """Removes folders of test sessions that were killed; the kernel has removed all else."""
    for folder in Path("/tmp").glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def why_not() -> str:
    """Returns why there can be no such machines here, or ""."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"network namespaces need {', '.join(missing)} (iproute2, util-linux)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "network namespaces are connected through /dev/net/tun, which is not to be had here"
    try:
        with network(1):
            return ""
    except OSError as error:
        return str(error)


def _read(switch: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    assert switch.stdout is not None
    ready, _, _ = select.select([switch.stdout], [], [], timeout_s)
    line = switch.stdout.readline() if ready else ""
    return json.loads(line) if line else {}
