"""Creates dispatchers, and decides what `mesh.dispatcher=auto` means.

| name | sends | result compared with one rank | best for |
|---|---|---|---|
| `local` | nothing | is one rank | runs without expert parallelism |
| `allgather` | every row to every rank | up to rounding | K experts per token ≥ P ranks; a reference for tests |
| `alltoall` | one row per route | bit for bit | exact comparisons; one expert per token |
| `dedup` | one row per (row, rank) | up to rounding | everything else |
| `symmetric` | one row per (row, rank), through memory | as `dedup` | EP groups on one node |
| `hierarchical` | one row per (row, node), then per rank | up to rounding | EP groups wider than a node |

All accept any list of routes. A pass consists of dispatch (plan, read the counts, start), the
experts, and combine (send back, wait, sum). exchange.py explains how collectives overlap with the
work between start and wait. Each dispatcher's module gives its flow and cost; benchmarks/dispatch.py
measures them.

If all ranks of an EP group are on one node and on CPUs, `auto` sends rows through the node's memory
(`symmetric`), otherwise through collectives (`dedup`). Both give the same bits, so a run may switch
between them whenever it restarts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

import torch
import torch.distributed as dist
from torch import nn

from ...model.moe import Dispatcher, LocalDispatcher, SparseLayer
from ..symmetric.outbox import Outbox, open_outbox
from .base import ExpertParallelDispatcher, NodeGroups, Setup, nodes_of
from .exchange import Counters
from .expert_map import ExpertMap
from .table import (
    AUTO,
    DEFAULT,
    LOCAL,
    SHARED_MEMORY,
    DispatcherEntry,
    entry_of,
    needs_outbox,
    resolved_dispatcher,
)


def make_dispatcher(
    name: str,
    group: dist.ProcessGroup,
    *,
    check_every: int = 0,
    ranks_per_node: int | None = None,
    expert_map: ExpertMap | None = None,
    nodes: NodeGroups | None = None,
    outbox: Outbox | None = None,
    why: str = "",
) -> Dispatcher:
    """Creates a dispatcher over one EP group; every layer needs its own, because each counts its own traffic.

    The settings are those of `Setup`.

    Raises:
        ValueError: an unknown name, `local` with ep > 1, or settings that do not fit.
    """
    chosen = resolved_dispatcher(name, dist.get_world_size(group))
    if chosen == LOCAL:
        return LocalDispatcher()
    setup = Setup(
        group, check_every, ranks_per_node, expert_map, nodes, outbox, name=chosen, why=why
    )
    return _class_of(entry_of(chosen))(setup)


def _class_of(entry: DispatcherEntry) -> type[ExpertParallelDispatcher]:
    found = entry.dispatcher
    if isinstance(found, str):
        module, _, name = found.partition(".")
        found = getattr(import_module(f"{__package__}.{module}"), name)
    assert issubclass(found, ExpertParallelDispatcher), f"{found} is no ExpertParallelDispatcher"
    return found


def dispatcher_of(model: nn.Module) -> Setup | None:
    """Returns the setup of the model's dispatchers; None if all experts are local."""
    return next((setup for _, setup in _setups(model)), None)


def counters_of(model: nn.Module) -> dict[str, Counters]:
    """Returns the counters of every sparse layer by its name; empty if all experts are local."""
    return {name: setup.counters.copy() for name, setup in _setups(model)}


def _setups(model: nn.Module) -> Iterator[tuple[str, Setup]]:
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLayer) and isinstance(
            layer.dispatcher, ExpertParallelDispatcher
        ):
            yield name, layer.dispatcher.setup


# The choice of "auto" ----------------------------------------------------------------------------


@dataclass(frozen=True)
class DispatcherChoice:
    """A dispatcher's name, its shared memory, and the reason for the choice."""

    name: str
    outbox: Outbox | None = None
    why: str = ""


def choose_dispatcher(
    name: str,
    group: dist.ProcessGroup,
    *,
    device: torch.device,
    ranks_per_node: int | None,
    timeout_s: float,
) -> DispatcherChoice:
    """Resolves a dispatcher's name, or "auto", for a group. Collective.

    Raises:
        ValueError: on all ranks: an unknown name, or a dispatcher that needs shared memory on ranks
            that cannot share any.
    """
    wanted = resolved_dispatcher(name, group.size())
    undecided = name == AUTO and wanted == DEFAULT
    if not (undecided or needs_outbox(wanted)):
        return DispatcherChoice(wanted)
    outbox = _outbox_of(group, device, ranks_per_node, timeout_s)
    if isinstance(outbox, Outbox):
        return DispatcherChoice(SHARED_MEMORY if undecided else wanted, outbox)
    if undecided:
        return DispatcherChoice(DEFAULT, why=f"no shared memory: {outbox}")
    raise ValueError(
        f'mesh.dispatcher="{wanted}" cannot run here: {outbox}; use "{DEFAULT}" or "{AUTO}"'
    )


def _outbox_of(
    group: dist.ProcessGroup, device: torch.device, ranks_per_node: int | None, timeout_s: float
) -> Outbox | str:
    """Opens this rank's outbox, or returns why not; all ranks return alike. Collective."""
    if device.type != "cpu":
        return f"rows are on {device.type}, and shared memory needs them on the CPU"
    if dist.get_backend(group) != "gloo":
        return f"the group's backend is {dist.get_backend(group)}, and shared memory needs gloo"
    if len(set(nodes_of(dist.get_process_group_ranks(group), ranks_per_node))) > 1:
        return "the ranks are on several nodes"
    return open_outbox(group, timeout_s=timeout_s)
