"""Forks ranks from the agent before it has threads or secrets.

A fork inherits one thread, every lock and the whole memory. So the agent forks its ranks first, before it
reads the generation's secret and before the store's server starts threads. Each rank has its own log, marks
and session, and waits at a pipe. Once all agents have met, torch's elastic agent starts its ranks: it writes
to each pipe, as one JSON object, the environment that a new process would have been given. The rank then runs
the training loop.

These ranks use torch's code for ranks that are programs (watching, ending, exit codes, error files). Torch's
own code for functions (MultiprocessContext, start_method="fork") reports only one failed rank of a node, so a
killed rank may be hidden by one that lost its connection, and it waits forever for a rank that exits with 0
without returning.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext

from . import processes

TRAINING_LOOP = "moebius.train.__main__"
_WAIT_S = 0.01  # between two checks whether a rank has ended
# A rank that survives SIGTERM is stopped or stuck in a driver, and saves nothing any more.
GRACE_S = 3


@dataclass(frozen=True)
class ForkedRank:
    """Holds a forked, waiting rank, for its agent."""

    pid: int
    pipe: int  # for its environment

    def release(self, environment: dict[str, str]) -> None:
        """Releases the rank with the environment that a new process would have been given."""
        with os.fdopen(self.pipe, "wb") as pipe:
            pipe.write(json.dumps(environment).encode())


@dataclass(frozen=True)
class WaitingRank:
    """Holds a forked rank's own side of the pipe."""

    pipe: int
    run_dir: str

    def run(self) -> int:
        """Waits for the environment and trains; returns at once if the agent ends first."""
        with os.fdopen(self.pipe, "rb") as pipe:
            told = pipe.read()
        if not told:
            return 0
        os.environ.update(json.loads(told))
        sys.argv = ["moebius.train", self.run_dir]
        importlib.import_module(TRAINING_LOOP).main()  # imported by the template
        return 0


def fork_ranks(
    ranks: Iterable[int], log_dir: Path, run_dir: str
) -> tuple[ForkedRank, ...] | WaitingRank:
    """Forks a node's ranks; returns them, or in a fork its own task.

    Standard input is empty in the forks, because the agent reads the secret from it.
    """
    agent = os.getpid()
    forked: list[ForkedRank] = []
    for rank in ranks:
        hear, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            for descriptor in (tell, *(rank_process.pipe for rank_process in forked)):
                os.close(descriptor)
            _become_rank(rank, log_dir, parent=agent)
            return WaitingRank(hear, run_dir)
        os.close(hear)
        forked.append(ForkedRank(pid, tell))
    return tuple(forked)


def _become_rank(rank: int, log_dir: Path, *, parent: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    processes.become_child(parent, log_dir / f"rank{rank}.log")
    processes.write_mark(processes.RANK, rank)


class WarmElasticAgent(LocalElasticAgent):
    """Releases forked ranks instead of starting them; otherwise torch's elastic agent."""

    def __init__(self, *arguments: Any, forked: Sequence[ForkedRank], **named: Any) -> None:
        """Takes the arguments of LocalElasticAgent, and the forked ranks in local order."""
        super().__init__(*arguments, **named)
        self._forked = forked

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # torch builds the environments and calls this function; there is no other hook
        module: Any = local_elastic_agent
        start_workers: Any = super()._start_workers
        original = module.start_processes
        module.start_processes = self._release
        try:
            return start_workers(worker_group)
        finally:
            module.start_processes = original

    def _release(self, **arguments: Any) -> PContext:
        known = ("name", "entrypoint", "args", "envs", "logs_specs", "log_line_prefixes")
        context = _ForkedRanks(**{name: arguments[name] for name in known})
        context.forked = self._forked
        context.start()
        return context


class _ForkedRanks(SubprocessContext):
    """Shows torch the forked ranks of a node; only their start differs."""

    forked: Sequence[ForkedRank] = ()

    def close(self, death_sig: signal.Signals | None = None, timeout: int = GRACE_S) -> None:
        """Ends the ranks; torch would wait 30 s for a rank that survives SIGTERM."""
        super().close(death_sig, min(timeout, GRACE_S))

    def _start(self) -> None:
        inherited = dict(os.environ)
        handlers: dict[int, Any] = {}
        for local_rank, rank_process in enumerate(self.forked):
            rank_process.release(inherited | self.envs[local_rank])
            handlers[local_rank] = _Handler(rank_process.pid)
        self.subprocess_handlers = handlers


class _Handler:
    """Does for a fork what torch's SubprocessHandler does for a program."""

    def __init__(self, pid: int) -> None:
        self.proc = _Child(pid)

    def close(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        if self.proc.poll() is None:
            os.killpg(self.proc.pid, death_sig)


class _Child:
    """Does for a fork what subprocess.Popen does for a program."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank, process {self.pid}", timeout or 0.0)
            time.sleep(_WAIT_S)
        return code
