"""Manages the simulated cluster that stays between commands: `moebius cluster up` and `down`.

A user has one. Its note, cluster/cluster.json in the user's state folder ($XDG_STATE_HOME/moebius, else
~/.local/state/moebius; mode 0700), names the host process (host.py) and the token. Reading the note of a dead
host removes it and what the host left, so a note that is returned belongs to a live cluster.

Cost: a cluster of four nodes uses 0.8 GB, and starts once instead of once per job.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from ...data_pipeline.files import write_atomically
from ..job import JobError
from ..nodes import processes
from .host import CONTROL, DIRECTORIES, PREFIX, HostPlan, processes_of, sweep_directories
from .ray_session import connected, refuse_unauthenticated
from .simulated import (
    await_address,
    check_possible,
    new_directory,
    ray_variables,
    start_host,
    write_token,
)

NOTE = "cluster.json"
ADDRESS = "simulated"  # for `cluster_at`
ANSWER_TIMEOUT_S = 90.0  # longer than the host waits for a new node
DOWN_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class StandingCluster:
    """Describes a simulated cluster that stays, and where its host is."""

    address: str
    directory: str  # session files, control socket, token; removed at the end
    token_file: str
    host_pid: int
    host_started: float  # distinguishes the host from a later process with the same pid

    def is_alive(self) -> bool:
        """Returns whether its host process is alive."""
        try:
            host = psutil.Process(self.host_pid)
            is_same = abs(host.create_time() - self.host_started) < 1.0
            return is_same and host.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def ask(self, do: str, **details: Any) -> dict[str, Any]:
        """Sends a request to the host and returns its answer.

        Raises:
            JobError: the host refuses, or does not answer.
        """
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(ANSWER_TIMEOUT_S)
                connection.connect(str(Path(self.directory) / CONTROL))
                connection.sendall(json.dumps({"do": do} | details).encode() + b"\n")
                with connection.makefile("rb") as file:
                    answer = json.loads(file.readline())
        except (OSError, ValueError) as error:
            raise JobError(
                f"the host of the simulated cluster (process {self.host_pid}) does not answer "
                f"({error}); `moebius cluster down --force` ends it"
            ) from None
        if "error" in answer:
            raise JobError(f"simulated cluster: {answer['error']}")
        return answer


@contextlib.contextmanager
def cluster_at(address: str) -> Iterator[Any]:
    """Connects to a cluster as `ray_session.connected` does; yields the module `ray`.

    `address` may also be "simulated", the cluster of `moebius cluster up`.
    """
    if address != ADDRESS:
        if address != "auto":
            refuse_unauthenticated(address)
        with connected(address) as ray:
            if address == "auto":
                refuse_unauthenticated(ray.get_runtime_context().gcs_address)
            yield ray
        return
    cluster = find_cluster()
    with (
        ray_variables(Path(cluster.directory), Path(cluster.token_file)),
        connected(cluster.address) as ray,
    ):
        yield ray


def start_cluster(num_nodes: int, *, cpus_per_node: int, gpus_per_node: int = 0) -> StandingCluster:
    """Starts a simulated cluster that stays until `end_cluster`, and writes its note.

    Args:
        cpus_per_node: offered by each node; nothing is pinned.
        gpus_per_node: of this machine's GPUs, each offered by one node.

    Raises:
        JobError: a cluster is up, Ray is missing, or the cluster does not start.
    """
    check_possible(num_nodes)
    folder = _claim()
    directory = new_directory()
    numbers = [range(node * gpus_per_node, (node + 1) * gpus_per_node) for node in range(num_nodes)]
    plan = HostPlan(str(directory), cpus_per_node, [*map(list, numbers)], stays=True)
    try:
        cluster = _start(plan)
        write_atomically(folder / NOTE, json.dumps(asdict(cluster), indent=1))
    except BaseException:
        processes.end(processes_of(str(directory)))
        shutil.rmtree(directory, ignore_errors=True)
        _remove_note()
        raise
    return cluster


def _start(plan: HostPlan) -> StandingCluster:
    """Starts the host of a cluster; returns when the cluster is up."""
    directory = Path(plan.directory)
    token_file = write_token(directory, secrets.token_hex(32))
    with ray_variables(directory, token_file):
        host = start_host(plan)
    address = await_address(host, directory)
    assert host.stdout is not None
    host.stdout.close()
    processes.write_owner(directory, host.pid)
    started = psutil.Process(host.pid).create_time()
    return StandingCluster(address, str(directory), str(token_file), host.pid, started)


def end_cluster(cluster: StandingCluster, *, force: bool = False) -> None:
    """Ends a cluster and everything in it.

    Raises:
        JobError: jobs are running in it, and `force` is not set.
    """
    if not force and (runs := cluster.ask("status")["runs"]):
        raise JobError(
            f"jobs are running in the simulated cluster: {', '.join(runs)}; "
            "stop them with `moebius stop`, or end the cluster with --force"
        )
    with contextlib.suppress(JobError):  # `_sweep` ends it then
        cluster.ask("down")
        _await_end(cluster)
    _sweep(cluster)


def find_cluster() -> StandingCluster:
    """Returns the cluster that is up.

    Raises:
        JobError: there is none.
    """
    cluster = cluster_if_up()
    if cluster is None:
        raise JobError(
            "no simulated cluster is up; start one with `moebius cluster up --simulate 4`"
        )
    return cluster


def cluster_if_up() -> StandingCluster | None:
    """Returns the cluster that is up; removes what dead ones left."""
    sweep_directories()
    cluster = _read_note()
    if cluster is not None and not cluster.is_alive():
        _sweep(cluster)
        return None
    return cluster


def state_folder() -> Path:
    """Returns the user's folder for state that outlives a command."""
    given = os.environ.get("XDG_STATE_HOME", "")
    base = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    return base / "moebius"


def _note_folder() -> Path:
    return state_folder() / "cluster"


def _claim() -> Path:
    """Makes the folder of a cluster that is about to start; only one command succeeds."""
    if cluster_if_up() is not None:
        raise JobError(
            f"a simulated cluster is up: use it (--address {ADDRESS}), or end it (`moebius "
            "cluster down`)"
        )
    folder = _note_folder()
    state_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    _require_private(state_folder())
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        age_s = time.time() - folder.stat().st_mtime
        raise JobError(
            f"{folder}: another command has been starting this cluster for {age_s:.0f} s; if "
            "none is running, remove this folder"
        ) from None
    return folder


def _require_private(folder: Path) -> None:
    """Refuses a folder of another user, who could lead us to a cluster of theirs."""
    facts = folder.stat()
    if facts.st_uid != os.getuid():
        raise JobError(f"{folder}: belongs to another user (uid {facts.st_uid})")
    if facts.st_mode & 0o077:
        folder.chmod(0o700)


def _read_note() -> StandingCluster | None:
    try:
        _require_private(_note_folder())
        return StandingCluster(**json.loads((_note_folder() / NOTE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None  # none, being removed, or written by another version


def _await_end(cluster: StandingCluster) -> None:
    deadline = time.monotonic() + DOWN_TIMEOUT_S
    while cluster.is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)


def _sweep(cluster: StandingCluster) -> None:
    """Ends what is left of a cluster and removes its files."""
    left = [cluster.host_pid, *processes.descendants(cluster.host_pid)]
    below = left if cluster.is_alive() else []
    processes.end([*below, *processes_of(cluster.directory)])
    directory = Path(cluster.directory)
    if directory.parent == DIRECTORIES and directory.name.startswith(PREFIX):
        shutil.rmtree(directory, ignore_errors=True)
    _remove_note()


def _remove_note() -> None:
    shutil.rmtree(_note_folder(), ignore_errors=True)
    with contextlib.suppress(OSError):  # not empty
        state_folder().rmdir()
