"""Ranks that wait for their number: forked by the agent before it has threads or secrets.

A fork takes over one thread, every lock and the whole memory. So the agent forks its ranks first of
all: before it reads the generation's secret, before the store's server runs in threads of its own.
Each rank has its log, its marks and its session at once, and waits at a pipe. When all agents have
met, torch's elastic agent starts its ranks; here that is one JSON object into each pipe: the
environment that a new process would have been given. Then the rank runs the training loop.

What torch does with ranks that are programs (watching, ending, exit codes, error files) it does
with these. Its own way with functions (MultiprocessContext, start_method="fork") reports one failed
rank of a node, whichever it looks at first, so that the rank that was killed may be left out for
one that lost its connection; and it waits for ever for a rank that exits 0 without returning.
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
from torch.distributed.elastic.multiprocessing.api import (
    PContext,
    SubprocessContext,
)

from . import processes

TRAINING_LOOP = "moebius.train.__main__"
_WAIT_S = 0.01  # between two looks for a rank's end
# A rank that SIGTERM does not end saves nothing any more: it is stopped, or stuck in a driver.
GRACE_S = 3


@dataclass(frozen=True)
class ForkedRank:
    """A forked rank that waits, as its agent holds it."""

    pid: int
    pipe: int  # where its environment goes

    def release(self, environment: dict[str, str]) -> None:
        """Lets the rank go on, with the environment that it would have been started with."""
        with os.fdopen(self.pipe, "wb") as pipe:
            pipe.write(json.dumps(environment).encode())


@dataclass(frozen=True)
class WaitingRank:
    """A forked rank as it sees itself."""

    pipe: int
    run_dir: str

    def run(self) -> int:
        """Waits for its environment and trains; returns at once if the agent ends before."""
        with os.fdopen(self.pipe, "rb") as pipe:
            told = pipe.read()
        if not told:
            return 0
        os.environ.update(json.loads(told))
        sys.argv = ["moebius.train", self.run_dir]
        importlib.import_module(TRAINING_LOOP).main()  # the template has imported it
        return 0


def fork_ranks(
    ranks: Iterable[int], log_dir: Path, run_dir: str
) -> tuple[ForkedRank, ...] | WaitingRank:
    """Forks the ranks of a node; in a fork, returns what it has to do.

    Standard input, from which the agent will read the secret, is empty in the forks.
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
    """torch's elastic agent, whose ranks are forked: they are released instead of started."""

    def __init__(
        self,
        *arguments: Any,
        forked: Sequence[ForkedRank],
        **named: Any,
    ) -> None:
        """Takes the arguments of LocalElasticAgent, and the forked ranks in local order."""
        super().__init__(*arguments, **named)
        self._forked = forked

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # torch makes the environments and calls this function; there is no other door
        module: Any = local_elastic_agent
        start_workers: Any = super()._start_workers
        original = module.start_processes
        module.start_processes = self._release
        try:
            return start_workers(worker_group)
        finally:
            module.start_processes = original

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Ends the ranks; torch would wait 30 s for one that SIGTERM does not end."""
        super()._shutdown(death_sig, min(timeout, GRACE_S))

    def _release(self, **arguments: Any) -> PContext:
        known = ("name", "entrypoint", "args", "envs", "logs_specs", "log_line_prefixes")
        context = _ForkedRanks(**{name: arguments[name] for name in known})
        context.forked = self._forked
        context.start()
        return context


class _ForkedRanks(SubprocessContext):
    """torch's view of the ranks of a node; only how they begin is another."""

    forked: Sequence[ForkedRank] = ()

    def _start(self) -> None:
        inherited = dict(os.environ)
        handlers: dict[int, Any] = {}
        for local_rank, rank_process in enumerate(self.forked):
            rank_process.release(inherited | self.envs[local_rank])
            handlers[local_rank] = _Handler(rank_process.pid)
        self.subprocess_handlers = handlers


class _Handler:
    """What torch's SubprocessHandler is for a program, for a fork of this process."""

    def __init__(self, pid: int) -> None:
        self.proc = _Child(pid)

    def close(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        if self.proc.poll() is None:
            os.killpg(self.proc.pid, death_sig)


class _Child:
    """What subprocess.Popen is for a program, for a fork of this process."""

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
