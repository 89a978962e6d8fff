"""Simulates an EP group: real rows through the real dispatcher, each rank a thread.

For every pass of every sparse layer:
  1. The caller passes each rank's `RoutedCall`: rows, routes, and the outputs of a single rank.
  2. Every rank dispatches rows that carry their own address, which shows *conservation*: every
     route arrives once, at the rank and expert that it names. This traffic is not counted.
  3. Every rank runs the layer as training does: `SparseLayer` with this dispatcher and the rank's
     own experts. Traffic is counted. Outputs are compared with the single rank's up to rounding,
     because an expert's products have the rows of all ranks here, and one rank's alone there.

The backward pass is not run; it sends the same rows in the opposite direction. The ranks' copies of a
layer's experts are as large as the layer. A rank and call take about 10 ms on one core, more with
many rows.

Legend: P ranks of the EP group, E experts, N routes, U source rows of width D, T target rows of width O.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...distributed.dispatch.base import build_node_groups
from ...distributed.dispatch.choose import make_dispatcher
from ...distributed.dispatch.expert_map import ExpertMap, contiguous_map
from ...distributed.dispatch.table import needs_nodes, resolved_dispatcher, same_traffic
from ...model.execution.precision import enters_a_product
from ...model.moe import Dispatcher, SparseLayer
from ...train.record.route_tap import CallId, RoutedCall
from .threads import counting, run_threads

# Rounding error allowed relative to the largest output: sums are grouped by rank, and products have
# other numbers of rows.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
TIMEOUT_S = 3600.0

ExpertsOfLayer = Callable[[str], nn.Module]  # a layer's name -> all its experts, on the CPU


@dataclass(frozen=True)
class Cluster:
    """Describes the simulated ranks and their dispatcher."""

    ep: int  # ranks, one EP group
    dispatcher: str
    ranks_per_node: int
    # By layer; other layers' experts lie in contiguous blocks.
    expert_maps: Mapping[str, ExpertMap] = field(default_factory=dict)

    @property
    def simulated_dispatcher(self) -> str:
        """Returns what "auto" means, and for a dispatcher through memory the one that sends the
        same rows with collectives.
        """
        return same_traffic(resolved_dispatcher(self.dispatcher, self.ep))


@dataclass(frozen=True)
class SimulatedCall:
    """Records one call on all ranks.

    Matrices are [from rank, to rank], of the forward pass, both ways; the diagonal holds what a
    rank keeps.
    """

    id: CallId
    load_E: np.ndarray  # routes
    load_P: np.ndarray
    rows_PP: np.ndarray
    bytes_PP: np.ndarray
    misrouted: int  # routes lost, doubled, or at the wrong expert
    difference: float  # of the outputs, relative to the largest
    tolerance: float

    @property
    def violations(self) -> list[str]:
        """Lists the broken promises of this call."""
        found = []
        if self.misrouted:
            found.append(
                f"{self.id}: {self.misrouted} routes were lost, doubled, or at the wrong expert"
            )
        if self.difference > self.tolerance:
            found.append(
                f"{self.id}: outputs differ from one rank's by {self.difference:.1e} of the largest"
            )
        return found


@dataclass(frozen=True)
class _Finding:
    """Holds what one rank found in one call."""

    arrived_N: np.ndarray  # addresses of the routes that it serves
    difference: float
    rows_P: np.ndarray
    bytes_P: np.ndarray


def simulate(
    calls: Sequence[Sequence[RoutedCall]], experts_of_layer: ExpertsOfLayer, cluster: Cluster
) -> list[SimulatedCall]:
    """Runs every call on all ranks.

    Args:
        calls: for every call, one entry per rank with routes, rows and outputs.
        experts_of_layer: all experts of a layer, by its name.
        cluster: the ranks, their dispatcher, and where the experts are.

    Raises:
        ValueError: the dispatcher does not fit the ranks, or they cannot share a layer's experts.
        RankFailed: an exchange failed, which is a bug of the dispatcher.
    """

    def run_rank(rank: int) -> list[_Finding]:
        return _run_rank(rank, [call[rank] for call in calls], experts_of_layer, cluster)

    by_rank = run_threads(run_rank, cluster.ep, timeout_s=TIMEOUT_S)
    return [_recorded(call, found) for call, *found in zip(calls, *by_rank, strict=True)]


@torch.no_grad()
def _run_rank(
    rank: int, calls: list[RoutedCall], experts_of_layer: ExpertsOfLayer, cluster: Cluster
) -> list[_Finding]:
    """Runs one rank's side of every call, on its own thread. Collective."""
    per_node, name, group = cluster.ranks_per_node, cluster.simulated_dispatcher, dist.group.WORLD
    assert group is not None
    wanted = needs_nodes(name)
    nodes = build_node_groups(group, per_node, timeout_s=TIMEOUT_S) if wanted else None
    findings = []
    for call in calls:
        moved = cluster.expert_maps.get(call.id.layer)
        expert_map = moved or contiguous_map(call.routes.num_experts, cluster.ep)
        dispatcher = make_dispatcher(
            name, group, ranks_per_node=per_node, expert_map=moved, nodes=nodes
        )
        arrived_N = _arrived(dispatcher, call, rank, expert_map)
        rows_UD, expected_TO = _values_of(call)
        experts = experts_of_layer(call.id.layer)
        layer = SparseLayer(experts_on_rank(experts, expert_map, rank, rows_UD.dtype))  # pyright: ignore[reportArgumentType]
        layer.dispatcher = dispatcher
        with counting(cluster.ep, widths={call.width_in, call.width_out}) as sent:
            outputs_TO = layer(rows_UD, call.routes)
        difference = _difference(outputs_TO, expected_TO)
        findings.append(_Finding(arrived_N, difference, sent.rows_P, sent.bytes_P))
    return findings


def experts_on_rank(
    experts: nn.Module, expert_map: ExpertMap, rank: int, dtype: torch.dtype
) -> nn.Module:
    """Returns copies of the experts that one rank holds, in the order of its slots."""
    # An empty slot can hold any expert.
    held = [expert_map.expert_S[slot] or 0 for slot in expert_map.own_slots(rank)]
    own = copy.copy(experts)
    own._parameters = dict(experts._parameters)
    for name, value in experts.named_parameters():
        part = value.detach()[held].to(dtype if enters_a_product(name) else value.dtype)
        own._parameters[name] = nn.Parameter(part, requires_grad=False)
    return own


def _recorded(call: Sequence[RoutedCall], found: Sequence[_Finding]) -> SimulatedCall:
    outputs_TO = torch.cat([_values_of(own)[1] for own in call])
    finite = outputs_TO[outputs_TO.isfinite()]
    largest = float(finite.abs().max()) if finite.any() else 1.0
    num_experts = call[0].routes.num_experts
    experts_N = torch.cat([own.routes.expert_N for own in call])
    return SimulatedCall(
        call[0].id,
        np.bincount(experts_N.numpy(), minlength=num_experts),
        np.array([len(each.arrived_N) for each in found]),
        np.stack([each.rows_P for each in found]),
        np.stack([each.bytes_P for each in found]),
        _misrouted(call, found),
        max(each.difference for each in found) / largest,
        TOLERANCE[outputs_TO.dtype],
    )


def _values_of(call: RoutedCall) -> tuple[Tensor, Tensor]:
    assert call.rows_UD is not None, f"{call.id} was recorded without rows"
    assert call.outputs_TO is not None, f"{call.id} was recorded without outputs"
    return call.rows_UD, call.outputs_TO


# Conservation -------------------------------------------------------------------------------------


def _arrived(
    dispatcher: Dispatcher, call: RoutedCall, rank: int, expert_map: ExpertMap
) -> np.ndarray:
    """Returns the routes that reached this rank, each packed into one number. Collective."""
    addresses_U2 = torch.zeros(call.num_rows, 2, dtype=torch.float64)
    addresses_U2[:, 0] = rank
    addresses_U2[:, 1] = torch.arange(call.num_rows)  # exact to 2⁵³
    held = [expert_map.expert_S[slot] for slot in expert_map.own_slots(rank)]
    expert_e = torch.tensor([-1 if expert is None else expert for expert in held])
    dispatched = dispatcher.dispatch(addresses_U2, call.routes)
    received_U2, routes = dispatched.x_UD, dispatched.routes
    source_N2 = received_U2[routes.source_N].long()
    return _address(source_N2[:, 0], source_N2[:, 1], expert_e[routes.expert_N]).numpy()


def _address(rank_N: Tensor | int, row_N: Tensor, expert_N: Tensor) -> Tensor:
    """Packs a rank below 2¹⁰, a row below 2³² and an expert below 2²⁰ into one number per route."""
    return (rank_N << 52) + (row_N << 20) + expert_N


def _misrouted(call: Sequence[RoutedCall], found: Sequence[_Finding]) -> int:
    """Counts the differences between the lists of sent and received routes.

    A route at a wrong expert counts twice.
    """
    sent = [
        _address(rank, own.routes.source_N, own.routes.expert_N).numpy()
        for rank, own in enumerate(call)
    ]
    received = [each.arrived_N for each in found]
    signs = np.repeat([1, -1], [sum(map(len, sent)), sum(map(len, received))])
    _, number_N = np.unique(np.concatenate(sent + received), return_inverse=True)
    return int(np.abs(np.bincount(number_N, weights=signs)).sum())


# Outputs ------------------------------------------------------------------------------------------


def _difference(outputs: Tensor, expected: Tensor) -> float:
    """Returns the largest difference; infinity if only one of two values is finite.

    Equal infinities and pairs of NaN do not differ.
    """
    same = (outputs == expected) | (outputs.isnan() & expected.isnan())
    apart = (outputs.double() - expected.double()).abs().masked_fill(same, 0.0)
    return float(apart.nan_to_num(nan=inf, posinf=inf).max()) if len(apart) else 0.0
