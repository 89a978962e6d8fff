"""Starts a rank from torchrun's environment and stops it again; takes 30-100 ms on Gloo.

The rendezvous store is wrapped in a PrefixStore named after the job's generation and torchrun's
restart attempt. Otherwise a restarted rank reads the addresses of its dead predecessors from the
agent's store, which outlives them, and most restarts fail with "failed to connect" (torch 2.13).

Before they create the process group, the ranks compare their versions and devices (agreement.py). If
a collective fails inside `with start_process(…)`, the error names it and the ranks that did not come
(diagnosis.py).

A process without torchrun's environment is a world of one with a store in its own memory. A world on
one machine listens only on the loopback; docs/security.md says what is open otherwise.
"""

import ctypes
import errno
import logging
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from .agreement import agree, version_facts
from .diagnosis import CollectiveError, Reporter, explain, report_exception
from .store import LOOPBACK, bind, is_loopback, loopback_interface, serve_store

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 600.0
_CONNECT_S = 30.0  # minimum: the store exists before any rank, but its machine may be busy
_LET_GO_S = 0.02
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)
# Interfaces of Gloo and NCCL, which answer anyone: a world on one machine uses only the loopback.
_LISTEN_ON = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ON_ALL_INTERFACES = "MOEBIUS_STORE_ON_ALL_INTERFACES"  # 1 lets the rendezvous store do so
_chosen_here: set[str] = set()  # those of _LISTEN_ON that this module has set
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class DeviceError(ValueError):
    """Raised if this machine lacks the requested device."""


@dataclass(frozen=True)
class Process:
    """This rank; as a context manager it leaves its process groups on exit."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str  # torch.distributed's name
    timeout_s: float  # of every collective
    ranks_per_node: int = 1
    store: Store = field(default_factory=HashStore, repr=False, compare=False)  # this generation's
    reporter: Reporter | None = field(default=None, repr=False, compare=False)

    def agree(self, what: str, facts: Mapping[str, str], *, timeout_s: float | None = None) -> None:
        """Raises AgreementError on every rank unless all ranks have the same facts.

        Waits `timeout_s` for the others; None means the timeout of a collective.
        """
        agree(
            what,
            facts,
            store=self.store,
            rank=self.rank,
            world_size=self.world_size,
            timeout_s=self.timeout_s if timeout_s is None else timeout_s,
        )

    def __enter__(self) -> "Process":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error other ranks may wait in a collective, and destroying the groups could wait for
        # them. The process ends without it, so that its agent learns of the error soon.
        if error is None or self.world_size == 1:
            if self.reporter is not None:
                self.reporter.stop()
            stop_process()
            return
        found = explain(error, store=self.store, rank=self.rank, world_size=self.world_size)
        if found is not None:
            raise CollectiveError(found) from error
        report_exception(self.store, self.rank, error)


@dataclass(frozen=True)
class _Place:
    """This rank's place in torchrun's environment."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def start_process(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    threads: int = 0,
) -> Process:
    """Joins the world that the environment describes and returns this rank's process.

    `auto` selects CUDA if the node has a GPU for each of its ranks, and the CPU if it has none;
    `threads` of the CPU are torch's default if 0.

    Raises:
        ValueError: the environment is incomplete, CUDA is requested but missing, or ranks disagree.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "this process is already in a world: call stop_process() before start_process()"
        )
    if threads:
        torch.set_num_threads(threads)
    place = _place_of(os.environ)
    chosen = _choose_device(device, place)
    store = _store(os.environ, place, timeout_s)
    agree(  # ranks with different backends would wait for each other forever
        "start",
        {"device": chosen.type, **version_facts()},
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout_s=timeout_s,
    )
    backend = "gloo" if chosen.type == "cpu" else "cpu:gloo,cuda:nccl"
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    else:
        keep_freed_memory()
    # torch's flight recorder, which diagnosis.py reads
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if _is_on_one_machine(os.environ, place):
        _keep_to_the_loopback()
    hook = sys.excepthook
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    if place.world_size == 1:
        sys.excepthook = hook  # torch's prefixes every line of a traceback with "[rank0]:"
    return Process(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        device=chosen,
        backend=backend,
        timeout_s=timeout_s,
        ranks_per_node=place.local_world_size,
        store=store,
        reporter=Reporter(store, place.rank) if place.world_size > 1 else None,
    )


def stop_process() -> None:
    """Leaves all process groups; harmless if there are none."""
    if dist.is_initialized():
        # A Gloo thread releases a collective's tensors after the rank has continued, and needs the
        # GIL for it. If a group outlives this function (a model's dispatchers hold it), the thread
        # may still wait for the GIL at interpreter shutdown, which aborts the process
        # (pytorch/pytorch#190489). This sleep gives it time.
        time.sleep(_LET_GO_S)
        dist.destroy_process_group()
    while _chosen_here:  # the next world of this process may be on several machines
        os.environ.pop(_chosen_here.pop(), None)


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory from now on instead of returning it to the system.

    glibc returns large freed blocks to the system, which zeroes their pages at the next allocation, in
    every step, layer and exchange. The cost of keeping them: the process never shrinks, and varying
    sizes fragment memory (tests/distributed/process/test_host_memory.py bounds it at twice the live
    bytes). Blocks beyond 64 MiB in other threads, and preloaded allocators, behave as before.

    Returns:
        Whether the C library supports it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return (
        mallopt is not None
        and bool(mallopt(_MMAP_MAX, 0))
        and bool(mallopt(_TRIM_THRESHOLD, -1))  # never
    )


def store_prefix(environment: Mapping[str, str]) -> str:
    """Returns the store's key prefix for this generation and torchrun's restart within it."""
    generation = int(environment.get("MOEBIUS_GENERATION", "0"))
    restart = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return f"moebius/generation_{generation}/restart_{restart}"


def _place_of(environment: Mapping[str, str]) -> _Place:
    missing = [name for name in _TORCHRUN_VARIABLES if name not in environment]
    if len(missing) == len(_TORCHRUN_VARIABLES):
        return _Place(rank=0, world_size=1, local_rank=0, local_world_size=1)
    if missing:
        present = {name: environment[name] for name in _TORCHRUN_VARIABLES if name in environment}
        raise ValueError(
            f"torchrun's environment is incomplete: {', '.join(missing)} missing, {present} set; "
            "start the ranks with torchrun, or unset all of these for a world of one"
        )
    place = _Place(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        local_rank=int(environment["LOCAL_RANK"]),
        local_world_size=int(
            environment.get("LOCAL_WORLD_SIZE", int(environment["LOCAL_RANK"]) + 1)
        ),
    )
    if not 0 <= place.rank < place.world_size:
        raise ValueError(f"RANK {place.rank} is not in a world of WORLD_SIZE {place.world_size}")
    return place


def _choose_device(wanted: str, place: _Place) -> torch.device:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = num_gpus >= place.local_world_size
    if wanted == "auto":
        if num_gpus and not enough:
            raise DeviceError(
                f"rank {place.rank} sees {num_gpus} GPUs, but its node has {place.local_world_size} ranks, each "
                "of which needs its own: start as many ranks per node as it has GPUs (job.ranks_per_node), let "
                "every rank see all GPUs of its node (Slurm may bind one per task), or set train.device=cpu"
            )
        wanted = "cuda" if enough else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if not enough:
        raise DeviceError(
            f"device 'cuda' was requested, but rank {place.rank} sees {num_gpus} GPUs and its node has "
            f"{place.local_world_size} ranks (torch {torch.__version__}, built for CUDA {torch.version.cuda}); "
            "use device 'auto' or 'cpu', fewer ranks per node, or a torch built for CUDA"
        )
    return torch.device("cuda", place.local_rank)


def _store(environment: Mapping[str, str], place: _Place, timeout_s: float) -> Store:
    prefix = store_prefix(environment)
    if "MASTER_PORT" not in environment:
        return PrefixStore(prefix, HashStore())
    timeout = timedelta(seconds=max(timeout_s, _CONNECT_S))
    agent_serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    if not agent_serves and _is_on_one_machine(environment, place):
        host = host if is_loopback(host) else LOOPBACK
    if place.rank == 0 and not agent_serves:
        store = _serve_store(host, port, place, timeout)
    else:
        store = TCPStore(host, port, place.world_size, timeout=timeout, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore(prefix, store)


def _serve_store(host: str, port: int, place: _Place, timeout: timedelta) -> TCPStore:
    """Serves the store on one address, because no agent does.

    Raises:
        ValueError: the address cannot be bound, and the user has not allowed all interfaces.
    """
    try:
        bound = bind(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        why = f"is not an address of this machine ({error.strerror})"
    else:
        if is_loopback(host) or not is_loopback(bound.getsockname()[0]):
            return serve_store(bound, timeout_s=timeout.total_seconds())
        bound.close()
        why = "is this machine's loopback here, which other machines cannot reach"
    if os.environ.get(_ON_ALL_INTERFACES) != "1":
        raise ValueError(
            f"the rendezvous store cannot be bound: MASTER_ADDR {host} {why}. Set MASTER_ADDR to rank 0's "
            f"address in the ranks' network. If there is none (behind a service's address), "
            f"{_ON_ALL_INTERFACES}=1 lets the store listen on all interfaces, where it answers "
            f"anyone who reaches port {port}"
        )
    logger.warning(
        "the rendezvous store listens on all interfaces and answers anyone who reaches port %d, because "
        "%s=1: MASTER_ADDR %s %s",
        port,
        _ON_ALL_INTERFACES,
        host,
        why,
    )
    return TCPStore(
        host, port, place.world_size, is_master=True, timeout=timeout, wait_for_workers=False
    )


def _is_on_one_machine(environment: Mapping[str, str], place: _Place) -> bool:
    """Returns whether all ranks are on this machine, alike on every rank; False if unknown."""
    if place.world_size == 1:
        return True
    if "LOCAL_WORLD_SIZE" in environment:
        return place.local_world_size == place.world_size
    agent_serves = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return not agent_serves and is_loopback(environment["MASTER_ADDR"])


def _keep_to_the_loopback() -> None:
    """Makes Gloo and NCCL listen only on the loopback, unless the user has chosen an interface."""
    interface = loopback_interface()
    for name in _LISTEN_ON:
        if interface is not None and name not in os.environ:
            os.environ[name] = interface
            _chosen_here.add(name)
