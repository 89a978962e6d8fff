"""A Ray cluster of pretended nodes on this machine, which is gone without a trace when its user is.

The cluster lives below a host process (host.py). That process holds the raylets, adopts every orphan
below it, and tears everything down when its standard input closes: after a normal exit, after
Ctrl-C, and after a kill -9 of the command line. A cluster that stays between commands is in
standing.py.

Authentication: Ray 2.60 turns tokens on for local clusters and writes one into the user's home.
Here the mode is always explicit: a token of this process's own, in the cluster's own directory
(mode 0600), gone with it. Each node has an address of its own, 127.0.0.2, 127.0.0.3, …

Cost, measured on 2 cores (ray 2.60, 2 nodes): 3.5 s to start, 0.5 GB of proportional memory in 12
processes; a further node 1.2 s and 0.12 GB.
"""

import contextlib
import functools
import importlib
import json
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..job import JobError
from ..nodes import processes
from ..report.tracebacks import read_tail
from .host import DIRECTORIES, PREFIX, Plan, node_address, sweep_directories

START_TIMEOUT_S = 180.0  # over a minute was seen on two cores with twenty processes waiting
STOP_TIMEOUT_S = 15.0
LEAST_STORE_BYTES = 80 << 20  # of each node; 75 MiB is the least that Ray accepts


@dataclass(frozen=True)
class SimulatedCluster:
    """Describes a running simulated cluster, to which this process is connected."""

    address: str
    directory: Path  # session files, sockets, token; removed at the end
    host_pid: int


@contextlib.contextmanager
def simulated_cluster(
    num_nodes: int,
    *,
    cpus_per_node: int = 2,
    gpus: Sequence[Sequence[int]] | None = None,
    object_store_bytes: int = LEAST_STORE_BYTES,
    meanwhile: Callable[[], object] | None = None,
) -> Iterator[SimulatedCluster]:
    """Starts `num_nodes` pretended nodes on this machine and connects to them while inside.

    Everything is down afterwards.

    Args:
        cpus_per_node: what each node claims to have; nothing is pinned.
        gpus: for each node, the numbers of this machine's GPUs that it shows; None shows none.
        meanwhile: is called while the nodes come up; it needs no cluster.

    Raises:
        JobError: Ray is not installed, or the cluster did not come up; the message holds Ray's last
            words.
    """
    from .ray_session import connected

    check_possible(num_nodes)
    devices = tuple(map(tuple, gpus)) if gpus is not None else ((),) * num_nodes
    directory = new_directory()
    plan = Plan(str(directory), cpus_per_node, devices, object_store_bytes)
    with ray_variables(directory, write_token(directory, _token())):
        host = start_host(plan)
        try:
            if meanwhile is not None:
                meanwhile()
            importlib.import_module("ray")  # half a second, in which the nodes come up
            address = await_address(host, directory)
            with connected(address):
                yield SimulatedCluster(address, directory, host.pid)
        finally:
            _stop_host(host, directory)


def check_possible(num_nodes: int) -> None:
    """Raises JobError where Ray is missing or nodes cannot have addresses of their own.

    Linux has all of the loopback's, macOS one.
    """
    from .ray_session import require_ray

    require_ray()
    for address in map(node_address, range(num_nodes)):
        try:
            with socket.socket() as probe:
                probe.bind((address, 0))
        except OSError as error:
            raise JobError(
                f"a simulated cluster of {num_nodes} node(s) needs the address {address} on this "
                f"machine ({error.strerror}): on macOS, add it with `sudo ifconfig lo0 alias "
                f"{address}`, or use `moebius train`, which needs none"
            ) from None


def new_directory() -> Path:
    """Returns a new private folder for a cluster's session files, sockets and token.

    It belongs to this process; those of processes that were killed are removed.
    """
    sweep_directories()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=DIRECTORIES))
    processes.write_owner(directory, os.getpid())
    return directory


@functools.cache
def _token() -> str:
    """Returns one token per process: Ray's client reads it once and keeps it."""
    return secrets.token_hex(32)


def write_token(directory: Path, token: str) -> Path:
    """Writes a cluster's token where only its owner can read it; returns the file."""
    token_file = directory / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(token)
    (directory / "ray").mkdir()
    return token_file


@contextlib.contextmanager
def ray_variables(directory: Path, token_file: Path) -> Iterator[None]:
    """Makes Ray use a cluster's own token and folder while inside, whatever the user's shell says."""
    own = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        # also where Ray notes "the current cluster": the user's own note stays untouched
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
    hidden = ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
    before = {name: os.environ.get(name) for name in (*own, *hidden)}
    _set(own | dict.fromkeys(hidden))
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    """Sets environment variables; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def start_host(plan: Plan) -> subprocess.Popen[str]:
    """Starts the process that holds a cluster, in this process's environment."""
    with open(Path(plan.directory) / "host.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.host", plan.to_json()],
            stdin=subprocess.DEVNULL if plan.stays else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for the command line alone
        )


def await_address(host: subprocess.Popen[str], directory: Path) -> str:
    """Returns the address of a cluster that is coming up.

    Raises:
        JobError: it does not; the message holds Ray's last words.
    """
    assert host.stdout is not None
    ready, _, _ = select.select([host.stdout], [], [], START_TIMEOUT_S)
    line = host.stdout.readline() if ready else ""
    told = json.loads(line) if line else {}
    if "address" not in told:
        why = "could not be started" if ready else f"did not come up within {START_TIMEOUT_S:.0f} s"
        said = told.get("error") or read_tail(directory / "host.log", 2000)
        raise JobError(f"the simulated cluster {why}; Ray's last output:\n{said.strip()}")
    return told["address"]


def _stop_host(host: subprocess.Popen[str], directory: Path) -> None:
    assert host.stdin is not None
    assert host.stdout is not None
    host.stdin.close()
    try:
        host.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        processes.end([*processes.descendants(host.pid), host.pid])
        host.wait()
    host.stdout.close()
    shutil.rmtree(directory, ignore_errors=True)  # the host has done it unless it was killed
