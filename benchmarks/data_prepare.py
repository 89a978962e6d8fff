"""Compares preparing with only reading and encoding the same text, for `benchmarks.data`.

Rounds of four, each with two processes:

bare         every split read, encoded and discarded; the processes are warm
local        `prepare` from scratch: its processes start and import what they need
local again  again into another folder, by the same processes
ray          `prepare` on a Ray with two CPUs and warm workers

Each is reported in seconds of wall time and in processor seconds of all its processes; with Ray,
its own servants are counted apart from its workers and this process. This module and its parent
import little, like `moebius prepare`, because a process of the pool imports them again.
"""

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import psutil

from moebius.data_pipeline.make.pools import LocalPool, TaskPool, import_tasks
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.sources.formats import InputSplit, plan_splits, read_documents
from moebius.data_pipeline.tokenizers.tokenizer import tokenizer_of

_TEXTS = 100  # of a call of the tokenizer
_SETTLED = 0.05  # of a processor: what Ray may take once its own start is over
_SETTLE_S = 60


@dataclass
class Timed:
    """Holds one way to process all text, and the time of each round."""

    wall_s: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)
    servants_s: list[float] = field(default_factory=list)  # of Ray itself


def compare(config: PrepareConfig, folder: Path, rounds: int) -> dict[str, Any]:
    """Prepares into new folders in every way, all of them in each round.

    Args:
        config: with an existing tokenizer, so that only the processing of documents is compared.
        folder: receives the prepared folders.
        rounds: number of rounds.
    """
    found: dict[str, Timed] = {}
    with ExitStack() as stack:
        bare = stack.enter_context(Bare(config))
        cluster = _cluster(stack)
        for number in range(rounds):
            bare.measure(found.setdefault("bare", Timed()))
            here = folder / f"round-{number}"
            _local(config, here, found)
            if cluster is not None:
                cluster.measure(config, here / "ray", found.setdefault("ray", Timed()))
    return _figures(found)


def _figures(found: dict[str, Timed]) -> dict[str, Any]:
    bare = found["bare"]
    figures: dict[str, Any] = {}
    for name, timed in found.items():
        figures[name] = {
            "wall_s": [round(one, 3) for one in timed.wall_s],
            "processor_s": [round(one, 3) for one in timed.processor_s],
        }
        if timed.servants_s:
            figures[name]["servants_s"] = [round(one, 3) for one in timed.servants_s]
        if timed is not bare:
            figures[name] |= {
                "bare_÷": _ratio(bare.wall_s, timed.wall_s),
                "bare_÷_processor": _ratio(bare.processor_s, timed.processor_s),
            }
    return figures


def _ratio(bare: list[float], other: list[float]) -> float:
    """Returns the median ratio over the rounds, each of which measures side by side."""
    pairs = zip(bare, other, strict=True)
    return round(statistics.median(one / two for one, two in pairs), 3)


# Bare --------------------------------------------------------------------------------------------


class Bare:
    """Runs two processes that read and encode, and keep nothing; a context manager."""

    def __init__(self, config: PrepareConfig):
        self._jobs = [(config, split) for split in plan_splits(config)]
        self._pool: Pool = multiprocessing.get_context("spawn").Pool(2)

    def measure(self, timed: Timed) -> None:
        """Processes all text once."""
        self._pool.map(encode, self._jobs[:2], chunksize=1)  # everything is imported and loaded
        began = time.perf_counter()
        processor_s = self._pool.map(encode, self._jobs, chunksize=1)
        timed.wall_s.append(time.perf_counter() - began)
        timed.processor_s.append(sum(processor_s))

    def __enter__(self) -> "Bare":
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.terminate()
        self._pool.join()


def encode(job: tuple[PrepareConfig, InputSplit]) -> float:
    """Reads and encodes a split; returns the processor seconds."""
    began = time.process_time()
    config, split = job
    tokenizer, pending = tokenizer_of(Path(config.tokenizer)), list[str]()
    for document in read_documents(split, config.all_sources[0]):
        pending.append(document.text)
        if len(pending) == _TEXTS:
            tokenizer.encode_batch(pending)
            pending.clear()
    tokenizer.encode_batch(pending)
    return time.process_time() - began


# Processes of this machine -----------------------------------------------------------------------


def _local(config: PrepareConfig, folder: Path, found: dict[str, Timed]) -> None:
    """Prepares twice with one pool: with starting processes, then with warm ones."""
    cold, warm = (found.setdefault(name, Timed()) for name in ("local", "local again"))
    before, began = _ended_s(), time.perf_counter()
    with LocalPool(2) as pool:
        prepare(config, folder / "local", pool=pool)
        cold.wall_s.append(time.perf_counter() - began)
        cold_s = _living_s()
        warm.wall_s.append(_seconds(config, folder / "again", pool))
        warm.processor_s.append(_living_s() - cold_s)
    cold.processor_s.append(_ended_s() - before - warm.processor_s[-1])


def _seconds(config: PrepareConfig, folder: Path, pool: TaskPool) -> float:
    began = time.perf_counter()
    prepare(config, folder, pool=pool)
    return time.perf_counter() - began


def _ended_s() -> float:
    """Returns the processor seconds of this process and its ended children."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in found)


def _living_s() -> float:
    """Returns the processor seconds of this process and its living children."""
    return _taken_s(lambda process: True) + time.process_time()


def _taken_s(counts: Callable[[psutil.Process], bool]) -> float:
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            if counts(process):
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return total


# Ray ---------------------------------------------------------------------------------------------


class Cluster:
    """Runs a Ray with two CPUs on this machine, with workers and servants started."""

    def __init__(self) -> None:
        import ray

        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            # as `moebius prepare --address` has it: by default all others of a busy machine come first
            _system_config={"worker_niceness": 0},
        )
        ray.get([ray.remote(_begin).remote() for _ in range(2)])
        self._settle()

    def measure(self, config: PrepareConfig, folder: Path, timed: Timed) -> None:
        """Prepares once."""
        from moebius.cluster.ray_tasks import RayPool

        workers_s, servants_s = self._taken()
        began = time.perf_counter()
        with RayPool() as pool:
            prepare(config, folder, pool=pool)
        timed.wall_s.append(time.perf_counter() - began)
        after = self._taken()
        timed.processor_s.append(after[0] - workers_s)
        timed.servants_s.append(after[1] - servants_s)

    def _taken(self) -> tuple[float, float]:
        workers_s = _taken_s(_is_worker) + time.process_time()
        return workers_s, _taken_s(lambda process: not _is_worker(process))

    def _settle(self) -> None:
        """Waits until the processes that Ray starts beside its workers have started."""
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            before, began = sum(self._taken()), time.perf_counter()
            time.sleep(1)
            if sum(self._taken()) - before < _SETTLED * (time.perf_counter() - began):
                return


def _is_worker(process: psutil.Process) -> bool:
    return any(word.startswith("ray::") for word in process.cmdline()[:1])


def _cluster(stack: ExitStack) -> Cluster | None:
    """Starts a Ray that ends with the stack; None if it is not installed."""
    try:
        import ray
    except ImportError:
        return None
    stack.callback(ray.shutdown)
    return Cluster()


def _begin() -> None:
    import_tasks()
    time.sleep(1)  # so that the other task has a worker of its own
