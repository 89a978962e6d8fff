"""Processes of a run on one machine: binding them to their parents, finding them again, ending
them.

Every layer dies with the one above it (actor → agent → ranks). The kernel does that:
PR_SET_PDEATHSIG sends SIGKILL when the *thread* that forked ends. SIGKILL also for the agent: one
that waits for its peers inside C++ would not notice SIGTERM. What slips through all the same is
found by the mark that each process carries in its environment (/proc/*/environ).

Linux only, as are the machines on which jobs run.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

MARK = "MOEBIUS_RUN_DIR"  # in the environment of every process of a run: the absolute run folder
MARK_GENERATION = "MOEBIUS_GENERATION"
PARENT = "MOEBIUS_PARENT_PID"  # who must be alive when the child binds itself

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def bind_to_parent() -> None:
    """Makes this process die with its parent; survives exec, not fork.

    The parent's pid comes through the environment, because a parent that died before this call
    would go unnoticed.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get(PARENT)
    if parent is not None and int(parent) != os.getppid():
        sys.exit(f"the parent process {parent} has already ended")


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent ends, so that it can end
    them all.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`, children before grandchildren."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        children.setdefault(parent, []).append(child)
    found = [pid]
    for ancestor in found:
        found += children.get(ancestor, [])
    return found[1:]


def find(
    run_dir: str, *, generation: int | None = None, before: int | None = None
) -> dict[int, Mapping[str, str]]:
    """Processes on this machine that belong to a run, with their environment.

    Args:
        run_dir: absolute, as it was given to the launch.
        generation: only those of this generation.
        before: only those of earlier generations.
    """
    found = {}
    for pid in _pids():
        environment = _environment(pid)
        if environment.get(MARK) != run_dir or pid == os.getpid():
            continue
        own = int(environment.get(MARK_GENERATION, "0"))
        if (generation is None or own == generation) and (before is None or own < before):
            found[pid] = environment
    return found


def end(pids: Iterable[int], *, timeout_s: float = 10.0) -> list[int]:
    """Kills processes and waits until they are gone; returns those that are still there (stuck in
    the kernel).
    """
    left = list(pids)
    for pid in left:
        kill(pid)
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in left if _is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def kill(pid: int) -> bool:
    """Sends SIGKILL; False when the process was already gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # a zombie holds nothing but its number


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> dict[str, str]:
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}  # gone meanwhile, or another user's
    pairs = (entry.partition("=") for entry in data.decode(errors="replace").split("\0"))
    return {key: value for key, equals, value in pairs if equals}


def _parents() -> dict[int, int]:
    parents = {}
    for pid in _pids():
        try:
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return parents


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        raise OSError(
            "jobs of several processes need Linux: their lifetimes are bound with prctl(2)"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
