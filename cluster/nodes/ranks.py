"""Starts, watches and ends a node's ranks, below torch's elastic agent.

`RankAgent` implements the methods of torch's agent that depend on the kind of workers. Ranks of a user's
command are programs. Ranks of the training loop are forks of the agent, made before it has threads or secrets:
a fork inherits one thread, every lock and the whole memory. So the agent forks its ranks before it reads the
generation's secret and before the store's server starts threads. Each rank has its own log, marks and session,
and waits at a pipe. Once all agents have met, the agent writes to each pipe, as one JSON object, the
environment that a new process would have been given. The rank then runs the training loop.

Torch's own code for functions (MultiprocessContext, start_method="fork") reports only one failed rank of a
node, so a killed rank may be hidden by one that lost its connection, and it waits forever for a rank that exits
with 0 without returning.
"""

import contextlib
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ..job import python_module
from . import processes

TRAINING_LOOP = "moebius.train.__main__"
EXIT_BARRIER_S = 60.0  # how long an agent whose ranks are done waits for the other agents
# A rank that survives SIGTERM is stopped or stuck in a driver, and saves nothing any more.
GRACE_S = 3.0
_LOOK_S = 0.01  # between two checks whether ranks have ended

logger = logging.getLogger(__name__)


class RankProcess(Protocol):
    """Declares the methods of a rank's process that the agent calls; subprocess.Popen has them."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...


StartRank = Callable[[int, Mapping[str, str]], RankProcess]


class RankAgent(SimpleElasticAgent):
    """Runs torchrun's elastic agent with ranks that are forks or programs."""

    def __init__(self, spec: WorkerSpec, start_rank: StartRank) -> None:
        """Takes a function that starts a rank, given its local number and torch's variables."""
        super().__init__(spec, exit_barrier_timeout=EXIT_BARRIER_S)
        self._start_rank = start_rank
        self._ranks: dict[int, RankProcess] = {}  # by local rank

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._ranks = {
            worker.local_rank: self._start_rank(
                worker.local_rank, _variables_of(worker, worker_group)
            )
            for worker in worker_group.workers
        }
        return {local_rank: rank.pid for local_rank, rank in self._ranks.items()}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = [rank.poll() for rank in self._ranks.values()]
        if any(codes):
            self._shutdown()
            return RunResult(WorkerState.FAILED, failures=self._failures(worker_group))
        if None in codes:
            return RunResult(WorkerState.HEALTHY)
        returned = dict.fromkeys(worker.global_rank for worker in worker_group.workers)
        return RunResult(WorkerState.SUCCEEDED, returned)

    def _failures(self, worker_group: WorkerGroup) -> dict[int, ProcessFailure]:
        """Returns the failed ranks, including those that were ended because of others."""
        failures = {}
        for worker in worker_group.workers:
            rank = self._ranks[worker.local_rank]
            if code := rank.poll():
                failure = ProcessFailure(worker.local_rank, rank.pid, code, error_file="")
                failures[worker.global_rank] = failure
        return failures

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        """Ends the ranks; one that survives even SIGKILL is left to the supervisor."""
        for number in (death_sig, signal.SIGKILL):
            for rank in self._alive():
                logger.warning("sending %s to process %d", number.name, rank.pid)
                with contextlib.suppress(ProcessLookupError):  # it has no session yet, or has ended
                    os.killpg(rank.pid, number)
            deadline = time.monotonic() + GRACE_S
            while self._alive() and time.monotonic() < deadline:
                time.sleep(_LOOK_S)

    def _alive(self) -> list[RankProcess]:
        return [rank for rank in self._ranks.values() if rank.poll() is None]


def _variables_of(worker: Worker, group: WorkerGroup) -> dict[str, str]:
    """Returns the variables that torchrun gives to a rank."""
    values = {
        "RANK": worker.global_rank,
        "LOCAL_RANK": worker.local_rank,
        "ROLE_RANK": worker.role_rank,
        "GROUP_RANK": group.group_rank,
        "WORLD_SIZE": worker.world_size,
        "LOCAL_WORLD_SIZE": group.spec.local_world_size,
        "ROLE_WORLD_SIZE": worker.role_world_size,
        "GROUP_WORLD_SIZE": group.group_world_size,
        "ROLE_NAME": group.spec.role,
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": group.master_port,
        "TORCHELASTIC_RESTART_COUNT": 0,  # a generation never restarts its ranks
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
    }
    return {name: str(value) for name, value in values.items()}


def programs(log_dir: Path, command: Sequence[str]) -> StartRank:
    """Returns a function that starts ranks as programs (`processes.main`)."""
    words = [*python_module(processes.__name__, str(log_dir)), *command]
    return lambda local_rank, variables: subprocess.Popen(
        words, env=os.environ | variables, start_new_session=True
    )


@dataclass
class ForkedRank:
    """Holds a forked, waiting rank, for its agent."""

    pid: int
    pipe: int  # for its environment
    code: int | None = None

    def release(self, variables: Mapping[str, str]) -> None:
        """Releases the rank with the environment that a new process would have been given."""
        with os.fdopen(self.pipe, "wb") as pipe:
            pipe.write(json.dumps(os.environ | variables).encode())

    def poll(self) -> int | None:
        """Returns the exit code; None while it runs."""
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if ended else None
        return self.code


def forks(ranks: Sequence[ForkedRank]) -> StartRank:
    """Returns a function that releases forked ranks, which are in local order."""

    def release(local_rank: int, variables: Mapping[str, str]) -> RankProcess:
        ranks[local_rank].release(variables)
        return ranks[local_rank]

    return release


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
