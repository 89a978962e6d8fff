"""Dispatchers across ranks: rows to their experts, answers home. Chosen by name; all take any list
of routes.

| name | what travels | equals one rank | best where |
|---|---|---|---|
| `local` | nothing | — | every expert is here |
| `allgather` | every row to every rank | up to rounding | K ≥ P, few ranks; the oracle |
| `alltoall` | one row per route | bit for bit | exact comparisons; one expert per token |
| `dedup` | one row per (row, rank) | up to rounding | everywhere else |
| `hierarchical` | one row per (row, node), then per rank | up to rounding | EP groups wider than a node |

A pass is: dispatch (plan, read the counts, launch), experts part by part, combine (wait and add
up); see exchange.py for how launches and landings overlap with what stands between them. Each
dispatcher's own module says its flow and its cost. Measured: benchmarks/dispatch.py.
"""

import torch.distributed as dist
from torch import nn

from ...model.moe import Dispatcher, LocalDispatcher, SparseLayer
from .allgather import AllGatherDispatcher
from .alltoall import AllToAllDispatcher
from .dedup import DedupDispatcher
from .exchange import Counters
from .expert_map import ExpertMap
from .hierarchical import HierarchicalDispatcher
from .setup import NodeGroups, Setup

DISPATCHERS = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
    "dedup": DedupDispatcher,
    "hierarchical": HierarchicalDispatcher,
}
DEFAULT = "dedup"  # what "auto" means where the experts are spread


def make_dispatcher(
    name: str,
    group: dist.ProcessGroup,
    *,
    overlap_chunks: int = 1,
    check_every: int = 0,
    ranks_per_node: int | None = None,
    expert_map: ExpertMap | None = None,
    nodes: NodeGroups | None = None,
) -> Dispatcher:
    """The dispatcher of that name over one EP group; one for every layer, for it counts. Settings
    as in `Setup`.

    Raises:
        ValueError: an unknown name; `local` although the experts are spread over several ranks;
            settings that do not fit.
    """
    num_ranks = dist.get_world_size(group)
    if name == "local" or (name == "auto" and num_ranks == 1):
        if num_ranks > 1:
            raise ValueError(
                f'mesh.dispatcher="local" with mesh.ep={num_ranks}: the experts are on several '
                'ranks; use "auto"'
            )
        return LocalDispatcher()
    chosen = DEFAULT if name == "auto" else name
    if chosen not in DISPATCHERS:
        raise ValueError(
            f"dispatcher {name!r} is unknown: choose auto, local, {', '.join(DISPATCHERS)}"
        )
    return DISPATCHERS[chosen](
        Setup(group, overlap_chunks, check_every, ranks_per_node, expert_map, nodes)
    )


def counters_of(model: nn.Module) -> dict[str, Counters]:
    """What has travelled for every sparse layer so far, by the layer's name; empty where every
    expert is here.
    """
    found = {}
    for name, layer in model.named_modules():
        dispatcher = layer.dispatcher if isinstance(layer, SparseLayer) else None
        if isinstance(
            dispatcher,
            AllGatherDispatcher | AllToAllDispatcher | DedupDispatcher | HierarchicalDispatcher,
        ):
            found[name] = dispatcher.stats()
    return found
