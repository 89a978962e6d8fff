"""Holds a simulated cluster in one process: the raylets are its children and end with it.

    python -m moebius.cluster.places.host PLAN

It starts the simulated nodes, prints the cluster's address in one line, adopts every orphan below it, and
ends everything when its user is gone. For a cluster of one command, the user holds its standard input. For
one that stays (`moebius cluster up`), the user connects to a Unix socket in the cluster's private folder: one
line of JSON asks, one line answers. If the host itself is killed, the kernel kills the raylets (Ray binds
them to it).
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..nodes import processes

CONTROL = "control"  # the socket, in the cluster's folder
# Not $TMPDIR: socket paths must stay under 108 characters, and Ray adds some 80.
DIRECTORIES, PREFIX = Path("/tmp"), "moebius-"
MAX_REQUEST = 4096
LEAST_STORE_BYTES = 80 << 20  # per node; Ray requires 75 MiB
REQUEST_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 15.0
JOIN_TIMEOUT_S = 60.0  # of a new node, which needs 2 s, or 20 s on a busy machine
REAP_EVERY_S = 1.0
_SERVERS = ("gcs_server", "raylet")

# A node whose processes are gone refuses connections and is dead after 2 s instead of Ray's 15; one that does
# not answer on a busy machine has 14 s. No workers are started in advance (60 MB each). Workers, and so
# ranks, have normal priority: Ray's default of nice 15 leaves them a thirtieth of what a busy neighbour gets.
_SYSTEM_CONFIG = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 4,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    "worker_niceness": 0,
}


@dataclass(frozen=True)
class HostPlan:
    """Holds what the host process is to start, as plain values."""

    directory: str  # session files, sockets, token; removed at the end
    cpus_per_node: int
    gpus: Sequence[Sequence[int]]  # device numbers of each node, which nodes must not share
    stays: bool = False  # until told to end, instead of until its standard input closes


def node_address(number: int) -> str:
    """Returns the address of a simulated node: each has its own on the loopback."""
    return f"127.0.0.{number + 2}"


class PretendedNodes:
    """Holds the nodes of a simulated cluster by number; node 0 is the head."""

    def __init__(self, plan: HostPlan):
        from ray.cluster_utils import Cluster

        self._plan = plan
        self._cluster = Cluster(shutdown_at_exit=True)
        self._nodes: dict[int, Any] = {}
        self._killed: set[int] = set()
        for devices in plan.gpus:
            self._start(devices)
        self._cluster.wait_for_nodes(JOIN_TIMEOUT_S * len(plan.gpus))

    @property
    def address(self) -> str:
        """Returns host:port of the head."""
        assert self._cluster.address is not None
        return self._cluster.address

    def add(self) -> int:
        """Starts one more node without GPUs, and returns its number."""
        number = self._start(())
        self._await_alive(number)
        return number

    def kill(self, number: int) -> int:
        """Kills a node like a power cut: its raylet and all processes below it, at once.

        Returns the number of processes.

        Raises:
            ValueError: there is no such node, or it is the head.
        """
        if number == 0:
            raise ValueError("node 0 is the head and cannot be killed alone: end the cluster")
        if number not in self._nodes or not self._is_alive(number):
            alive = [one for one in self._nodes if one and self._is_alive(one)]
            raise ValueError(f"there is no live node {number}; live nodes: {alive}")
        own = self._pids(number)
        below = [pid for one in own for pid in processes.descendants(one)]
        self._killed.add(number)
        processes.end([*own, *below])
        self._cluster.worker_nodes.discard(self._nodes[number])
        return len({*own, *below})

    def describe(self) -> list[dict[str, Any]]:
        """Returns number, address, size and state of every node that was ever started."""
        return [
            {
                "node": number,
                "address": node_address(number),
                "cpus": self._plan.cpus_per_node,
                "gpus": len(self._devices(number)),
                "state": self._state(number),
            }
            for number in self._nodes
        ]

    def _state(self, number: int) -> str:
        if self._is_alive(number):
            return "alive"
        return "killed" if number in self._killed else "dead"

    def _devices(self, number: int) -> Sequence[int]:
        return self._plan.gpus[number] if number < len(self._plan.gpus) else ()

    def _start(self, devices: Sequence[int]) -> int:
        number = len(self._nodes)
        arguments: dict[str, Any] = {
            "num_cpus": self._plan.cpus_per_node,
            "num_gpus": len(devices),
            "object_store_memory": LEAST_STORE_BYTES,
            "node_ip_address": node_address(number),
            "include_log_monitor": False,
            "env_vars": {"CUDA_VISIBLE_DEVICES": ",".join(str(device) for device in devices)},
        }
        if number == 0:
            arguments |= {
                "include_dashboard": False,
                "no_monitor": True,
                "_system_config": _SYSTEM_CONFIG,
            }
        self._nodes[number] = self._cluster.add_node(wait=False, **arguments)
        return number

    def _await_alive(self, number: int) -> None:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while time.monotonic() < deadline:
            table = self._cluster.global_state.node_table()
            if any(
                node["Alive"] and node["NodeManagerAddress"] == node_address(number)
                for node in table
            ):
                return
            time.sleep(0.1)
        raise RuntimeError(f"node {number} did not join the cluster")

    def _pids(self, number: int) -> list[int]:
        started = self._nodes[number].all_processes.values()
        return [info.process.pid for infos in started for info in infos]

    def _is_alive(self, number: int) -> bool:
        raylet = self._nodes[number].all_processes.get("raylet")
        return bool(raylet) and raylet[0].process.poll() is None


def serve(plan: HostPlan) -> None:
    """Starts the cluster, prints its address, waits for its user to go, and ends it."""
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        nodes = _start_nodes(plan)
        listener = _listen(Path(plan.directory) / CONTROL) if plan.stays else None
        print(json.dumps({"address": nodes.address}), flush=True)
        if listener is None:
            sys.stdin.read()
        else:
            _detach_output()
            _answer_requests(nodes, listener)
    except Exception as error:
        told = {"error": traceback.format_exc(), "is_slow": _is_slow(error)}
        print(json.dumps(told), flush=True)
        raise
    finally:
        _end_all_below()
        shutil.rmtree(plan.directory, ignore_errors=True)


def _start_nodes(plan: HostPlan) -> PretendedNodes:
    """Starts the nodes, once more if the machine was too busy for Ray's patience."""
    try:
        return PretendedNodes(plan)
    except Exception as error:
        if not _is_slow(error):
            raise
        _end_all_below()
        return PretendedNodes(plan)


def _is_slow(error: Exception) -> bool:
    """Returns whether Ray's servers run, but had not answered in time."""
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process().children(recursive=True)
        servers = [each.status() for each in below if each.name() in _SERVERS]
        crashed = not servers or psutil.STATUS_ZOMBIE in servers
        return not crashed and "timed out" in str(error).lower()
    return False


def _listen(path: Path) -> socket.socket:
    """Opens the control socket; like its folder, only its owner can use it."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen()
    listener.settimeout(REAP_EVERY_S)
    return listener


def _detach_output() -> None:
    """Redirects standard output to standard error: the reader of the address will soon be gone."""
    sys.stdout.flush()
    os.dup2(2, 1)


def _answer_requests(nodes: PretendedNodes, listener: socket.socket) -> None:
    """Answers requests one after the other, until one asks for the end."""
    while True:
        _reap()
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection, contextlib.suppress(OSError):
            connection.settimeout(REQUEST_TIMEOUT_S)
            request = _read_request(connection)
            connection.sendall(json.dumps(_answer(nodes, request)).encode() + b"\n")
            if request.get("do") == "down":
                return


def _read_request(connection: socket.socket) -> Mapping[str, Any]:
    with connection.makefile("rb") as file:
        line = file.readline(MAX_REQUEST)
    try:
        request = json.loads(line)
    except ValueError:
        return {}
    return request if isinstance(request, dict) else {}


def _answer(nodes: PretendedNodes, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        match request.get("do"):
            case "status":
                return {"nodes": nodes.describe(), "runs": runs_at_work()}
            case "kill-node":
                return {"processes": nodes.kill(int(request["node"]))}
            case "add-node":
                return {"node": nodes.add()}
            case "down":
                return {}
        return {"error": f"unknown request {request.get('do')!r}"}
    except Exception as error:  # noqa: BLE001 - the client gets the message, and the cluster stays up
        return {"error": str(error) or type(error).__name__}


def sweep_directories() -> None:
    """Removes the folders of clusters that were killed together with their hosts."""
    for directory in DIRECTORIES.glob(f"{PREFIX}*"):
        if processes.was_left(directory) and not processes_of(str(directory)):
            shutil.rmtree(directory, ignore_errors=True)


def processes_of(directory: str) -> list[int]:
    """Returns the processes of a cluster by its folder, which is in Ray's environment.

    Processes that overwrote their environment with a title are found by their open log files.
    """
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or another user's
            process = psutil.Process(pid)
            if process.environ().get("RAY_TMPDIR") == directory or any(
                file.path.startswith(f"{directory}/") for file in process.open_files()
            ):
                found.append(pid)
    return [pid for pid in found if pid != os.getpid()]


def runs_at_work() -> list[str]:
    """Returns the run folders of agents and ranks below this process."""
    found = set()
    for pid in processes.descendants(os.getpid()):
        with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile
            found.add(psutil.Process(pid).environ().get(processes.MARK, ""))
    return sorted(found - {""})


def _end_all_below() -> None:
    """Ends every process below this one, including orphans that it has adopted meanwhile."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while (below := processes.descendants(os.getpid())) and time.monotonic() < deadline:
        processes.end(below, timeout_s=1.0)
        _reap()


def _reap() -> None:
    """Reaps children that have ended, including adopted orphans."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    serve(HostPlan(**json.loads(sys.argv[1])))
