"""Routing on a simulated cluster: real rows through the real dispatcher, every rank a thread, all
that travels counted.

Flow, for one pass of one sparse layer after the other:
  1. the caller says what every rank routes (`RoutedCall`): rows, routes, and what one rank would
     have answered;
  2. every rank dispatches rows that carry their own address, and notes which route reached which
     expert: *conservation*, every route once at the rank and the expert that it names. Nothing of
     this is counted;
  3. every rank runs the layer, as training runs it: `SparseLayer` with this dispatcher and the
     rank's own experts. Traffic is counted; answers are compared with one rank's, bit for bit where
     the dispatcher promises it (`alltoall`), else up to rounding;
  4. loads and traffic are written down, and the next call is asked for.

The backward pass is not run: it sends the same rows the other way. Experts are views of one model's
weights, so 256 ranks hold no copies. Cost: about 10 ms per rank and call on one core, more where
the rows are many.

Legend: P ranks of the world, E experts, N routes, U source rows.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed.dispatch.choose import DEFAULT, make_dispatcher
from ..distributed.dispatch.exchange import ExchangeMismatch
from ..distributed.dispatch.expert_map import ExpertMap, contiguous_map
from ..distributed.dispatch.setup import build_node_groups, nodes_of
from ..distributed.layout import Layout, group_of
from ..model.moe import Dispatcher, SparseLayer
from ..model.routing import Routes
from .threads import TrafficCounter, run_threads

# Answers may differ from one rank's by so much of the largest: sums are grouped by rank, and
# rounding is all that may change.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
EXACT_DISPATCHERS = ("alltoall", "local")


@dataclass(frozen=True)
class Cluster:
    """The simulated ranks, and how tokens travel between them."""

    layout: Layout
    dispatcher: str
    overlap_chunks: int = 1
    ranks_per_node: int | None = None  # None: all on one
    expert_maps: Mapping[str, ExpertMap] = field(
        default_factory=dict
    )  # by layer; others hold contiguous blocks
    timeout_s: float = (
        3600.0  # without any exchange: a large model routes for long between two of them
    )

    def expert_map_of(self, call: "RoutedCall") -> ExpertMap:
        """Where the experts of a call's layer live within an EP group."""
        return self.expert_maps.get(call.layer) or contiguous_map(call.num_experts, self.layout.ep)


@dataclass(frozen=True)
class RoutedCall:
    """One pass through one sparse layer, on all ranks; the lists have one entry per rank."""

    step: int
    micro_batch: int
    depth: int  # the depth step, from 1
    layer: str  # the module's name
    kind: str  # feed_forward, value, output, query
    rows: list[Tensor]  # (U, D) floats
    routes: list[Routes]
    answers: list[Tensor]  # (num_targets, O): one rank's

    @property
    def num_experts(self) -> int:
        return self.routes[0].num_experts


@dataclass(frozen=True)
class CallRecord:
    """What one call did. Rows and bytes are of the forward pass, there and back; what stays on its
    rank is left out.
    """

    step: int
    micro_batch: int
    depth: int
    layer: str
    kind: str
    load_E: np.ndarray  # routes
    load_P: np.ndarray
    rows: int
    rows_one_per_route: int  # what a dispatcher with a row for every route would have sent
    bytes_intra_node: int
    bytes_inter_node: int
    misrouted: int  # routes lost, doubled, or at the wrong expert
    difference: float  # of the answers, as a share of the largest
    agrees: bool  # the difference is what the dispatcher may make

    @property
    def hottest_rank(self) -> float:
        """The busiest rank's load over the mean; 1 where there was nothing to do."""
        return hottest(self.load_P)

    @property
    def hottest_expert(self) -> float:
        return hottest(self.load_E)


@dataclass(frozen=True)
class Simulation:
    """All calls of one dispatcher. Matrices are [from rank, to rank], what a rank keeps on the
    diagonal.
    """

    cluster: Cluster
    dispatcher: str  # the one that "auto" means, where that was asked for
    records: tuple[CallRecord, ...]
    rows_PP: np.ndarray
    bytes_PP: np.ndarray
    one_per_route_PP: np.ndarray  # rows, as with `CallRecord.rows_one_per_route`

    @property
    def violations(self) -> list[str]:
        """What should have held and did not; empty where all is well."""
        return [violation for record in self.records for violation in _violations(record)]


def hottest(load: np.ndarray) -> float:
    """The largest over the mean; 1 where all are zero."""
    return float(load.max() / load.mean()) if load.any() else 1.0


def between(matrix_PP: np.ndarray) -> int:
    """The sum without the diagonal."""
    return int(matrix_PP.sum() - np.trace(matrix_PP))


def across_nodes(matrix_PP: np.ndarray, ranks_per_node: int | None) -> tuple[int, int]:
    """The sums inside the nodes, the diagonal left out, and between them."""
    nodes = np.array(nodes_of(range(len(matrix_PP)), ranks_per_node))
    inter = int(matrix_PP[nodes[:, None] != nodes].sum())
    return between(matrix_PP) - inter, inter


def between_nodes(matrix_PP: np.ndarray, ranks_per_node: int | None) -> np.ndarray:
    """The sums [from node, to node]; inside a node with what stays on its rank."""
    nodes = np.array(nodes_of(range(len(matrix_PP)), ranks_per_node))
    found = np.zeros((nodes[-1] + 1,) * 2, np.int64)
    np.add.at(found, (nodes[:, None], nodes), matrix_PP)
    return found


def name_of(cluster: Cluster) -> str:
    """The dispatcher, also where it is "auto"."""
    automatic = "local" if cluster.layout.ep == 1 else DEFAULT
    return automatic if cluster.dispatcher == "auto" else cluster.dispatcher


def simulate(
    calls: Iterator[RoutedCall], bank: Callable[[str], nn.Module], cluster: Cluster
) -> Simulation:
    """Runs every call on all ranks. `bank(layer)` are all experts of a layer, on the CPU.

    Raises:
        ValueError: the dispatcher does not fit the ranks, or they cannot share a layer's experts.
        RankFailed: an exchange failed, which is a fault of the dispatcher.
    """
    coordinator = _Coordinator(calls, bank, cluster)
    run_threads(
        coordinator.run_rank,
        cluster.layout.world_size,
        traffic=coordinator.traffic,
        timeout_s=cluster.timeout_s,
    )
    return Simulation(
        cluster,
        coordinator.dispatcher,
        tuple(coordinator.records),
        coordinator.rows_PP,
        coordinator.bytes_PP,
        coordinator.one_per_route_PP,
    )


def unexpected_cause(fault: BaseException) -> BaseException | None:
    """What ended a simulated rank, if the fault's words do not tell a user what happened: then its
    traceback is needed.

    They do where ranks disagree about an exchange or wait in vain, or where memory has run out.
    """
    cause = fault.__cause__
    if isinstance(cause, (ExchangeMismatch, MemoryError)):
        return None
    # torch has no class of its own for it.
    if isinstance(cause, RuntimeError) and "DefaultCPUAllocator" in str(cause):
        return None
    return cause


def experts_of(experts: nn.Module, expert_map: ExpertMap, rank: int) -> nn.Module:
    """Those that live on that rank of an EP group, in the order of its slots; views where they lie
    together.
    """
    held = [
        expert_map.expert_S[slot] or 0 for slot in expert_map.own_slots(rank)
    ]  # any expert may stand in an empty slot
    together = held == list(range(held[0], held[0] + len(held))) if held else False
    index: Any = slice(held[0], held[-1] + 1) if together else torch.tensor(held, dtype=torch.int64)
    own = copy.copy(experts)
    own._parameters = {
        name: None if value is None else nn.Parameter(value.detach()[index], requires_grad=False)
        for name, value in experts._parameters.items()
    }
    return own


class _Coordinator:
    """What the threads share: the call that is on, a place for every rank's findings, and the
    books.
    """

    def __init__(
        self, calls: Iterator[RoutedCall], bank: Callable[[str], nn.Module], cluster: Cluster
    ) -> None:
        self.calls, self.bank, self.cluster = calls, bank, cluster
        self.num_ranks = cluster.layout.world_size
        self.traffic = TrafficCounter(self.num_ranks)
        self.dispatcher = name_of(cluster)
        self.records: list[CallRecord] = []
        self.rows_PP, self.bytes_PP, self.one_per_route_PP = (
            np.zeros((self.num_ranks, self.num_ranks), np.int64) for _ in range(3)
        )
        self.call: RoutedCall | None = None
        self.experts: nn.Module = nn.Module()
        self.arrivals: list[np.ndarray] = [np.empty(0, np.int64)] * self.num_ranks
        self.differences = [0.0] * self.num_ranks
        self.barrier = threading.Barrier(self.num_ranks, action=self._advance)

    @torch.no_grad()
    def run_rank(self, rank: int) -> None:
        """The life of a rank."""
        try:
            worker = _Worker(self, rank)
            while (call := self._next()) is not None:
                worker.run(call)
        except threading.BrokenBarrierError:
            raise SystemExit from None  # another rank's failure is the one to tell
        except BaseException:
            self.barrier.abort()
            raise

    def _next(self) -> RoutedCall | None:
        self.barrier.wait()
        return self.call

    def _advance(self) -> None:
        """Between two calls, while all ranks wait."""
        if self.call is not None:
            self._record_call(self.call)
        self.call = next(self.calls, None)
        if self.call is not None:
            self.experts = self.bank(self.call.layer)

    def _record_call(self, call: RoutedCall) -> None:
        load_E, load_P, one_per_route_PP = _loads(call, self.cluster)
        intra, inter = across_nodes(self.traffic.bytes_PP, self.cluster.ranks_per_node)
        largest = max(map(_largest, call.answers), default=0.0)
        difference = max(self.differences) / largest if largest else max(self.differences)
        dtype = call.answers[0].dtype
        self.records.append(
            CallRecord(
                call.step,
                call.micro_batch,
                call.depth,
                call.layer,
                call.kind,
                load_E,
                load_P,
                between(self.traffic.rows_PP),
                between(one_per_route_PP),
                intra,
                inter,
                _misrouted(self.arrivals, call),
                difference,
                agrees=difference
                <= (0.0 if self.dispatcher in EXACT_DISPATCHERS else TOLERANCE[dtype]),
            )
        )
        self.rows_PP += self.traffic.rows_PP
        self.bytes_PP += self.traffic.bytes_PP
        self.one_per_route_PP += one_per_route_PP
        self.traffic.clear()


class _Worker:
    """One rank: its groups, its dispatchers, and what it does for a call."""

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
        if coordinator.dispatcher == "hierarchical":
            self.nodes = build_node_groups(
                group, self.cluster.ranks_per_node, timeout_s=self.cluster.timeout_s
            )
        self._dispatchers: dict[str, Dispatcher] = {}

    def run(self, call: RoutedCall) -> None:
        """Collective. Leaves what was found with the coordinator."""
        coordinator, rank, dispatcher, expert_map = (
            self.coordinator,
            self.rank,
            self._dispatcher(call),
            self.cluster.expert_map_of(call),
        )
        rows, routes, expected = call.rows[rank], call.routes[rank], call.answers[rank]
        coordinator.arrivals[rank] = _arrivals(
            dispatcher, routes, len(rows), rank, expert_map, self.group.rank()
        )
        layer = SparseLayer(experts_of(coordinator.experts, expert_map, self.group.rank()))  # pyright: ignore[reportArgumentType]
        layer.dispatcher = dispatcher
        coordinator.traffic.widths[rank] = frozenset({rows.shape[1], expected.shape[1]})
        coordinator.traffic.is_open[rank] = True
        answers = layer(rows, routes)
        coordinator.traffic.is_open[rank] = False
        coordinator.differences[rank] = _difference(answers, expected)

    def _dispatcher(self, call: RoutedCall) -> Dispatcher:
        cluster = self.cluster
        if call.layer not in self._dispatchers:
            self._dispatchers[call.layer] = make_dispatcher(
                cluster.dispatcher,
                self.group,
                overlap_chunks=cluster.overlap_chunks,
                ranks_per_node=cluster.ranks_per_node,
                expert_map=cluster.expert_maps.get(call.layer),
                nodes=self.nodes,
            )
        return self._dispatchers[call.layer]


# Conservation -------------------------------------------------------------------------------------------------------


def _arrivals(
    dispatcher: Dispatcher,
    routes: Routes,
    num_rows: int,
    rank: int,
    expert_map: ExpertMap,
    ep_rank: int,
) -> np.ndarray:
    """Collective. The routes that reached this rank: (source rank, source row, expert) in one
    number each.
    """
    addresses = torch.stack(
        (torch.full((num_rows,), float(rank)), torch.arange(num_rows).double()), 1
    )
    addresses = addresses.double()  # exact to 2⁵³, and as wide as no row that is counted
    held = [expert_map.expert_S[slot] for slot in expert_map.own_slots(ep_rank)]
    expert_e = torch.tensor(
        [-1 if expert is None else expert for expert in held], dtype=torch.int64
    )
    found = []
    for part in dispatcher.dispatch(addresses, routes).parts:
        came, said = part.x_UD, part.routes
        source_N2 = came[said.source_N].long()
        found.append(_address(source_N2[:, 0], source_N2[:, 1], expert_e[said.expert_N]))
    return torch.cat(found).numpy() if found else np.empty(0, np.int64)


def _address(rank_N: Tensor | int, row_N: Tensor, expert_N: Tensor) -> Tensor:
    """Ranks below 2¹⁰, rows below 2³², experts below 2²⁰."""
    return (rank_N << 52) + (row_N << 20) + expert_N


def _misrouted(arrivals: list[np.ndarray], call: RoutedCall) -> int:
    """How many entries the lists of sent and of arrived routes do not share; a route at a wrong
    expert counts twice.
    """
    expected = [
        _address(rank, routes.source_N, routes.expert_N) for rank, routes in enumerate(call.routes)
    ]
    sent, sent_times = np.unique(torch.cat(expected).numpy(), return_counts=True)
    came, came_times = np.unique(np.concatenate(arrivals), return_counts=True)
    every = np.union1d(sent, came)
    times = np.zeros((2, len(every)), np.int64)
    times[0, np.searchsorted(every, sent)] = sent_times
    times[1, np.searchsorted(every, came)] = came_times
    return int(np.abs(times[0] - times[1]).sum())


def _difference(answers: Tensor, expected: Tensor) -> float:
    """The largest; none where both are the same infinity or no number, infinite where only one of
    them is.
    """
    if answers.shape != expected.shape:
        return float("inf")
    differ = (answers != expected) & ~(answers.isnan() & expected.isnan())
    if not differ.any():
        return 0.0
    apart = (answers[differ].double() - expected[differ].double()).abs().max().item()
    return apart if np.isfinite(apart) else float("inf")


def _largest(answers: Tensor) -> float:
    """Of those that are finite numbers; 0 where none is."""
    finite = answers[answers.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _violations(record: CallRecord) -> list[str]:
    where = f"step {record.step}, micro-batch {record.micro_batch}, depth step {record.depth}, {record.kind}"
    found = []
    if record.misrouted:
        found.append(
            f"{where}: {record.misrouted} routes were lost, doubled, or at the wrong expert"
        )
    if not record.agrees:
        found.append(
            f"{where}: answers differ from one rank's by {record.difference:.1e} of the largest"
        )
    return found


# Loads --------------------------------------------------------------------------------------------------------------


def _loads(call: RoutedCall, cluster: Cluster) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Routes per expert and per rank, and rows [from, to] of a dispatcher with a row and an answer
    for every route.
    """
    ranks, expert_map = cluster.layout.world_size, cluster.expert_map_of(call)
    load_E, there_PP = np.zeros(call.num_experts, np.int64), np.zeros((ranks, ranks), np.int64)
    for rank, routes in enumerate(call.routes):
        group = group_of(cluster.layout, "ep", rank)
        slots = expert_map.seen_from(group.index(rank)).slots_of(torch.arange(call.num_experts))
        counts_E = np.bincount(routes.expert_N.numpy(), minlength=call.num_experts)
        load_E += counts_E
        np.add.at(
            there_PP[rank], np.array(group)[np.array(expert_map.rank_S)[slots.numpy()]], counts_E
        )
    return load_E, there_PP.sum(0), there_PP + there_PP.T
