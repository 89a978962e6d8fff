"""Simulates a Ray cluster on this machine; nothing is left of it when its user is gone.

The cluster lives below a host process (host.py), which holds the raylets, adopts every orphan, and ends
everything when its standard input closes: after a normal exit, after Ctrl-C, and after a kill -9 of the
command line. Clusters that stay between commands are in standing.py.

Ray 2.60 turns on tokens for local clusters and writes one to the user's home. Here the token belongs to this
process, is in the cluster's own folder (mode 0600), and is removed with it. Each node has its own address:
127.0.0.2, 127.0.0.3, …

Cost on 2 cores (Ray 2.60, 2 nodes): 3.5 s to start, 0.5 GB of proportional memory in 12 processes; each
further node 1.2 s and 0.12 GB.
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
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..job import JobError, python_module
from ..nodes import processes
from ..report.tracebacks import read_tail
from .host import DIRECTORIES, PREFIX, HostPlan, node_address, sweep_directories
from .ray_session import connected, environment_kept, require_ray

# Over a minute was seen on two cores with twenty waiting processes; the host tries twice.
START_TIMEOUT_S, RAY_START_S = 300.0, 120
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class SimulatedCluster:
    """Describes a simulated cluster to which this process is connected."""

    address: str
    directory: Path  # session files, sockets, token; removed at the end
    host_pid: int


@contextlib.contextmanager
def simulated_cluster(
    num_nodes: int, *, cpus_per_node: int = 2, gpus: Sequence[Sequence[int]] | None = None
) -> Iterator[SimulatedCluster]:
    """Starts `num_nodes` simulated nodes and connects to them; ends them on exit.

    Args:
        cpus_per_node: offered by each node; nothing is pinned.
        gpus: numbers of this machine's GPUs that each node offers; None: none.

    Raises:
        JobError: Ray is missing, or the cluster did not start; with Ray's last output.
    """
    check_possible(num_nodes)
    devices = [list(numbers) for numbers in gpus or [()] * num_nodes]
    directory = new_directory()
    plan = HostPlan(str(directory), cpus_per_node, devices)
    with ray_variables(directory, write_token(directory, _token())):
        host = start_host(plan)
        try:
            importlib.import_module("ray")  # half a second, while the nodes start
            address = await_address(host, directory)
            with connected(address):
                yield SimulatedCluster(address, directory, host.pid)
        finally:
            _stop_host(host, directory)


def check_possible(num_nodes: int) -> None:
    """Raises JobError if Ray is missing or nodes cannot have their own addresses.

    Linux provides all loopback addresses, macOS only one.
    """
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

    It also removes the folders of processes that were killed.
    """
    sweep_directories()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=DIRECTORIES))
    processes.write_owner(directory, os.getpid())
    return directory


@functools.cache
def _token() -> str:
    """Returns one token per process, since Ray's client reads it only once."""
    return secrets.token_hex(32)


def write_token(directory: Path, token: str) -> Path:
    """Writes a cluster's token with mode 0600; returns the file."""
    token_file = directory / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(token)
    (directory / "ray").mkdir()
    return token_file


@contextlib.contextmanager
def ray_variables(directory: Path, token_file: Path) -> Iterator[None]:
    """Makes Ray use a cluster's own token and folder, whatever the user's environment says."""
    own = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        # Ray also notes "the current cluster" there, so the user's own note stays untouched
        "RAY_TMPDIR": str(directory),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_gcs_server_port_wait_time_s": str(RAY_START_S),
        "RAY_raylet_start_wait_time_s": str(RAY_START_S),
    }
    hidden = ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
    with environment_kept((*own, *hidden)):
        os.environ.update(own)
        for name in hidden:
            os.environ.pop(name, None)
        yield


def start_host(plan: HostPlan) -> subprocess.Popen[str]:
    """Starts the host process of a cluster, in this process's environment."""
    with open(Path(plan.directory) / "host.log", "ab") as log:
        return subprocess.Popen(
            python_module(f"{__package__}.host", json.dumps(asdict(plan))),
            stdin=subprocess.DEVNULL if plan.stays else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal must reach only the command line
        )


def await_address(host: subprocess.Popen[str], directory: Path) -> str:
    """Returns the address of a cluster that is starting.

    Raises:
        JobError: it does not start; with Ray's last output.
    """
    assert host.stdout is not None
    ready, _, _ = select.select([host.stdout], [], [], START_TIMEOUT_S)
    line = host.stdout.readline() if ready else ""
    told = json.loads(line) if line else {}
    if not ready or told.get("is_slow"):
        raise JobError(
            "the simulated cluster did not come up in time, because this machine is too busy or short of "
            "memory: enter the command again when less runs here, or `moebius train`, which needs no Ray"
        )
    if "address" not in told:
        said = told.get("error") or read_tail(directory / "host.log", 2000)
        raise JobError(
            f"the simulated cluster could not be started; Ray's last output:\n{said.strip()}"
        )
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
    shutil.rmtree(directory, ignore_errors=True)  # the host has removed it unless it was killed
