"""Runs one rank of the self-test: an all-to-all over all ranks.

    python -m moebius.cluster.check.exchange FOLDER RANKS_PER_NODE BACKEND

It runs under the job's own agent (nodes/agent.py), so it uses the same addresses and interfaces as a job's
ranks. Rank 0 writes FOLDER/exchange.json: whether every received number was right, and the slowest rank's
median time.
"""

import datetime
import json
import sys
import time
from pathlib import Path
from statistics import median

RESULT = "exchange.json"  # written by rank 0
NUM_BYTES = 2 << 20  # of the whole tensor on one rank
_WARM_UP, _CALLS = 2, 7
_TIMEOUT = datetime.timedelta(seconds=60)


def main() -> None:
    """Runs the self-test as one rank; rank 0 writes the results to a JSON file."""
    import torch  # naming the result file needs no torch
    import torch.distributed as dist

    folder, ranks_per_node, backend = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group(backend, timeout=_TIMEOUT)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank % ranks_per_node)
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
    if rank == 0:
        result = {"sound": found[0].item() == 0, "seconds": found[1].item()}
        (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
