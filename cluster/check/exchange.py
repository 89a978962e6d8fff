"""One rank of the self-test: point to point between every two nodes, and all-to-all.

    python -m moebius.cluster.check.exchange FOLDER RANKS_PER_NODE BACKEND

Runs under the job's own agent (nodes/agent.py), so it meets, listens and sends where a job's ranks
would. Rank 0 leaves FOLDER/exchange.json: median one-way times of every pair of nodes and of two
processes of each node, and the rows of an all-to-all on a node and on all, as the planner reads
them. Every number that arrives is checked. Over NCCL it makes the all-to-all alone.
"""

import datetime
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # who only names the result needs no torch
    import torch

RESULT = "exchange.json"  # what rank 0 leaves in its folder
PAIR_SIZES = (4 << 10, 64 << 10, 1 << 20)
SIZES = (4 << 10, 32 << 10, 256 << 10, 2 << 20)  # bytes of the whole tensor on one rank
_WARM_UP, _CALLS = 2, 7
_TIMEOUT = datetime.timedelta(seconds=60)


def main() -> None:
    """Runs the exchange self-test as one rank; rank 0 writes the results to a JSON file."""
    import torch
    import torch.distributed as dist

    folder, ranks_per_node, backend = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dist.init_process_group(backend, timeout=_TIMEOUT)
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank % ranks_per_node)
        torch.cuda.set_device(device)
    num_nodes = world // ranks_per_node
    table = torch.zeros(num_nodes, num_nodes, len(PAIR_SIZES), dtype=torch.float64)
    sound = backend != "gloo" or _measure_pairs(table, ranks_per_node)
    groups = [dist.new_subgroups(ranks_per_node)[0]] if ranks_per_node > 1 else []
    groups += [dist.group.WORLD] if num_nodes > 1 else []
    rows = []
    for group in groups:
        measured, is_right = _all_to_all(group, device)
        rows += measured
        sound &= is_right
    num_wrong = torch.tensor(int(not sound), device=device)
    dist.all_reduce(num_wrong)
    if backend == "gloo":  # otherwise no pair was measured
        dist.all_reduce(table)
    if rank == 0:
        found = {
            "sound": num_wrong.item() == 0,
            "sizes": PAIR_SIZES,
            "pairs": table.tolist(),
            "rows": rows,
        }
        (folder / RESULT).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _measure_pairs(table: "torch.Tensor", ranks_per_node: int) -> bool:
    """Measures two processes of each node, then every pair of nodes by their first ranks."""
    import torch.distributed as dist

    node, local = divmod(dist.get_rank(), ranks_per_node)
    sound = True
    dist.barrier()
    if ranks_per_node > 1 and local < 2:
        partner = node * ranks_per_node + 1 - local
        sound &= _measure_pair(table[node, node], is_first=local == 0, partner=partner)
    for pairs in rounds(len(table)):
        dist.barrier()
        for pair in pairs:
            if local == 0 and node in pair:
                is_first = node == pair[0]
                partner = pair[1 if is_first else 0] * ranks_per_node
                sound &= _measure_pair(table[pair], is_first=is_first, partner=partner)
    dist.barrier()
    return sound


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Returns every pair of nodes once, in rounds in which no node has two partners.

    The circle method: the first node stays, the others move on by one each round.
    """
    seats: list[int | None] = [*range(num_nodes)]
    if num_nodes % 2:
        seats.append(None)
    half, found = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def _measure_pair(into: "torch.Tensor", *, is_first: bool, partner: int) -> bool:
    """Sends there and back; the first of the two writes the median of half the time."""
    import torch
    import torch.distributed as dist

    own, sound = float(dist.get_rank()), True
    for number, size in enumerate(PAIR_SIZES):
        sent, received = torch.full((size // 4,), own), torch.empty(size // 4)
        times = []
        for _ in range(_WARM_UP + _CALLS):
            started_s = time.perf_counter()
            if is_first:
                dist.send(sent, partner)
                dist.recv(received, partner)
            else:
                dist.recv(received, partner)
                dist.send(sent, partner)
            times.append((time.perf_counter() - started_s) / 2)
        sound &= bool((received == float(partner)).all())
        if is_first:
            into[number] = _median(times)
    return sound


def _all_to_all(group: Any, device: "torch.device") -> tuple[list[dict[str, Any]], bool]:
    """Returns the rows of an all-to-all in a group (the slowest rank's medians), and if it was right."""
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
