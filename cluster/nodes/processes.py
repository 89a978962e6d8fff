"""Binds a run's processes on one machine to their parents, finds them again, and ends them.

Every layer dies with the one above it (actor → agent → ranks). On Linux, PR_SET_PDEATHSIG sends SIGKILL when
the *thread* that forked ends. Agents also get SIGKILL, because one that waits for peers inside C++ would not
notice SIGTERM. Processes that escape are found by marks in their environment: run folder, generation, rank.

The system shows a fork's environment as its template (template.py) was started with it. So a fork also keeps an
empty file in memory open whose name is the mark (`write_mark`), and `find` reads the names of open files, too.

On other systems (macOS) nothing binds a process to its parent: after a kill -9 of the command, its ranks
continue until the next start in the same run folder ends them. `difference_from_linux` says so.
"""

import ctypes
import json
import os
import platform
import re
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from ...train.record.heartbeat import started_ticks

MARK = "MOEBIUS_RUN_DIR"  # in the environment of every process of a run: its absolute run folder
MARK_GENERATION = "MOEBIUS_GENERATION"
PARENT = "MOEBIUS_PARENT_PID"  # which must be alive when the child binds itself
RANK = "RANK"  # set by torchrun

_MARK_FILE = re.compile(rf"/memfd:({MARK_GENERATION}|{RANK})=(\d+)")
_OWNER = "owner.json"  # in a folder that one process makes and removes

IS_LINUX = sys.platform == "linux"

_SLOW_TO_END_S = 2.0  # for processes that end slowly, beyond the wait in `Node.stop`

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def bind_to_parent() -> None:
    """Makes this process die with its parent, on Linux; survives exec, not fork.

    On other systems it exits only if the parent has ended already. The parent's pid comes through the
    environment, because a parent that dies before this call would go unnoticed.
    """
    if IS_LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get(PARENT)
    if parent is not None and int(parent) != os.getppid():
        sys.exit(f"the parent process {parent} has already ended")


def become_child(parent: int, log: Path) -> None:
    """Gives a fork its own session and log, and binds it to its parent."""
    os.setsid()
    log_to(log)
    os.environ[PARENT] = str(parent)
    bind_to_parent()


def log_to(log: Path) -> None:
    """Appends this process's standard output and error to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def adopt_orphans() -> None:
    """Makes this process the parent of orphaned descendants, so that it can end them; Linux only."""
    if IS_LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def difference_from_linux() -> str | None:
    """Returns a warning for users of systems other than Linux; None on Linux."""
    if IS_LINUX:
        return None
    return (
        f"on {platform.system()}, ranks do not end with the command that started them: stop the "
        "job with Ctrl-C. After kill -9, they run on until the next start in the same run folder"
    )


def descendants(pid: int) -> list[int]:
    """Returns all living processes below `pid`."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def write_mark(mark: str, value: int) -> None:
    """Marks this process, which is a fork, so that `find` and its children see it."""
    os.environ[mark] = str(value)
    os.memfd_create(f"{mark}={value}")  # open until this process ends


def write_owner(folder: Path, pid: int) -> None:
    """Records the process that owns a folder, for `was_left`."""
    own = {"pid": pid, "started_ticks": started_ticks(pid), "pid_namespace": _pid_namespace()}
    (folder / _OWNER).write_text(json.dumps(own), encoding="utf-8")


def was_left(folder: Path) -> bool:
    """Returns whether a private folder of this user belongs to a process that has ended.

    False if the process may still run, for example in another container that shares the disk.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = folder.lstat()
        private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
        owner = json.loads((folder / _OWNER).read_text(encoding="utf-8"))
        is_ours = found.st_uid == os.getuid() and owner["pid_namespace"] == _pid_namespace()
        return private and is_ours and started_ticks(owner["pid"]) != owner["started_ticks"]
    return False


def _pid_namespace() -> str:
    """Returns what distinguishes this container's process numbers from another's."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def find(
    run_dir: str, *, generation: int | None = None, before: int | None = None
) -> dict[int, Mapping[str, str]]:
    """Returns a run's processes on this machine, with their environment.

    Templates belong to no generation, and are returned only without a filter.

    Args:
        run_dir: absolute, as in the launch.
        generation: only this one.
        before: or only earlier generations.
    """
    found = {}
    for pid in psutil.pids():
        marks = _environment(pid)
        if marks.get(MARK) != run_dir or pid == os.getpid():
            continue
        marks |= _marks_of_fork(pid)
        own = int(marks.get(MARK_GENERATION, "-1"))
        if (generation is None and before is None) or own == generation or 0 <= own < (before or 0):
            found[pid] = marks
    return found


def end(pids: Iterable[int], *, timeout_s: float = 10.0) -> list[int]:
    """Kills processes and waits for their end; returns those that are still alive."""
    left = list(pids)
    for pid in left:
        kill(pid)
    deadline = time.monotonic() + timeout_s
    while (left := [pid for pid in left if _is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def kill(pid: int) -> bool:
    """Sends SIGKILL; returns False if the process was already gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _is_alive(pid: int) -> bool:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return False
    # a zombie only occupies its number
    return status not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def _environment(pid: int) -> dict[str, str]:
    try:
        return psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return {}  # gone meanwhile, or another user's


def _marks_of_fork(pid: int) -> dict[str, str]:
    marks = {}
    with suppress(OSError):  # gone meanwhile, or not Linux
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if match := _MARK_FILE.match(os.readlink(descriptor)):
                    marks[match[1]] = match[2]
    return marks


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def unkillable(run_dir: str, address: str) -> str:
    """Describes a run's processes that cannot be killed, on a node that runs none of it now.

    SIGKILL does not end a process that is stuck in the kernel (state D), usually in a hanging network file
    system or driver, which the kernel's function identifies. It keeps its memory and device for an unknown
    time.

    Args:
        run_dir: absolute, as in the launch.
        address: of the node: simulated nodes share a machine, and each reports its own processes.
    """
    mine = {
        pid: marks
        for pid, marks in find(run_dir).items()
        if RANK in marks and _address_of(run_dir, marks) == address
    }
    stuck = end(mine, timeout_s=_SLOW_TO_END_S)
    if not stuck:
        return ""
    named = "; ".join(_describe(pid, mine[pid]) for pid in stuck)
    return f"SIGKILL does not end {named} on {socket.gethostname()} ({address})"


def _address_of(run_dir: str, marks: Mapping[str, str]) -> str:
    """Returns the address of the node that a rank was started on."""
    generation, rank = int(marks[MARK_GENERATION]), int(marks[RANK])
    for path in Path(run_dir).glob(f"logs/g{generation:03d}/node*/assignment.json"):
        with suppress(OSError, ValueError, KeyError):  # torn when the node ended
            told = json.loads(path.read_bytes())
            if rank // told["launch"]["ranks_per_node"] == told["node_rank"]:
                return told["address"]
    return ""


def _describe(pid: int, marks: Mapping[str, str]) -> str:
    rank, generation = int(marks[RANK]), int(marks[MARK_GENERATION])
    return f"process {pid} (rank {rank} of generation {generation}), {_what_it_does(pid)}"


def _what_it_does(pid: int) -> str:
    """Returns the state of a process and its kernel function, if the system shows them."""
    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        return "which is just ending"
    words = "state D (uninterruptible)" if state == psutil.STATUS_DISK_SLEEP else f"state {state}"
    function = ""
    with suppress(OSError):  # not Linux, or not shown to this user
        function = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8").strip("0\n")
    return f"{words} in the kernel's {function}" if function else words


def main() -> None:
    """Binds this process to the agent, opens the rank's log and executes the user's command.

    python -m moebius.cluster.nodes.processes LOG_DIR COMMAND...
    """
    log_dir, *command = sys.argv[1:]
    bind_to_parent()
    log_to(Path(log_dir) / f"rank{os.environ[RANK]}.log")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
