"""Makes dispatchers across ranks: rows to their experts, outputs back. All take any list of routes.

| name | what travels | equals one rank | best where |
|---|---|---|---|
| `local` | nothing | — | every expert is here |
| `allgather` | every row to every rank | up to rounding | K ≥ P, few ranks; the oracle |
| `alltoall` | one row per route | bit for bit | exact comparisons; one expert per token |
| `dedup` | one row per (row, rank) | up to rounding | everywhere else |
| `symmetric` | one row per (row, rank), through memory | as `dedup` | EP groups on one node |
| `hierarchical` | one row per (row, node), then per rank | up to rounding | EP groups wider than a node |

A pass is: dispatch (plan, read the counts, start), experts chunk by chunk, combine (wait and add
up); see exchange.py for how collectives overlap with what stands between start and wait. Each
dispatcher's own module says its flow and its cost; table.py has them all. Measured:
benchmarks/dispatch.py.
"""

from importlib import import_module

import torch.distributed as dist
from torch import nn

from ...model.moe import Dispatcher, LocalDispatcher, SparseLayer
from ..symmetric.interface import RowOutbox
from .base import ExpertParallelDispatcher, NodeGroups, Setup
from .exchange import Counters
from .expert_map import ExpertMap
from .room import RouteRoom
from .table import DISPATCHERS, LOCAL, DispatcherEntry, resolved_dispatcher


def make_dispatcher(
    name: str,
    group: dist.ProcessGroup,
    *,
    overlap_chunks: int = 1,
    check_every: int = 0,
    ranks_per_node: int | None = None,
    expert_map: ExpertMap | None = None,
    nodes: NodeGroups | None = None,
    outbox: RowOutbox | None = None,
    why: str = "",
) -> Dispatcher:
    """Makes the dispatcher of that name over one EP group; one for every layer, for it counts.

    Settings as in `Setup`.

    Raises:
        ValueError: an unknown name; `local` although the experts are spread over several ranks;
            settings that do not fit.
    """
    chosen = resolved_dispatcher(name, dist.get_world_size(group))
    if chosen == LOCAL:
        return LocalDispatcher()
    setup = Setup(
        group,
        overlap_chunks,
        check_every,
        ranks_per_node,
        expert_map,
        nodes,
        outbox,
        name=chosen,
        why=why,
    )
    return _class_of(DISPATCHERS[chosen])(setup)


def _class_of(entry: DispatcherEntry) -> type[ExpertParallelDispatcher]:
    found = entry.dispatcher
    if isinstance(found, str):
        module, _, name = found.partition(".")
        found = getattr(import_module(f"{__package__}.{module}"), name)
    assert issubclass(found, ExpertParallelDispatcher), f"{found} is no ExpertParallelDispatcher"
    return found


def dispatcher_of(model: nn.Module) -> Setup | None:
    """Returns the setup of the model's dispatchers, with their name; None where nothing travels."""
    for layer in model.modules():
        if isinstance(layer, SparseLayer) and isinstance(
            layer.dispatcher, ExpertParallelDispatcher
        ):
            return layer.dispatcher.setup
    return None


def counters_of(model: nn.Module) -> dict[str, Counters]:
    """Returns what every sparse layer has sent and served so far, by the layer's name; nothing
    where every expert is here.
    """
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLayer) and isinstance(
            layer.dispatcher, ExpertParallelDispatcher
        ):
            found[name] = layer.dispatcher.setup.counters.copy()
    return found


def rooms_of(model: nn.Module) -> list[RouteRoom]:
    """Returns every sparse layer's room for routes that come, in the order of the model's modules."""
    return [
        layer.dispatcher.setup.room
        for layer in model.modules()
        if isinstance(layer, SparseLayer) and isinstance(layer.dispatcher, ExpertParallelDispatcher)
    ]
