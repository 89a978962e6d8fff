"""Runs the template: a process that has imported what agents and ranks need, and forks agents.

    python -m moebius.cluster.nodes.template SOCKET_FD KIND      (a child of the node)

It starts no thread, touches no device and draws no random number. It waits at a socket for orders, one JSON
object each; the order for an agent comes with a pipe that holds the generation's secret, which the template
does not read. The fork becomes the agent with its own session, environment, marks and log. `main` returns in
the fork as in a new process, so exit codes, tracebacks and atexit handlers are the usual ones.

Every layer dies with the one above it: node → template → agent → ranks.

Cost: 3 s of one core, once per job and node. Forks share unmodified memory: 4 ranks of the recipe `smoke` on
one node take 1.1 GB (proportional, with template and agent), and 1.8 GB as programs.
"""

import gc
import importlib
import importlib.util
import json
import os
import select
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import processes

if __name__ == "__main__":
    # before the imports below, which take a second on a busy machine: the process must be bound to
    # its parent as early as possible
    processes.bind_to_parent()

from ...train.record.process_log import print_through_log
from . import agent
from .template_process import MAX_MESSAGE_BYTES, TRAINING, Order, tell

_AGENTS_NEED = (
    f"{agent.__package__}.rendezvous",
    f"{agent.__package__}.ranks",
)
_RANKS_NEED = (
    "moebius.train.__main__",
    "torch._dynamo",  # 0.8 s: the first optimizer imports it
)
_CAN_COME_LATER = (
    "torch.utils.tensorboard",  # 0.7 s on rank 0, for the event files of the metrics
)
# Threads of libraries that stop and restart them around a fork.
_MAY_RUN = {"jemalloc_bg_thd"}


def main(channel: socket.socket, kind: str) -> int:
    """Serves orders until the node hangs up; in a fork, runs the agent or rank."""
    print_through_log()
    gc.disable()  # saves a fifth of the import time; imports leave next to no garbage (6 MB)
    import_all(kind, is_awaited=lambda: _has_orders(channel))
    if refusal := why_no_fork():
        tell(channel, refused=refusal)
        return 0
    gc.freeze()  # a collection in a fork would write to, and so copy, every page
    gc.enable()
    order = _Server(channel).serve()
    return 0 if order is None else agent.main(Path(order.log_dir), forks_ranks=kind == TRAINING)


def import_all(kind: str, *, is_awaited: Callable[[], bool]) -> None:
    """Imports everything that the forks need, including what they import lazily.

    Optional imports are skipped once the template `is_awaited`.
    """
    needed = _AGENTS_NEED + (_RANKS_NEED if kind == TRAINING else ())
    for name in needed:
        importlib.import_module(name)
    if kind != TRAINING:
        return
    for name in _CAN_COME_LATER:
        if not is_awaited() and importlib.util.find_spec(name):
            importlib.import_module(name)


def why_no_fork() -> str | None:
    """Returns why this process must not be forked; None if it may be."""
    import torch

    if torch.cuda.is_initialized():
        return "an import initialized a device"
    tasks = Path("/proc/self/task")
    names = [(task / "comm").read_text().strip() for task in tasks.iterdir()]
    own = (tasks / str(os.getpid()) / "comm").read_text().strip()
    names.remove(own)
    if others := sorted(set(names) - _MAY_RUN):
        return f"imports started threads: {', '.join(others)}"
    return None


def _has_orders(channel: socket.socket) -> bool:
    return bool(select.select([channel], [], [], 0.0)[0])


class _Server:
    """Takes orders and reports how the forks ended."""

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._children: dict[int, int] = {}  # pid → number of the order
        self._wake_up, told = os.pipe()
        os.set_blocking(told, False)
        os.set_blocking(self._wake_up, False)
        self._told = told

    def serve(self) -> Order | None:
        """Returns None when the node has hung up; in a fork, the order to carry out."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        with selectors.DefaultSelector() as events:
            events.register(self._channel, selectors.EVENT_READ)
            events.register(self._wake_up, selectors.EVENT_READ)
            while True:
                for key, _ in events.select():
                    if key.fileobj is self._channel:
                        goes_on, order = self._obey()
                        if not goes_on:
                            return order
                    else:
                        os.read(self._wake_up, 4096)
                self._reap()

    def _obey(self) -> tuple[bool, Order | None]:
        data, descriptors, _, _ = socket.recv_fds(self._channel, MAX_MESSAGE_BYTES, 1)
        if not data:
            return False, None
        message: dict[str, Any] = json.loads(data)
        if "kill" in message:
            self._kill(message["kill"])
            return True, None
        [secret] = descriptors
        order = Order(**message)
        if self._was_taken_back(order.number):
            os.close(secret)
            return True, None
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(order, secret, parent=own)
            return False, order
        os.close(secret)
        self._children[pid] = order.number
        tell(self._channel, started=order.number, pid=pid)
        return True, None

    def _was_taken_back(self, number: int) -> bool:
        """Returns whether the next message, which has come during the import, ends this order."""
        if not _has_orders(self._channel):
            return False
        following = self._channel.recv(MAX_MESSAGE_BYTES, socket.MSG_PEEK)
        return bool(following) and json.loads(following).get("kill") == number

    def _kill(self, number: int) -> None:
        """Kills a fork; its pid cannot be reused before it is reaped."""
        for pid, mine in self._children.items():
            if mine == number:
                processes.kill(pid)

    def _reap(self) -> None:
        for pid, number in list(self._children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._children[pid]
                tell(self._channel, ended=number, code=os.waitstatus_to_exitcode(status))

    def _become(self, order: Order, secret: int, *, parent: int) -> None:
        """Turns this fork into what `python -m moebius.cluster.nodes.agent` would be."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self._wake_up, self._told):
            os.close(descriptor)
        self._channel.close()
        os.dup2(secret, 0)
        os.close(secret)
        processes.become_child(parent, Path(order.log_dir) / "agent.log")
        processes.write_mark(processes.MARK_GENERATION, order.generation)


if __name__ == "__main__":
    sys.exit(main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2]))
