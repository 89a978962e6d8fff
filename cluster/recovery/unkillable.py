"""Processes that SIGKILL does not end: stuck in the kernel, most often in a network file system or a
driver that hangs (state D).

Such a process holds its memory and its device until the kernel lets it go, and nobody can say when.
A node that has one is not used again by its job; the journal says which process it is, and in which
function of the kernel it stands, which names the file system or driver to look at.
"""

import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from ..nodes import processes

_WAIT_S = 2.0  # for processes that are only slow to end: `Node.stop` has waited before


def unkillable(run_dir: str, address: str) -> str:
    """Says which processes of a run cannot be ended on a node that runs none of it now; "": none.

    Args:
        run_dir: absolute, as it was given to the launch.
        address: of the node: pretended nodes share a machine, and each answers for its own.
    """
    mine = {
        pid: marks
        for pid, marks in processes.find(run_dir).items()
        if processes.RANK in marks and _address_of(run_dir, marks) == address
    }
    stuck = processes.end(mine, timeout_s=_WAIT_S)
    if not stuck:
        return ""
    named = "; ".join(_describe(pid, mine[pid]) for pid in stuck)
    return f"SIGKILL does not end {named} on {socket.gethostname()} ({address})"


def _address_of(run_dir: str, marks: Mapping[str, str]) -> str:
    """Returns the address of the node on which a rank was started."""
    generation, rank = int(marks[processes.MARK_GENERATION]), int(marks[processes.RANK])
    for path in Path(run_dir).glob(f"logs/g{generation:03d}/node*/attempt.json"):
        with suppress(OSError, ValueError, KeyError):  # torn by what ended the node
            attempt = json.loads(path.read_bytes())
            if rank // attempt["launch"]["ranks_per_node"] == attempt["node_rank"]:
                return attempt["address"]
    return ""


def _describe(pid: int, marks: Mapping[str, str]) -> str:
    who = f"rank {int(marks[processes.RANK])} of generation {int(marks[processes.MARK_GENERATION])}"
    return f"process {pid} ({who}), {_where_in_the_kernel(pid)}"


def _where_in_the_kernel(pid: int) -> str:
    """Says what a process is doing, as far as the system shows it."""
    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        return "which ends just now"
    words = "state D (uninterruptible)" if state == psutil.STATUS_DISK_SLEEP else f"state {state}"
    function = ""
    with suppress(OSError):  # no Linux, or not shown to this user
        function = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8").strip("0\n")
    return f"{words} in the kernel's {function}" if function else words
