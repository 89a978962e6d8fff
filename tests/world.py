"""Runs a function of a test file on N real processes, as torchrun would start them, and brings back
what they return.

    from world import run_ranks

    def sum_of_ranks(offset):                       # a module-level function of the test file; runs on every rank
        with start_process("cpu", timeout_s=20) as process:
            value = torch.tensor(float(process.rank + offset))
            dist.all_reduce(value)
            return value.item()

    def test_sum():
        assert run_ranks(sum_of_ranks, 4, 10) == [46.0] * 4    # one result per rank, in the order of ranks

The function is called as fn(*args), with torchrun's variables in its environment (RANK, WORLD_SIZE,
LOCAL_RANK, …), one thread for torch, and no process group: it starts one itself if it wants one.
Arguments and results travel by pickle.

How: a fork server that has imported torch and most of moebius once forks the ranks, so four of them
cost 0.15 s (4 s the first time). The test file is loaded in each rank from its path under the name
that pytest gave it, for in importlib mode no import would find it. The store for the rendezvous
lives in this process, as torchrun's agent keeps it, so no port is ever guessed. A rank that raises
ends the world and its traceback becomes the test's error; a rank that does not come is shown with
its stacks. Ranks die with the fork server (PR_SET_PDEATHSIG), and the fork server with this
process.
"""

import atexit
import ctypes
import faulthandler
import importlib.util
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

# how long the other ranks may still report after the first failure, so that the cause is among them
_AFTERMATH_S = 0.3
# Half a second per rank of what every test would import anew. Nothing that starts a thread, since a
# fork takes none along: pyarrow's allocator does.
_PRELOAD = [
    "hypothesis",
    "pytest",
    "torch._dynamo",  # every optimizer imports it at its first step
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "moebius.distributed.parallelize",
    "moebius.simulation.dispatch",
    "moebius.train.config.run_config",
    "moebius.train.expert_placement",
    "moebius.train.metrics.step_metrics",
]


_fork_servers: set[int] = set()


class RankFailed(AssertionError):
    """A rank raised, died or did not come; the message carries the tracebacks."""


@dataclass(frozen=True)
class _Task:
    """What a rank needs to find the function; `payload` is unpickled only after the test file is
    loaded.
    """

    file: str
    module: str
    qualname: str
    payload: bytes
    environment: Mapping[str, str]
    stacks_file: str


@dataclass
class _Rank:
    process: Any
    results: Any  # a Connection; the type checker knows it by another platform's name
    stacks_file: str
    outcome: tuple[bool, Any] | None = None  # (succeeded, value or traceback)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 150,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """fn(*args) on `world_size` processes; their results by rank. RankFailed if one raises, dies or
    is late.

    `environment` adds to torchrun's variables, for example {"MOEBIUS_GENERATION": "3"}.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        tasks = [
            _task(fn, args, rank, world_size, store.port, environment or {}, folder)
            for rank in range(world_size)
        ]
        ranks: list[_Rank] = []
        try:
            ranks.extend(_start(task) for task in tasks)
            _collect(ranks, time.monotonic() + timeout_s, timeout_s)
            return [rank.outcome[1] for rank in ranks if rank.outcome]
        finally:
            _end(ranks)


def _task(
    fn: Callable[..., Any],
    args: Sequence[Any],
    rank: int,
    world_size: int,
    port: int,
    extra: Mapping[str, str],
    folder: str,
) -> _Task:
    module = sys.modules[fn.__module__]
    if "<" in fn.__qualname__ or module.__file__ is None:
        raise ValueError(
            f"{fn.__qualname__} must be a module-level function of a file: a rank finds it by its "
            "name"
        )
    torchrun = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "OMP_NUM_THREADS": 1,
    }
    return _Task(
        file=module.__file__,
        module=fn.__module__,
        qualname=fn.__qualname__,
        payload=pickle.dumps(tuple(args)),
        environment={**{name: str(value) for name, value in torchrun.items()}, **extra},
        stacks_file=os.path.join(folder, f"stacks{rank}.txt"),
    )


def _start(task: _Task) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(task, sending), daemon=True)
    process.start()
    sending.close()  # so that a dead rank reads as the end of its results
    return _Rank(process, receiving, task.stacks_file)


def _stop_fork_server() -> None:
    """By itself it would outlive us by half a second."""
    for pid in _fork_servers:
        os.kill(
            pid, signal.SIGKILL
        )  # still our child, if only a dead one: the number cannot be another's
        os.waitpid(pid, 0)


def _collect(ranks: list[_Rank], deadline: float, timeout_s: float) -> None:
    """Waits for every rank's outcome; raises RankFailed at the first failure (and its aftermath) or
    the deadline.
    """
    failed = False
    while pending := [rank for rank in ranks if rank.outcome is None]:
        ready = wait(
            [rank.results for rank in pending], timeout=max(0.0, deadline - time.monotonic())
        )
        if not ready:
            break
        for rank in pending:
            if rank.results in ready:
                rank.outcome = _outcome(rank)
                if not rank.outcome[0] and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + _AFTERMATH_S)
    failures = [
        (index, rank.outcome[1])
        for index, rank in enumerate(ranks)
        if rank.outcome and not rank.outcome[0]
    ]
    if failures:
        raise RankFailed(
            "\n".join(f"rank {index} of {len(ranks)} failed:\n{trace}" for index, trace in failures)
        )
    if late := [index for index, rank in enumerate(ranks) if rank.outcome is None]:
        came = [index for index in range(len(ranks)) if index not in late]
        stacks = "\n".join(f"rank {index} stands at:\n{_stacks(ranks[index])}" for index in late)
        raise RankFailed(
            f"after {timeout_s:g} s ranks {late} did not come back (ranks {came} did)\n{stacks}"
        )


def _outcome(rank: _Rank) -> tuple[bool, Any]:
    try:
        fork_server, *outcome = pickle.loads(rank.results.recv_bytes())
    except EOFError:
        rank.process.join(5)
        return False, f"the process died without a word (exit code {rank.process.exitcode})"
    if fork_server not in _fork_servers:
        if not _fork_servers:
            atexit.register(_stop_fork_server)
        _fork_servers.add(fork_server)
    return tuple(outcome)


def _stacks(rank: _Rank) -> str:
    os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.2)  # faulthandler writes at once; nothing tells us when
    return (
        Path(rank.stacks_file).read_text()
        if Path(rank.stacks_file).exists()
        else "(not started yet)"
    )


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if rank.outcome is None or not rank.outcome[0]:
            rank.process.kill()
    for rank in ranks:
        rank.process.join(5)
        if rank.process.is_alive():  # it delivered its result and then hangs at its end
            rank.process.kill()
            rank.process.join()
        rank.results.close()


def _serve(task: _Task, results: Connection) -> None:
    """The life of a rank's process."""
    _die_with_parent()
    os.environ.update(task.environment)
    torch.set_num_threads(1)
    with open(task.stacks_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            fn = _find(task)
            message = pickle.dumps((os.getppid(), True, fn(*pickle.loads(task.payload))))
        except BaseException:  # noqa: BLE001 - whatever ends a rank is the test's business
            message = pickle.dumps((os.getppid(), False, traceback.format_exc()))
        results.send_bytes(message)
        results.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)


def _find(task: _Task) -> Callable[..., Any]:
    """Loads the test file under pytest's name for it, so that its classes pickle in both
    directions.
    """
    if task.module not in sys.modules:
        spec = importlib.util.spec_from_file_location(task.module, task.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {task.file}")
        module = importlib.util.module_from_spec(spec)
        for parent in itertools.accumulate(
            task.module.split(".")[:-1], lambda path, name: f"{path}.{name}"
        ):
            sys.modules.setdefault(
                parent, types.ModuleType(parent)
            )  # pickle imports a module's parents first
        sys.modules[task.module] = module
        spec.loader.exec_module(module)
    found: Any = sys.modules[task.module]
    for name in task.qualname.split("."):
        found = getattr(found, name)
    return found


def _die_with_parent() -> None:
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew of our wish
        os._exit(1)
