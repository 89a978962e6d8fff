"""Runs the self-test's ranks of one machine: an all-to-all over the ranks of all machines.

Gloo uses the interface that a job's agent would choose (nodes/agent.py). Each rank verifies every number that
it received.
"""

import datetime
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median

from ..nodes.agent import interface_of
from ..nodes.node import Address

NUM_BYTES = 2 << 20  # of the whole tensor on one rank
_WARM_UP, _CALLS = 2, 7
_TIMEOUT = datetime.timedelta(seconds=60)


@dataclass(frozen=True)
class Exchange:
    """Describes the self-test: who meets where, over which backend."""

    ranks_per_node: int
    world_size: int
    meets_at: Address  # of rank 0
    backend: str = "gloo"


def run_ranks(exchange: Exchange, node: int, address: str) -> tuple[bool, float]:
    """Runs this node's ranks; returns whether all ranks got right numbers, and the slowest's time in seconds."""
    spawned = multiprocessing.get_context("spawn")  # a fork may not use a device
    run = partial(_exchange, exchange, node, interface_of(address) or "")
    with ProcessPoolExecutor(exchange.ranks_per_node, mp_context=spawned) as pool:
        found = [*pool.map(run, range(exchange.ranks_per_node))]
    return found[0]  # all ranks agree


def _exchange(exchange: Exchange, node: int, interface: str, local_rank: int) -> tuple[bool, float]:
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    rank, world = node * exchange.ranks_per_node + local_rank, exchange.world_size
    host, port = exchange.meets_at
    dist.init_process_group(
        exchange.backend,
        init_method=f"tcp://{f'[{host}]' if ':' in host else host}:{port}",
        rank=rank,
        world_size=world,
        timeout=_TIMEOUT,
    )
    device = torch.device("cpu")
    if exchange.backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    each = max(1, NUM_BYTES // 4 // world)
    sent = torch.full((each * world,), float(rank), device=device)
    received, times = torch.empty_like(sent), []
    for _ in range(_WARM_UP + _CALLS):
        dist.barrier()
        started_s = time.perf_counter()
        dist.all_to_all_single(received, sent)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started_s)
    expected = torch.arange(world, dtype=torch.float32).repeat_interleave(each)
    is_wrong = not torch.equal(received.cpu(), expected)
    found = torch.tensor([is_wrong, median(times[_WARM_UP:])], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    dist.barrier()
    dist.destroy_process_group()
    return found[0].item() == 0, found[1].item()
