"""A Ray cluster of pretended nodes on this machine, which is gone without a trace when its user is.

The cluster lives below a host process (`python -m moebius.cluster.simulated`). That process holds
the raylets, adopts every orphan below it, and tears everything down when its standard input closes:
after a normal exit, after Ctrl-C, and after a kill -9 of the command line. If the host itself is
killed, the kernel takes the raylets with it (Ray binds them to it).

Authentication: Ray 2.60 turns tokens on for local clusters and writes one into the user's home.
Here the mode is always explicit: a token of this process's own, in the cluster's own directory
(mode 0600), gone with it. Each node has an address of its own, 127.0.0.2, 127.0.0.3, …

Cost, measured on 2 cores (ray 2.60, 2 nodes): 3.5 s to start, 0.5 GB of proportional memory in 12
processes; a further node 1.2 s and 0.12 GB.
"""

import contextlib
import functools
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import processes
from .job import JobError
from .tracebacks import read_tail

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0

# Death of a node is noticed after 5 s instead of Ray's 15; no worker processes are started in
# advance (60 MB each).
_SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}


@dataclass(frozen=True)
class SimulatedCluster:
    """Describes a running simulated cluster, to which this process is connected."""

    address: str
    directory: Path  # session files, sockets, token; removed at the end
    host_pid: int


@dataclass(frozen=True)
class _Plan:
    """What the host process is told, on its command line."""

    directory: str
    cpus_per_node: int
    gpus: tuple[
        tuple[int, ...], ...
    ]  # device numbers of each node: pretended nodes must not share a device
    object_store_bytes: int


@contextlib.contextmanager
def simulated_cluster(
    num_nodes: int,
    *,
    cpus_per_node: int = 2,
    gpus: Sequence[Sequence[int]] | None = None,
    object_store_bytes: int = 80 << 20,
) -> Iterator[SimulatedCluster]:
    """Starts `num_nodes` pretended nodes on this machine and connects to them while inside.

    Everything is down afterwards.

    Args:
        cpus_per_node: what each node claims to have; nothing is pinned.
        gpus: for each node, the numbers of this machine's GPUs that it shows; None shows none.
        object_store_bytes: of each node; 75 MiB is the least that Ray accepts.

    Raises:
        JobError: Ray is not installed, or the cluster did not come up; the message holds Ray's last
            words.
    """
    from .ray_session import connected, require_ray

    require_ray()
    _require_addresses(num_nodes)
    # Not below $TMPDIR: socket paths must stay under 108 characters, and Ray adds some 80.
    directory = Path(tempfile.mkdtemp(prefix="moebius-", dir="/tmp"))
    plan = _Plan(str(directory), cpus_per_node, _device_lists(num_nodes, gpus), object_store_bytes)
    with _explicit_environment(directory):
        host = _start_host(plan)
        try:
            address = _await_address(host, directory)
            with connected(address):
                yield SimulatedCluster(address, directory, host.pid)
        finally:
            _stop_host(host, directory)


def _node_address(number: int) -> str:
    return f"127.0.0.{number + 2}"


def _require_addresses(num_nodes: int) -> None:
    """Every node has an address of its own on the loopback; Linux has them all, macOS one."""
    for address in map(_node_address, range(num_nodes)):
        try:
            with socket.socket() as probe:
                probe.bind((address, 0))
        except OSError as error:
            raise JobError(
                f"a simulated cluster of {num_nodes} node(s) needs the address {address} on this "
                f"machine ({error.strerror}); on macOS `sudo ifconfig lo0 alias {address}` adds "
                "it, and `moebius train` needs none"
            ) from None


def _device_lists(
    num_nodes: int, gpus: Sequence[Sequence[int]] | None
) -> tuple[tuple[int, ...], ...]:
    if gpus is None:
        return ((),) * num_nodes
    assert len(gpus) == num_nodes, "one list of devices per node"
    return tuple(tuple(devices) for devices in gpus)


@functools.cache
def _token() -> str:
    """One token per process: Ray's client reads it once and keeps it."""
    return secrets.token_hex(32)


@contextlib.contextmanager
def _explicit_environment(directory: Path) -> Iterator[None]:
    token_file = directory / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(_token())
    (directory / "ray").mkdir()
    values = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_TMPDIR": str(
            directory
        ),  # also where Ray notes "the current cluster": the user's own note stays untouched
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
    hidden = {
        name: os.environ.pop(name)
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")
        if name in os.environ
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        os.environ.update(hidden)


def _start_host(plan: _Plan) -> subprocess.Popen[str]:
    with open(Path(plan.directory) / "host.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(asdict(plan))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for the command line alone
        )


def _await_address(host: subprocess.Popen[str], directory: Path) -> str:
    assert host.stdout is not None
    ready, _, _ = select.select([host.stdout], [], [], START_TIMEOUT_S)
    line = host.stdout.readline() if ready else ""
    told = json.loads(line) if line else {}
    if "address" not in told:
        why = "could not be started" if ready else f"was not up within {START_TIMEOUT_S:.0f} s"
        said = told.get("error") or read_tail(directory / "host.log", 2000)
        raise JobError(f"the simulated cluster {why}; Ray's last words:\n{said.strip()}")
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


def host(plan: _Plan) -> None:
    """Starts the cluster, says its address, waits until standard input closes, and ends it all."""
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        print(json.dumps({"address": _start_cluster(plan)}), flush=True)
        sys.stdin.read()
    except Exception:
        print(json.dumps({"error": traceback.format_exc()}), flush=True)
        raise
    finally:
        _end_all_below()
        shutil.rmtree(plan.directory, ignore_errors=True)


def _start_cluster(plan: _Plan) -> str:
    from ray.cluster_utils import Cluster

    cluster = Cluster(shutdown_at_exit=True)
    for number, devices in enumerate(plan.gpus):
        arguments: dict[str, Any] = {
            "num_cpus": plan.cpus_per_node,
            "num_gpus": len(devices),
            "object_store_memory": plan.object_store_bytes,
            "node_ip_address": _node_address(number),
            "include_log_monitor": False,
            "env_vars": {"CUDA_VISIBLE_DEVICES": ",".join(str(device) for device in devices)},
        }
        if number == 0:
            arguments |= {
                "include_dashboard": False,
                "no_monitor": True,
                "_system_config": _SYSTEM_CONFIG,
            }
        cluster.add_node(wait=False, **arguments)
    cluster.wait_for_nodes()
    assert cluster.address is not None
    return cluster.address


def _end_all_below() -> None:
    """Ends every process below this one, orphans included: what is killed leaves its children to
    us.
    """
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while (below := processes.descendants(os.getpid())) and time.monotonic() < deadline:
        processes.end(below, timeout_s=1.0)
        _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    host(_Plan(**values | {"gpus": tuple(tuple(devices) for devices in values["gpus"])}))
