"""Runs one rank of the self-test: an all-to-all on each node and over all nodes.

    python -m moebius.cluster.check.exchange FOLDER RANKS_PER_NODE BACKEND

It runs under the job's own agent (nodes/agent.py), so it uses the same addresses and interfaces as a job's
ranks. Rank 0 writes FOLDER/exchange.json: the measured rows in the planner's format, and whether every
received number was right.
"""

import datetime
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # naming the result file needs no torch
    import torch

RESULT = "exchange.json"  # written by rank 0
SIZES = (4 << 10, 32 << 10, 256 << 10, 2 << 20)  # bytes of the whole tensor on one rank
_WARM_UP, _CALLS = 2, 7
_TIMEOUT = datetime.timedelta(seconds=60)


def main() -> None:
    """Runs the self-test as one rank; rank 0 writes the results to a JSON file."""
    import torch
    import torch.distributed as dist

    folder, ranks_per_node, backend = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group(backend, timeout=_TIMEOUT)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank % ranks_per_node)
        torch.cuda.set_device(device)
    groups = [dist.new_subgroups(ranks_per_node)[0]] if ranks_per_node > 1 else []
    groups += [dist.group.WORLD] if world > ranks_per_node else []
    rows, sound = [], True
    for group in groups:
        measured, is_right = _all_to_all(group, device)
        rows += measured
        sound &= is_right
    num_wrong = torch.tensor(int(not sound), device=device)
    dist.all_reduce(num_wrong)
    if rank == 0:
        found = {"sound": num_wrong.item() == 0, "rows": rows}
        (folder / RESULT).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _all_to_all(group: Any, device: "torch.device") -> tuple[list[dict[str, Any]], bool]:
    """Returns a group's rows (the slowest rank's medians), and whether all numbers were right."""
    import torch
    import torch.distributed as dist

    world, ranks = dist.get_world_size(group), dist.get_process_group_ranks(group)
    expected = torch.tensor(ranks, dtype=torch.float32)
    rows, is_right = [], True
    for size in SIZES:
        each = max(1, size // 4 // world)
        sent = torch.full((each * world,), float(dist.get_rank()), device=device)
        received, times = torch.empty_like(sent), []
        for _ in range(_WARM_UP + _CALLS):
            dist.barrier()
            started_s = time.perf_counter()
            dist.all_to_all_single(received, sent, group=group)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started_s)
        is_right &= torch.equal(received.cpu(), expected.repeat_interleave(each))
        slowest = torch.tensor(_median(times), dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        row = {"op": "all_to_all", "world": world, "bytes": each * world * 4}
        rows.append(row | {"seconds": slowest.item()})
    return rows, is_right


def _median(times: list[float]) -> float:
    return sorted(times[_WARM_UP:])[_CALLS // 2]


if __name__ == "__main__":
    main()
