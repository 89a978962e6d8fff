"""Measures collectives by message size and ranks.

    python -m benchmarks.gloo_table [--worlds 2 4 8] [--rounds 31]
    torchrun --nproc-per-node 8 -m benchmarks.gloo_table --backend nccl

The second command measures one world, torchrun's, on GPUs.

Bytes are those of the whole tensor on one rank: an all-to-all's input (including the rank's own
share), the gathered result, a reduce-scatter's input, an all-reduce's tensor. A time is the slowest
rank's time per call, in a series of calls long enough to measure (40 ms). It is the median of
`--rounds` series, spread over the run because the machine's speed drifts.

Takes about 7 minutes on 2 idle cores and writes results/gloo_table.json (nccl: nccl_table.json).
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.report import save

SIZES = tuple(2**power for power in range(10, 25))  # 1 KiB … 16 MiB
SERIES_S = 0.04
MAX_CALLS = 200
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    options = parser.parse_args()
    if options.backend == "nccl":
        rows = on_gpus(options.rounds)
    else:
        rows = [row for world in options.worlds for row in on_processes(world, options.rounds)]
    if rows:
        show(rows)
        print(
            "written: "
            f"{save(f'{options.backend}_table', {'backend': options.backend, 'rows': rows})}"
        )


def on_processes(world: int, rounds: int) -> list[Row]:
    """Returns the rows of one world of Gloo processes on this machine."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    mp.spawn(_rank, args=(world, store.port, rounds, results), nprocs=world)  # pyright: ignore[reportPrivateImportUsage]
    return results.get()


def _rank(rank: int, world: int, port: int, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    rows = measure(rounds, torch.device("cpu"))
    if rank == 0:
        results.put(rows)
    dist.destroy_process_group()


def on_gpus(rounds: int) -> list[Row]:
    """Returns the rows of torchrun's world; empty on every rank but the first."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rows = measure(rounds, device) if dist.get_rank() == 0 else measure(rounds, device)[:0]
    dist.destroy_process_group()
    return rows


def measure(rounds: int, device: torch.device) -> list[Row]:
    """Measures every operation at every size. Collective."""
    calls = {(op, size): make(size, device) for op, make in OPERATIONS.items() for size in SIZES}
    counts = {key: _enough_calls(call, device) for key, call in calls.items()}
    times: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            times[key].append(_series(call, counts[key], device))
    return [
        {
            "op": op,
            "world": dist.get_world_size(),
            "bytes": size,
            "seconds": statistics.median(found),
        }
        for (op, size), found in times.items()
    ]


def _enough_calls(call: Callable[[], Any], device: torch.device) -> int:
    """Returns how many calls fill a series, the same on every rank."""
    _series(call, 3, device)  # connections are made at the first call
    return max(3, min(MAX_CALLS, int(SERIES_S / _series(call, 5, device))))


def _series(call: Callable[[], Any], count: int, device: torch.device) -> float:
    """Returns the seconds of one call on the slowest rank."""
    dist.barrier()
    _wait_for(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    _wait_for(device)
    seconds = torch.tensor(
        [(time.perf_counter() - start) / count], dtype=torch.float64, device=device
    )
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _all_to_all(size: int, device: torch.device) -> Callable[[], Any]:
    sent, received = _floats(size, device), _floats(size, device)
    return lambda: dist.all_to_all_single(received, sent)


def _all_gather(size: int, device: torch.device) -> Callable[[], Any]:
    gather: Any = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )  # its name since torch 2.13
    part, whole = _floats(size // dist.get_world_size(), device), _floats(size, device)
    return lambda: gather(whole, part)


def _reduce_scatter(size: int, device: torch.device) -> Callable[[], Any]:
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    part, whole = _floats(size // dist.get_world_size(), device), _floats(size, device)
    return lambda: scatter(part, whole)


def _all_reduce(size: int, device: torch.device) -> Callable[[], Any]:
    whole = _floats(size, device)
    return lambda: dist.all_reduce(whole)


def _floats(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size // 4, device=device)


OPERATIONS: dict[str, Callable[[int, torch.device], Callable[[], Any]]] = {
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
}


def show(rows: list[Row]) -> None:
    """Prints one line per size and one column per operation and world."""
    columns = sorted({(row["op"], row["world"]) for row in rows})
    found = {(row["op"], row["world"], row["bytes"]): row["seconds"] for row in rows}
    table = Table(
        "KiB", *(f"{op} {world}" for op, world in columns), title="milliseconds", box=None
    )
    for size in SIZES:
        table.add_row(
            str(size // 1024), *(f"{1e3 * found[*column, size]:.3f}" for column in columns)
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
