"""Runs a function of a test file on several real processes, as torchrun would start them.

    from world import run_ranks

    def sum_of_ranks(offset):  # a module-level function of the test file; every rank runs it
        with start_process("cpu", timeout_s=20) as process:
            value = torch.tensor(float(process.rank + offset))
            dist.all_reduce(value)
            return value.item()

    def test_sum():
        assert run_ranks(sum_of_ranks, 4, 10) == [46.0] * 4  # one result per rank, in their order

The function finds torchrun's variables in its environment (RANK, WORLD_SIZE, …). torch has one thread, and
no process group is open. Arguments and results travel by pickle.

A fork server that has imported torch and most of moebius forks the ranks, so four of them cost 0.15 s
(4 s the first time). Ranks die with the fork server (PR_SET_PDEATHSIG), and it dies with this process.
"""

import ctypes
import faulthandler
import importlib.util
import itertools
import multiprocessing
import operator
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
from typing import Any, NamedTuple

import row_order
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

# How long other ranks may still report after the first failure, so that its cause is among the reports.
_AFTERMATH_S = 0.3
_TORCHRUN = {
    "GROUP_RANK": 0,
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RESTART_COUNT": 0,
    "TORCHELASTIC_USE_AGENT_STORE": True,
    "OMP_NUM_THREADS": 1,
}
# What every rank would import for itself, at half a second each. Nothing here may start a thread, because
# a fork copies none: pyarrow's allocator does.
_PRELOAD = [
    "hypothesis",
    "pytest",
    "torch._dynamo",  # every optimizer imports it at its first step
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "moebius.distributed.parallelize",
    "moebius.planning.simulation.dispatch",
    "moebius.train.config.run_config",
    "moebius.distributed.placement.expert_placement",
]


class RankFailed(AssertionError):
    """Reports that a rank raised, died or was late, with the tracebacks."""


@dataclass(frozen=True)
class _Task:
    """Describes one rank's work. `payload` is unpickled only after the test file is loaded."""

    file: str
    module: str
    qualname: str
    payload: bytes
    environment: Mapping[str, str]
    stacks_file: str


class _Rank(NamedTuple):
    process: Any
    results: Any  # a Connection, which the type checker knows by another platform's name
    stacks_file: str


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 150,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls fn(*args) on `world_size` processes and returns their results by rank.

    Args:
        environment: adds to torchrun's variables, for example {"MOEBIUS_GENERATION": "3"}.

    Raises:
        RankFailed: a rank raised, died or was late.
    """
    # torchrun's agent keeps the store of the rendezvous too, so no port is ever guessed.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="world-") as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                variables = {
                    "RANK": rank,
                    "LOCAL_RANK": rank,
                    "WORLD_SIZE": world_size,
                    "LOCAL_WORLD_SIZE": world_size,
                    "MASTER_PORT": store.port,
                    **_TORCHRUN,
                    **(environment or {}),
                }
                ranks.append(_start(_task(fn, args, variables, f"{folder}/stacks{rank}.txt")))
            return _collect(ranks, timeout_s)
        except BaseException:
            for rank in ranks:
                rank.process.kill()
            raise
        finally:
            for rank in ranks:
                rank.process.join(5)
                rank.process.kill()  # if it delivered its result and then hangs at its end
                rank.process.join()
                rank.results.close()


def _task(
    fn: Callable[..., Any], args: Sequence[Any], variables: Mapping[str, object], stacks_file: str
) -> _Task:
    file = sys.modules[fn.__module__].__file__
    if "<" in fn.__qualname__ or file is None:
        raise ValueError(f"{fn.__qualname__} is not a module-level function: no rank can find it")
    environment = {name: str(value) for name, value in variables.items()}
    payload = pickle.dumps(tuple(args))
    return _Task(file, fn.__module__, fn.__qualname__, payload, environment, stacks_file)


def _start(task: _Task) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(task, sending), daemon=True)
    process.start()
    sending.close()  # so that a dead rank reads as the end of its results
    return _Rank(process, receiving, task.stacks_file)


def _collect(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    """Waits for every rank's result; raises RankFailed on a failure or time-out."""
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while pending := [n for n in range(len(ranks)) if n not in results and n not in failures]:
        left_s = max(0.0, deadline - time.monotonic())
        ready = wait([ranks[n].results for n in pending], timeout=left_s)
        if not ready:
            break
        had_failed = bool(failures)
        for n in pending:
            if ranks[n].results in ready:
                succeeded, value = _receive(ranks[n])
                (results if succeeded else failures)[n] = value
        if failures and not had_failed:
            deadline = min(deadline, time.monotonic() + _AFTERMATH_S)
    if failures:
        traces = [
            f"rank {n} of {len(ranks)} failed:\n{trace}" for n, trace in sorted(failures.items())
        ]
        raise RankFailed("\n".join(traces))
    if pending:
        stacks = "\n".join(f"rank {n} stands at:\n{_stacks(ranks[n])}" for n in pending)
        raise RankFailed(
            f"after {timeout_s:g} s ranks {pending} did not come back "
            f"(ranks {sorted(results)} did)\n{stacks}"
        )
    return [results[n] for n in range(len(ranks))]


def _receive(rank: _Rank) -> tuple[bool, Any]:
    try:
        return pickle.loads(rank.results.recv_bytes())
    except EOFError:
        rank.process.join(5)
        return False, f"the process died without a word (exit code {rank.process.exitcode})"


def _stacks(rank: _Rank) -> str:
    os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(0.2)  # faulthandler writes at once; nothing tells us when
    file = Path(rank.stacks_file)
    return file.read_text() if file.exists() else "(not started yet)"


def _serve(task: _Task, results: Connection) -> None:
    """Runs a rank's process from start to end."""
    _die_with_parent()
    os.environ.update(task.environment)
    torch.set_num_threads(1)
    row_order.install_if_wanted()
    with open(task.stacks_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            fn = _load_function(task)
            message = pickle.dumps((True, fn(*pickle.loads(task.payload))))
        except BaseException:  # noqa: BLE001 - whatever ends a rank is the test's business
            message = pickle.dumps((False, traceback.format_exc()))
        results.send_bytes(message)
        results.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)


def _load_function(task: _Task) -> Callable[..., Any]:
    """Loads the test file under the name that pytest gave it, so that its classes can be pickled.

    pytest's importlib mode gives names that no import would find.
    """
    if task.module not in sys.modules:
        spec = importlib.util.spec_from_file_location(task.module, task.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {task.file}")
        parents = task.module.split(".")[:-1]
        for parent in itertools.accumulate(parents, lambda path, name: f"{path}.{name}"):
            sys.modules.setdefault(parent, types.ModuleType(parent))  # pickle imports them first
        module = importlib.util.module_from_spec(spec)
        sys.modules[task.module] = module
        spec.loader.exec_module(module)
    return operator.attrgetter(task.qualname)(sys.modules[task.module])


def _die_with_parent() -> None:
    parent = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew of our wish
        os._exit(1)
