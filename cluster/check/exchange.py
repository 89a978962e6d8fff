"""One rank of the self-test between nodes: point to point between every two, and all-to-all.

    python -m moebius.cluster.check.exchange FOLDER RANKS_PER_NODE

Runs under the job's own agent (cluster/nodes/agent.py), so it meets, listens and sends where a job's ranks
would. Rank 0 leaves FOLDER/exchange.json: the quartiles of one-way times of every pair of nodes and
of two processes of each node, and the rows of an all-to-all on a node and on all, as the planner
reads them. Every number that arrives is checked.
"""

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .links import SIZES
from .pairs import RESULT, rounds

PAIR_SIZES = (4 << 10, 64 << 10, 1 << 20)
_WARM_UP, _CALLS = 2, 7
_TIMEOUT = datetime.timedelta(seconds=60)


def main() -> None:
    """Measures as one rank."""
    folder, ranks_per_node = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    rank, world = dist.get_rank(), dist.get_world_size()
    node, local = divmod(rank, ranks_per_node)
    num_nodes = world // ranks_per_node
    table = torch.zeros(num_nodes, num_nodes, len(PAIR_SIZES), 3, dtype=torch.float64)
    sound = _between_processes(table, node, local, ranks_per_node)
    sound &= _between_nodes(table, node, local, num_nodes, ranks_per_node)
    dist.all_reduce(table)
    groups = [dist.new_subgroups(ranks_per_node)[0]] if ranks_per_node > 1 else []
    groups += [dist.group.WORLD] if num_nodes > 1 else []
    rows = []
    for group in groups:
        measured, right = _all_to_all(group)
        rows += measured
        sound &= right
    all_sound = torch.tensor(float(sound))
    dist.all_reduce(all_sound, dist.ReduceOp.MIN)
    if rank == 0:
        found = {
            "sound": bool(all_sound),
            "pair_sizes": PAIR_SIZES,
            "pairs": table.tolist(),
            "rows": rows,
        }
        (folder / RESULT).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _between_processes(table: torch.Tensor, node: int, local: int, ranks_per_node: int) -> bool:
    dist.barrier()
    if ranks_per_node < 2 or local > 1:
        return True
    return _measure_pair(
        table[node, node], first=local == 0, partner=dist.get_rank() + 1 - 2 * local
    )


def _between_nodes(
    table: torch.Tensor, node: int, local: int, num_nodes: int, ranks_per_node: int
) -> bool:
    """Measures every pair of nodes, by their first ranks."""
    sound = True
    for pairs in rounds(num_nodes) if num_nodes > 1 else []:
        dist.barrier()
        if local == 0:
            for first, second in pairs:
                if node in (first, second):
                    other = second if node == first else first
                    sound &= _measure_pair(
                        table[first, second], first=node == first, partner=other * ranks_per_node
                    )
    dist.barrier()
    return sound


def _measure_pair(into: torch.Tensor, *, first: bool, partner: int) -> bool:
    """Sends there and back; the first of the two writes the quartiles of half the time."""
    own, sound = float(dist.get_rank()), True
    for number, size in enumerate(PAIR_SIZES):
        sent, received = torch.full((size // 4,), own), torch.empty(size // 4)
        times = []
        for _ in range(_WARM_UP + _CALLS):
            started_s = time.perf_counter()
            if first:
                dist.send(sent, partner)
                dist.recv(received, partner)
            else:
                dist.recv(received, partner)
                dist.send(sent, partner)
            times.append((time.perf_counter() - started_s) / 2)
        sound &= bool((received == float(partner)).all())
        if first:
            ordered = sorted(times[_WARM_UP:])
            quarter = _CALLS // 4
            quartiles = ordered[quarter], ordered[_CALLS // 2], ordered[-1 - quarter]
            into[number] = torch.tensor(quartiles)
    return sound


def _all_to_all(group: Any) -> tuple[list[dict[str, Any]], bool]:
    """Returns the rows of an all-to-all in a group, the slowest rank's median, and if it was right."""
    world, ranks = dist.get_world_size(group), dist.get_process_group_ranks(group)
    rows, right = [], True
    for size in SIZES:
        each = max(1, size // 4 // world)
        sent = torch.full((each * world,), float(dist.get_rank()))
        received, times = torch.empty_like(sent), []
        for _ in range(_WARM_UP + _CALLS):
            dist.barrier()
            started_s = time.perf_counter()
            dist.all_to_all_single(received, sent, group=group)
            times.append(time.perf_counter() - started_s)
        expected = torch.tensor(ranks, dtype=torch.float32).repeat_interleave(each)
        right &= torch.equal(received, expected)
        slowest = torch.tensor(sorted(times[_WARM_UP:])[_CALLS // 2], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        rows.append(
            {
                "op": "all_to_all",
                "world": world,
                "bytes": each * world * 4,
                "seconds": slowest.item(),
            }
        )
    return rows, right


if __name__ == "__main__":
    main()
