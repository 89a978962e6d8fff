"""Simulates routing on a cluster: real rows through the real dispatcher, each rank a thread.

For every pass of every sparse layer:
  1. The caller passes each rank's `RoutedCall`: rows, routes, and the outputs of a single rank.
  2. Every rank dispatches rows that carry their own address, and checks *conservation*: every route
     arrives once, at the rank and expert that it names. This traffic is not counted.
  3. Every rank runs the layer as training does: `SparseLayer` with this dispatcher and the rank's
     own experts. Traffic is counted. Outputs are compared with the single rank's up to rounding,
     because an expert's products have the rows of all ranks here, and one rank's alone there.
  4. Loads and traffic are recorded (`SimulatedCall`).

The backward pass is not run; it sends the same rows in the opposite direction. Experts are views of
one model's weights, so 256 ranks need no copies. A rank and call take about 10 ms on one core, more
with many rows.

Legend: P ranks of the world, E experts, e slots of one rank, N routes, U source rows of width D,
T target rows of width O.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...distributed.dispatch.base import build_node_groups, nodes_of
from ...distributed.dispatch.choose import make_dispatcher
from ...distributed.dispatch.exchange import ExchangeMismatch
from ...distributed.dispatch.expert_map import ExpertMap, contiguous_map
from ...distributed.dispatch.table import needs_nodes, resolved_dispatcher, same_traffic
from ...distributed.layout import Layout, group_of
from ...model.moe import Dispatcher, SparseLayer
from ...train.record.route_tap import CallId, RoutedCall
from .threads import TrafficCounter, run_threads

# Rounding error allowed relative to the largest output: sums are grouped by rank, and products have
# other numbers of rows.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}

ExpertsOfLayer = Callable[[str], nn.Module]  # a layer's name -> all its experts, on the CPU


@dataclass(frozen=True)
class Cluster:
    """Describes the simulated ranks and their dispatcher."""

    layout: Layout
    dispatcher: str
    ranks_per_node: int | None = None  # None: all on one node
    # By layer; other layers' experts lie in contiguous blocks.
    expert_maps: Mapping[str, ExpertMap] = field(default_factory=dict)
    timeout_s: float = 3600.0  # without an exchange; a large model routes for a long time

    def expert_map_of(self, layer: str, num_experts: int) -> ExpertMap:
        """Returns which rank of an EP group holds which of the layer's experts."""
        return self.expert_maps.get(layer) or contiguous_map(num_experts, self.layout.ep)


@dataclass(frozen=True)
class SimulatedCall:
    """Records one call on all ranks.

    Rows and bytes are of the forward pass, both ways, without what stays on its rank.
    """

    id: CallId
    load_E: np.ndarray  # routes
    load_P: np.ndarray
    rows: int
    rows_one_per_route: int  # for a dispatcher that sends one row per route
    bytes_intra_node: int
    bytes_inter_node: int
    misrouted: int  # routes lost, doubled, or at the wrong expert
    difference: float  # of the outputs, relative to the largest
    agrees: bool  # the dispatcher's promise allows the difference

    @property
    def hottest_rank(self) -> float:
        """Returns the busiest rank's load over the mean; 1 without any load."""
        return hottest(self.load_P)

    @property
    def hottest_expert(self) -> float:
        """Returns the busiest expert's load over the mean; 1 without any load."""
        return hottest(self.load_E)

    @property
    def violations(self) -> list[str]:
        """Lists the broken promises of this call."""
        found = []
        if self.misrouted:
            found.append(
                f"{self.id}: {self.misrouted} routes were lost, doubled, or at the wrong expert"
            )
        if not self.agrees:
            found.append(
                f"{self.id}: outputs differ from one rank's by {self.difference:.1e} of the largest"
            )
        return found


@dataclass(frozen=True)
class Simulation:
    """Records all calls with one dispatcher.

    Matrices are [from rank, to rank]; the diagonal holds what a rank keeps.
    """

    cluster: Cluster
    dispatcher: str  # resolved, if "auto" was requested
    calls: tuple[SimulatedCall, ...]
    rows_PP: np.ndarray
    bytes_PP: np.ndarray
    one_per_route_PP: np.ndarray  # rows, see `SimulatedCall.rows_one_per_route`

    @property
    def violations(self) -> list[str]:
        """Lists all broken promises; empty if there are none."""
        return [violation for call in self.calls for violation in call.violations]


def hottest(load: np.ndarray) -> float:
    """Returns the largest load over the mean; 1 if all are zero."""
    return float(load.max() / load.mean()) if load.any() else 1.0


def between(matrix_PP: np.ndarray) -> int:
    """Sums what is sent between ranks: the matrix without its diagonal."""
    return int(matrix_PP.sum() - np.trace(matrix_PP))


def across_nodes(matrix_PP: np.ndarray, ranks_per_node: int | None) -> tuple[int, int]:
    """Sums what is sent inside nodes, without the diagonal, and between nodes."""
    nodes = np.array(nodes_of(range(len(matrix_PP)), ranks_per_node))
    inter = int(matrix_PP[nodes[:, None] != nodes].sum())
    return between(matrix_PP) - inter, inter


def name_of(cluster: Cluster) -> str:
    """Returns the simulated dispatcher.

    Resolves "auto", and replaces a dispatcher through memory by the one that sends the same rows
    with collectives.
    """
    return same_traffic(resolved_dispatcher(cluster.dispatcher, cluster.layout.ep))


def simulate(
    calls: Iterator[Sequence[RoutedCall]], experts_of_layer: ExpertsOfLayer, cluster: Cluster
) -> Simulation:
    """Runs every call on all ranks.

    Args:
        calls: for every call, one entry per rank with routes, rows and outputs.
        experts_of_layer: all experts of a layer, by its name.
        cluster: the ranks, their dispatcher, and where the experts are.

    Raises:
        ValueError: the dispatcher does not fit the ranks, or they cannot share a layer's experts.
        RankFailed: an exchange failed, which is a bug of the dispatcher.
    """
    coordinator = _Coordinator(calls, experts_of_layer, cluster)
    run_threads(
        coordinator.run_rank,
        cluster.layout.world_size,
        traffic=coordinator.traffic,
        timeout_s=cluster.timeout_s,
    )
    return Simulation(
        cluster,
        coordinator.dispatcher,
        tuple(coordinator.simulated),
        coordinator.rows_PP,
        coordinator.bytes_PP,
        coordinator.one_per_route_PP,
    )


def unexpected_cause(error: BaseException) -> BaseException | None:
    """Returns the error that ended a simulated rank if its traceback helps the user, else None.

    If ranks disagree about an exchange, wait in vain or run out of memory, the message is enough.
    """
    cause = error.__cause__
    if isinstance(cause, (ExchangeMismatch, MemoryError)):
        return None
    # torch has no exception class for it.
    if isinstance(cause, RuntimeError) and "DefaultCPUAllocator" in str(cause):
        return None
    return cause


def experts_on_rank(experts: nn.Module, expert_map: ExpertMap, rank: int) -> nn.Module:
    """Returns the experts that one rank of an EP group holds, in the order of its slots.

    Weights are views if the experts are adjacent, otherwise copies.
    """
    # An empty slot can hold any expert.
    held = [expert_map.expert_S[slot] or 0 for slot in expert_map.own_slots(rank)]
    together = bool(held) and held == list(range(held[0], held[0] + len(held)))
    index: Any = slice(held[0], held[-1] + 1) if together else torch.tensor(held, dtype=torch.int64)
    own = copy.copy(experts)
    own._parameters = {
        name: None if value is None else nn.Parameter(value.detach()[index], requires_grad=False)
        for name, value in experts._parameters.items()
    }
    return own


class _Coordinator:
    """Shares the current call, every rank's findings and the sums among threads."""

    def __init__(
        self,
        calls: Iterator[Sequence[RoutedCall]],
        experts_of_layer: ExpertsOfLayer,
        cluster: Cluster,
    ) -> None:
        self.calls, self.experts_of_layer, self.cluster = calls, experts_of_layer, cluster
        self.num_ranks = cluster.layout.world_size
        self.traffic = TrafficCounter(self.num_ranks)
        self.dispatcher = name_of(cluster)
        self.simulated: list[SimulatedCall] = []
        self.rows_PP, self.bytes_PP, self.one_per_route_PP = (
            np.zeros((self.num_ranks, self.num_ranks), np.int64) for _ in range(3)
        )
        self.call: Sequence[RoutedCall] | None = None  # of every rank
        self.experts: nn.Module = nn.Module()  # all of its layer
        self.arrived: list[np.ndarray] = [np.empty(0, np.int64)] * self.num_ranks
        self.differences = [0.0] * self.num_ranks
        self.barrier = threading.Barrier(self.num_ranks, action=self._advance)

    @torch.no_grad()
    def run_rank(self, rank: int) -> None:
        """Runs one rank's side of every call, on its own thread."""
        try:
            worker = _Worker(self, rank)
            while (call := self._next()) is not None:
                worker.run(call[rank])
        except threading.BrokenBarrierError:
            raise SystemExit from None  # the other rank's failure is reported
        except BaseException:
            self.barrier.abort()
            raise

    def _next(self) -> Sequence[RoutedCall] | None:
        self.barrier.wait()
        return self.call

    def _advance(self) -> None:
        """Takes the next call, once, while all ranks wait."""
        if self.call is not None:
            self._record_call(self.call)
        self.call = next(self.calls, None)
        if self.call is not None:
            self.experts = self.experts_of_layer(self.call[0].id.layer)

    def _record_call(self, call: Sequence[RoutedCall]) -> None:
        load_E, load_P, one_per_route_PP = _loads(call, self.cluster)
        intra, inter = across_nodes(self.traffic.bytes_PP, self.cluster.ranks_per_node)
        outputs = [_values_of(own)[1] for own in call]
        largest = max(map(_largest, outputs), default=0.0)
        difference = max(self.differences) / largest if largest else max(self.differences)
        self.simulated.append(
            SimulatedCall(
                call[0].id,
                load_E,
                load_P,
                rows=between(self.traffic.rows_PP),
                rows_one_per_route=between(one_per_route_PP),
                bytes_intra_node=intra,
                bytes_inter_node=inter,
                misrouted=_misrouted(self.arrived, call),
                difference=difference,
                agrees=difference <= TOLERANCE[outputs[0].dtype],
            )
        )
        self.rows_PP += self.traffic.rows_PP
        self.bytes_PP += self.traffic.bytes_PP
        self.one_per_route_PP += one_per_route_PP
        self.traffic.clear()


class _Worker:
    """Runs one rank: its groups, its dispatchers, and its side of every call."""

    def __init__(self, coordinator: _Coordinator, rank: int) -> None:
        self.coordinator, self.rank, self.cluster = coordinator, rank, coordinator.cluster
        ranks, world = group_of(self.cluster.layout, "ep", rank), dist.group.WORLD
        group = (
            world
            if len(ranks) == coordinator.num_ranks
            else dist.new_group(ranks, use_local_synchronization=True)
        )
        if not isinstance(group, dist.ProcessGroup):
            raise AssertionError(f"simulated rank {rank} is not in its own group {ranks}")
        self.group, self.nodes = group, None
        if needs_nodes(coordinator.dispatcher):
            self.nodes = build_node_groups(
                group, self.cluster.ranks_per_node, timeout_s=self.cluster.timeout_s
            )
        self._dispatchers: dict[str, Dispatcher] = {}

    def run(self, call: RoutedCall) -> None:
        """Runs this rank's side of a call and stores the findings in the coordinator. Collective."""
        coordinator, rank, ep_rank = self.coordinator, self.rank, self.group.rank()
        dispatcher = self._dispatcher(call.id.layer)
        expert_map = self.cluster.expert_map_of(call.id.layer, call.routes.num_experts)
        coordinator.arrived[rank] = _arrived(dispatcher, call, rank, expert_map, ep_rank)
        experts = experts_on_rank(coordinator.experts, expert_map, ep_rank)
        layer = SparseLayer(experts)  # pyright: ignore[reportArgumentType]
        layer.dispatcher = dispatcher
        rows_UD, expected_TO = _values_of(call)
        with coordinator.traffic.counting(rank, widths={call.width_in, call.width_out}):
            outputs_TO = layer(rows_UD, call.routes)
        coordinator.differences[rank] = _difference(outputs_TO, expected_TO)

    def _dispatcher(self, layer: str) -> Dispatcher:
        cluster = self.cluster
        if layer not in self._dispatchers:
            self._dispatchers[layer] = make_dispatcher(
                name_of(cluster),
                self.group,
                ranks_per_node=cluster.ranks_per_node,
                expert_map=cluster.expert_maps.get(layer),
                nodes=self.nodes,
            )
        return self._dispatchers[layer]


def _values_of(call: RoutedCall) -> tuple[Tensor, Tensor]:
    assert call.rows_UD is not None, f"{call.id} was recorded without rows"
    assert call.outputs_TO is not None, f"{call.id} was recorded without outputs"
    return call.rows_UD, call.outputs_TO


# Conservation -------------------------------------------------------------------------------------


def _arrived(
    dispatcher: Dispatcher, call: RoutedCall, rank: int, expert_map: ExpertMap, ep_rank: int
) -> np.ndarray:
    """Returns the routes that reached this rank, each packed into one number. Collective."""
    addresses_U2 = torch.zeros(call.num_rows, 2, dtype=torch.float64)
    addresses_U2[:, 0] = rank
    addresses_U2[:, 1] = torch.arange(call.num_rows)  # exact to 2⁵³
    held = [expert_map.expert_S[slot] for slot in expert_map.own_slots(ep_rank)]
    numbers = [-1 if expert is None else expert for expert in held]
    expert_e = torch.tensor(numbers, dtype=torch.int64)
    dispatched = dispatcher.dispatch(addresses_U2, call.routes)
    received_U2, routes = dispatched.x_UD, dispatched.routes
    source_N2 = received_U2[routes.source_N].long()
    return _address(source_N2[:, 0], source_N2[:, 1], expert_e[routes.expert_N]).numpy()


def _address(rank_N: Tensor | int, row_N: Tensor, expert_N: Tensor) -> Tensor:
    """Packs a rank below 2¹⁰, a row below 2³² and an expert below 2²⁰ into one number per route."""
    return (rank_N << 52) + (row_N << 20) + expert_N


def _misrouted(arrived: Sequence[np.ndarray], call: Sequence[RoutedCall]) -> int:
    """Counts the differences between the lists of sent and received routes.

    A route at a wrong expert counts twice.
    """
    addresses = [
        _address(rank, own.routes.source_N, own.routes.expert_N) for rank, own in enumerate(call)
    ]
    sent, sent_times = np.unique(torch.cat(addresses).numpy(), return_counts=True)
    received, received_times = np.unique(np.concatenate(arrived), return_counts=True)
    every = np.union1d(sent, received)
    times = np.zeros((2, len(every)), np.int64)
    times[0, np.searchsorted(every, sent)] = sent_times
    times[1, np.searchsorted(every, received)] = received_times
    return int(np.abs(times[0] - times[1]).sum())


def _difference(outputs: Tensor, expected: Tensor) -> float:
    """Returns the largest difference; infinity if only one of two values is finite.

    Equal infinities and pairs of NaN do not differ.
    """
    if outputs.shape != expected.shape:
        return float("inf")
    differ = (outputs != expected) & ~(outputs.isnan() & expected.isnan())
    if not differ.any():
        return 0.0
    apart = (outputs[differ].double() - expected[differ].double()).abs().max().item()
    return apart if np.isfinite(apart) else float("inf")


def _largest(outputs: Tensor) -> float:
    """Returns the largest magnitude among finite numbers; 0 if there are none."""
    finite = outputs[outputs.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


# Loads --------------------------------------------------------------------------------------------


def _loads(
    call: Sequence[RoutedCall], cluster: Cluster
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns routes per expert, routes per rank, and rows [from, to] with one row per route."""
    num_ranks, num_experts = cluster.layout.world_size, call[0].routes.num_experts
    expert_map = cluster.expert_map_of(call[0].id.layer, num_experts)
    rank_S = np.array(expert_map.rank_S)
    load_E, there_PP = np.zeros(num_experts, np.int64), np.zeros((num_ranks, num_ranks), np.int64)
    for rank, own in enumerate(call):
        group = group_of(cluster.layout, "ep", rank)
        slot_E = expert_map.seen_from(group.index(rank)).slots_of(torch.arange(num_experts)).numpy()
        counts_E = np.bincount(own.routes.expert_N.numpy(), minlength=num_experts)
        load_E += counts_E
        np.add.at(there_PP[rank], np.array(group)[rank_S[slot_E]], counts_E)
    return load_E, there_PP.sum(0), there_PP + there_PP.T
