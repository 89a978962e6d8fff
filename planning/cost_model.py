"""What a step costs on a given layout: memory of a rank, bytes of every collective, seconds by
part.

A model whose layers repeat can pay for its experts in two ways, and this module puts both into the
same units:

    move tokens   (EP)     every depth step exchanges rows: traffic ∝ tokens × depth steps, weights
                           stay where they are
    move weights  (FSDP)   a group member is gathered once for the forward and backward passes
                           together, however often it repeats (without repeats once for each):
                           traffic ∝ weights, tokens stay where they are

    step = max(core, g·gathers) + (1 − g)·gathers + gradients + optimizer,
           and σ·√(2 ln n) of it for the slowest of n ranks
    core = computation + exchanges, each exchange hidden behind its experts' computation as far as
           chunks allow

What the host needs to launch a step's operations one by one (`host_s`) is not in it: compiled
graphs need less of it.

Assumed of the trainer, as it is built: gradients of unsharded weights are summed after the backward
pass, in float32, and nothing hides that; rows travel in the precision of the products; one exchange
in each direction per bank and use, in the forward and again in the backward pass. Recomputation
(model/recompute.py) keeps decisions; selective keeps also what travelled, and full sends it once
more.

Bytes per weight: 4 of its float32 master, 8 of Adam's moments, 4 of its gradient, and of what the
products read and leave behind 2 + 2 in bfloat16: 18 or 20 before sharding. Unsharded gradients have
a second copy in the buckets that are summed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import log, sqrt

from ..distributed.dispatch.table import DISPATCHERS
from ..model.head_loss import rows_of_chunk
from .communication import (
    Direction,
    Group,
    collective_s,
    combine_direction,
    dispatch_direction,
    exchange_s,
    exchange_traffic,
    leaving_pod,
    ranks_sharing_a_node,
    strided_group,
)
from .hardware import Hardware
from .measured import MeasuredTable
from .routing_skew import RoutingSkew
from .workload import Bank, Workload, kept_by_bank

RECOMPUTATION = ("none", "selective", "full")  # from the fastest to the smallest
SHARDINGS = ("none", "fsdp")
MASTER_BYTES, MOMENTS_BYTES, GRADIENT_BYTES = 4, 8, 4
# Per weight: master, gradient and moments are read, master and moments written.
OPTIMIZER_PASSES_BYTES = 28


@dataclass(frozen=True)
class Scenario:
    """What is the same for every layout that is compared: model, machine, tokens, routing."""

    workload: Workload
    hardware: Hardware
    tokens: int  # per rank and step
    skew: RoutingSkew
    table: MeasuredTable | None = None
    chunks: int = 1  # that an exchange is cut into, to hide it behind the experts


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout that could be taken, and how a run would use it."""

    dp_replicate: int
    dp_shard: int
    ep: int
    sharding: str  # of the dense weights, and of the experts over the ranks that hold the same ones
    dispatcher: str
    recompute: str = "none"

    @property
    def world_size(self) -> int:
        """Returns the number of ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """Returns how many ranks of a shard group hold the same experts."""
        return self.dp_shard // self.ep


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank with the most rows, at their peak."""

    weights: float  # in the precision of the products: copies, or gathered ones
    gradients: float
    master: float
    moments: float
    activations: float
    routed: float  # rows that came, their hidden rows, and the buffers they travel through
    logits: float

    @property
    def total(self) -> float:
        """Returns the sum of all parts."""
        return sum(getattr(self, entry.name) for entry in fields(self))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, without what is hidden behind other parts."""

    compute: float
    exchange: float
    gather: float
    gradients: float
    optimizer: float
    straggler: float

    @property
    def total(self) -> float:
        """Returns the sum of all parts."""
        return sum(getattr(self, entry.name) for entry in fields(self))


@dataclass(frozen=True)
class Collective:
    """One kind of call of a step, as one rank sees it."""

    name: str
    op: str
    group_size: int
    crosses_nodes: bool
    calls: float  # per step
    bytes_per_call: float  # that leave the rank
    seconds_per_call: float

    @property
    def num_bytes(self) -> float:
        """Returns the bytes that leave the rank in a step."""
        return self.calls * self.bytes_per_call

    @property
    def seconds(self) -> float:
        """Returns the seconds of a step, hidden or not."""
        return self.calls * self.seconds_per_call


@dataclass(frozen=True)
class Prediction:
    """What a step on one layout costs."""

    candidate: LayoutCandidate
    memory: Memory
    time: StepTime
    collectives: tuple[Collective, ...]
    fits: bool
    tokens_per_s: float  # of the whole world
    mfu: float  # model FLOPs, recomputation not counted, over the peak


def predict(scenario: Scenario, candidate: LayoutCandidate, *, quantile: str = "p50") -> Prediction:
    """Returns what a step on one layout costs.

    Args:
        scenario: model, machine, tokens and routing.
        candidate: the layout.
        quantile: p50, p90 or p99 of the hottest rank's factor, for time; memory takes p99 always.
    """
    hardware, work = scenario.hardware, scenario.workload
    exchanges = list(_exchanges(scenario, candidate, quantile))
    gathers, sums = list(_gathers(scenario, candidate)), list(_gradient_sums(scenario, candidate))
    time = _step_time(scenario, candidate, exchanges, gathers, sums, quantile)
    memory = predict_memory(scenario, candidate)
    rate = scenario.tokens / time.total
    return Prediction(
        candidate,
        memory,
        time,
        (*exchanges, *gathers, *sums),
        fits=memory.total <= hardware.usable_memory * hardware.memory_bytes,
        tokens_per_s=rate * candidate.world_size,
        mfu=3 * work.forward_flops * rate / hardware.peak(work.precision),
    )


# Time ---------------------------------------------------------------------------------------------


def _step_time(
    scenario: Scenario,
    candidate: LayoutCandidate,
    exchanges: list[Collective],
    gathers: list[Collective],
    sums: list[Collective],
    quantile: str,
) -> StepTime:
    hardware, work = scenario.hardware, scenario.workload
    passes = _passes(candidate.recompute)
    experts = passes * sum(
        uses
        * expert_s(
            scenario, bank, candidate.ep, scenario.skew.factor(bank, candidate.ep).at(quantile)
        )
        for bank, uses in work.uses
    )
    compute = passes * dense_s(scenario) + elementwise_s(scenario, passes) + experts
    moved = sum(call.seconds for call in exchanges)
    hidden = 0.0 if scenario.chunks == 1 else min(experts, hardware.chunk_overlap * moved)
    core, gathered = compute + moved - hidden, sum(call.seconds for call in gathers)
    overlapped = hardware.gather_overlap * gathered
    gather = max(core, overlapped) + (gathered - overlapped) - core
    gradients = sum(call.seconds for call in sums)
    optimizer = OPTIMIZER_PASSES_BYTES * _weights_held(work, candidate) / hardware.memory_bandwidth
    late = (
        hardware.straggler * sqrt(2 * log(candidate.world_size))
        if candidate.world_size > 1
        else 0.0
    )
    straggler = late * (core + gather + gradients + optimizer)
    return StepTime(compute, moved - hidden, gather, gradients, optimizer, straggler)


def host_s(scenario: Scenario, recompute: str) -> float:
    """Returns the seconds that the host needs to launch a step's operations one by one.

    A step that is shorter waits for the host.
    """
    return _passes(recompute) * scenario.hardware.launch_s * scenario.workload.launches


def _passes(recompute: str) -> int:
    """Returns a step's computation in forward passes: the backward pass is worth two."""
    return 3 if recompute == "none" else 4


def dense_s(scenario: Scenario) -> float:
    """Returns the seconds of a forward pass through everything but the routed experts."""
    flops = scenario.tokens * scenario.workload.dense_flops
    return flops / _flops_per_s(scenario, scenario.tokens)


def elementwise_s(scenario: Scenario, passes: int) -> float:
    """Returns the seconds of norms, residuals, gates and all else that the memory bus bounds.

    Every byte that is kept for the backward pass crosses the bus `memory_passes` times.
    """
    kept = scenario.tokens * scenario.workload.saved_bytes
    return kept * scenario.hardware.memory_passes * passes / 3 / scenario.hardware.memory_bandwidth


def expert_s(scenario: Scenario, bank: Bank, ep: int, skew: float) -> float:
    """Returns the seconds of one forward use of a bank on the hottest rank.

    They are those of its products or, where these are thin, of the bytes they read and write.
    """
    work, hardware = scenario.workload, scenario.hardware
    routes = scenario.tokens * bank.routes * skew
    rows_per_expert = scenario.tokens * ep * bank.routes / bank.total_experts
    products = 2 * routes * bank.weights_per_expert / _flops_per_s(scenario, rows_per_expert)
    touched = routes * (bank.d_in + 2 * bank.kept_columns + bank.d_out) + bank.parameters / ep
    return max(products, touched * work.bytes_per_element / hardware.memory_bandwidth)


def _flops_per_s(scenario: Scenario, rows: float) -> float:
    """Returns the FLOP/s that products of so many rows reach."""
    hardware = scenario.hardware
    share = hardware.matmul_efficiency * rows / (rows + hardware.matmul_half_rows)
    return share * hardware.peak(scenario.workload.precision)


# Collectives --------------------------------------------------------------------------------------


def _exchanges(
    scenario: Scenario, candidate: LayoutCandidate, quantile: str
) -> Iterator[Collective]:
    """Yields the exchanges of rows by bank; with full recomputation dispatch and combine repeat."""
    if candidate.ep == 1:
        return
    again = 3 if candidate.recompute == "full" else 2
    crosses = ranks_sharing_a_node(candidate.ep, scenario.hardware.ranks_per_node) < candidate.ep
    for bank, uses in scenario.workload.uses:
        skew = scenario.skew.factor(bank, candidate.ep).at(quantile)
        counted = (
            0.0 if bank.balanced else scenario.hardware.host_sync_s + _counts_s(scenario, candidate)
        )
        for number, direction in enumerate((dispatch_direction, combine_direction)):
            num_bytes, seconds = exchange_cost(
                scenario,
                candidate,
                bank,
                direction(bank, scenario.workload.bytes_per_element),
                skew,
            )
            yield Collective(
                f"{bank.kind} {('dispatch', 'combine')[number]}",
                candidate.dispatcher,
                candidate.ep,
                crosses,
                uses * again,
                num_bytes,
                seconds,
            )
        if counted:
            yield Collective(
                f"{bank.kind} counts",
                "all_to_all",
                candidate.ep,
                crosses,
                uses,
                8.0 * bank.total_experts,
                counted,
            )


def exchange_cost(
    scenario: Scenario, candidate: LayoutCandidate, bank: Bank, direction: Direction, skew: float
) -> tuple[float, float]:
    """Returns the bytes that leave a rank and the seconds, of one direction of an exchange."""
    hardware = leaving_pod(scenario.hardware, candidate.ep)
    if DISPATCHERS[candidate.dispatcher].pattern.to_all:
        op = "all_gather" if direction.unit == bank.source else "reduce_scatter"
        whole = candidate.ep * scenario.tokens * direction.tokens_bytes(bank.units(direction.unit))
        group = strided_group(candidate.ep, 1, hardware.ranks_per_node)
        return whole * (candidate.ep - 1) / candidate.ep, collective_s(
            op, whole, group, hardware, scenario.table
        )
    traffic = exchange_traffic(
        direction,
        tokens=scenario.tokens,
        ep=candidate.ep,
        ranks_per_node=hardware.ranks_per_node,
        dispatcher=candidate.dispatcher,
    )
    seconds = exchange_s(
        traffic,
        hardware,
        dispatcher=candidate.dispatcher,
        skew=skew,
        staged=True,
        table=scenario.table,
        chunks=scenario.chunks,
    )
    return traffic.num_bytes, seconds


def _counts_s(scenario: Scenario, candidate: LayoutCandidate) -> float:
    """Returns the seconds of the exchange of counts, which is latency only."""
    hardware = scenario.hardware
    fast = ranks_sharing_a_node(candidate.ep, hardware.ranks_per_node) - 1
    slow = candidate.ep - 1 - fast
    return hardware.exchange_start_s + fast * hardware.fast_post_s + slow * hardware.slow_post_s


@dataclass(frozen=True)
class _Weights:
    """Weights that travel together."""

    name: str
    dense: float
    experts: float  # of one rank, before sharding
    times: int  # such units in the model
    gathers: int  # per pass, forward and backward together


def _units(work: Workload, ep: int) -> list[_Weights]:
    layers = [
        _Weights(
            "layer",
            member.dense_parameters,
            member.expert_parameters / ep,
            member.copies,
            _gathers_per_pass(work),
        )
        for member in work.members
    ]
    return [_Weights("embedding", work.root_parameters, 0.0, 1, 1), *layers]


def _gathers_per_pass(work: Workload) -> int:
    """Returns how often a layer is gathered in a step.

    Layers that repeat stay gathered until their last use in the backward pass; others are freed
    after the forward.
    """
    return 1 if work.repeats > 1 else 2


def _gathers(scenario: Scenario, candidate: LayoutCandidate) -> Iterator[Collective]:
    """Yields FSDP's collectives, as distributed/sharding.py makes them.

    Every unit is gathered, its gradient scattered, and then summed over replicas.
    """
    if candidate.sharding != "fsdp":
        return
    work, hardware = scenario.workload, scenario.hardware
    shards = {
        "dense": strided_group(candidate.dp_shard, 1, hardware.ranks_per_node),
        "experts": strided_group(candidate.efsdp, candidate.ep, hardware.ranks_per_node),
    }
    replicas = strided_group(candidate.dp_replicate, candidate.dp_shard, hardware.ranks_per_node)
    for unit in _units(work, candidate.ep):
        for kind, group in shards.items():
            weights = getattr(unit, kind)
            if weights == 0:
                continue
            name = f"{unit.name}, {kind}"
            yield from _call(
                scenario,
                f"gather {name}",
                "all_gather",
                unit.gathers * unit.times,
                weights * work.bytes_per_element,
                group,
            )
            yield from _call(
                scenario,
                f"scatter {name}",
                "reduce_scatter",
                unit.times,
                weights * GRADIENT_BYTES,
                group,
            )
            shard = weights * GRADIENT_BYTES / group.size
            yield from _call(scenario, f"sum {name}", "all_reduce", unit.times, shard, replicas)


def _gradient_sums(scenario: Scenario, candidate: LayoutCandidate) -> Iterator[Collective]:
    """Yields the sums of unsharded weights' gradients, one each per step.

    Dense ones are summed over the world, experts over the ranks that hold the same ones.
    """
    if candidate.sharding == "fsdp":
        return
    work, per_node = scenario.workload, scenario.hardware.ranks_per_node
    world, same = (
        strided_group(candidate.world_size, 1, per_node),
        strided_group(candidate.world_size // candidate.ep, candidate.ep, per_node),
    )
    yield from _call(
        scenario,
        "sum dense gradients",
        "all_reduce",
        1,
        work.dense_parameters * GRADIENT_BYTES,
        world,
    )
    experts = work.expert_parameters / candidate.ep * GRADIENT_BYTES
    yield from _call(scenario, "sum expert gradients", "all_reduce", 1, experts, same)


def _call(
    scenario: Scenario, name: str, op: str, calls: float, num_bytes: float, group: Group
) -> Iterator[Collective]:
    if group.size == 1 or num_bytes == 0:
        return
    rounds = 2 if op == "all_reduce" else 1
    yield Collective(
        name,
        op,
        group.size,
        group.nodes > 1,
        calls,
        rounds * num_bytes * (group.size - 1) / group.size,
        collective_s(op, num_bytes, group, scenario.hardware, scenario.table),
    )


# Memory -------------------------------------------------------------------------------------------


def predict_memory(scenario: Scenario, candidate: LayoutCandidate) -> Memory:
    """Returns the bytes on the rank with the most rows, at the 99th percentile of its factor."""
    work = scenario.workload
    held = _weights_held(work, candidate)
    weights, gradients = _weights_in_use(work, candidate)
    activations, routed = _activations(scenario, candidate)
    return Memory(
        weights,
        gradients,
        MASTER_BYTES * held,
        MOMENTS_BYTES * held,
        activations,
        routed,
        # Of one chunk of tokens, with their log-softmax and gradient in float32
        # (model/head_loss.py).
        logits=min(scenario.tokens, rows_of_chunk(work.vocab_size, "cuda"))
        * work.vocab_size
        * (work.bytes_per_element + 8),
    )


def _weights_held(work: Workload, candidate: LayoutCandidate) -> float:
    """Returns how many weights' master and moments a rank keeps."""
    if candidate.sharding == "fsdp":
        return (work.dense_parameters + work.expert_parameters) / candidate.dp_shard
    return work.dense_parameters + work.expert_parameters / candidate.ep


def _weights_in_use(work: Workload, candidate: LayoutCandidate) -> tuple[float, float]:
    """Returns the bytes of weights as the products read them, and of gradients.

    Unsharded: a copy in low precision for a pass, its gradient, the float32 gradient, and the
    bucket in which it is summed. FSDP: what is gathered at a time. Members that repeat stay until
    the pass ends, and so do their gradients; of layers that do not there are two at a time, the one
    at work and the next, and the embedding with the head.
    """
    held = _weights_held(work, candidate)
    low = work.bytes_per_element if work.bytes_per_element < MASTER_BYTES else 0
    if candidate.sharding == "none":
        buckets = GRADIENT_BYTES if candidate.world_size > 1 else 0
        return low * held, (GRADIENT_BYTES + low + buckets) * held
    layers = [
        unit.dense + unit.experts
        for unit in _units(work, candidate.ep)[1:]
        for _ in range(unit.times)
    ]
    gathered = work.root_parameters + sum(layers if work.repeats > 1 else sorted(layers)[-2:])
    return (
        work.bytes_per_element * gathered,
        work.bytes_per_element * gathered + GRADIENT_BYTES * held,
    )


def _activations(scenario: Scenario, candidate: LayoutCandidate) -> tuple[float, float]:
    """Returns the bytes that wait for the backward pass: outside of experts, and of routed rows."""
    work, tokens = scenario.workload, scenario.tokens
    dense, routed = (
        work.saved_bytes,
        sum(uses * _routed_bytes(scenario, candidate, bank) for bank, uses in work.uses),
    )
    buffers = max((_buffer_bytes(scenario, candidate, bank) for bank, _ in work.uses), default=0.0)
    if candidate.recompute == "none":
        return tokens * dense, tokens * (routed + buffers)
    kept = (
        work.num_layers * 4 * work.d_model
    )  # the residual stream, float32, in front of every depth step
    kept_routed = sum(uses * _kept_bytes(scenario, candidate, bank) for bank, uses in work.uses)
    one = 1 / work.num_layers  # the depth step that is being recomputed
    return tokens * (kept + one * dense), tokens * (kept_routed + one * routed + buffers)


def _received(
    scenario: Scenario,
    candidate: LayoutCandidate,
    bank: Bank,
    way: Callable[[Bank, int], Direction],
) -> float:
    """Returns the bytes per token of rows on the hottest rank's side of an exchange."""
    direction = way(bank, scenario.workload.bytes_per_element)
    if DISPATCHERS[candidate.dispatcher].pattern.to_all:
        return candidate.ep * direction.tokens_bytes(bank.units(direction.unit))
    traffic = exchange_traffic(
        direction,
        tokens=1,
        ep=candidate.ep,
        ranks_per_node=scenario.hardware.ranks_per_node,
        dispatcher=candidate.dispatcher,
    )
    return min(scenario.skew.factor(bank, candidate.ep).p99, traffic.cap) * traffic.held_bytes


def _routed_bytes(scenario: Scenario, candidate: LayoutCandidate, bank: Bank) -> float:
    """Returns the bytes per token of hidden rows and indices that a rank serves.

    If rows were received from other ranks they are kept too.
    """
    hottest = scenario.skew.factor(bank, candidate.ep).p99
    kept = hottest * kept_by_bank(bank, scenario.workload.bytes_per_element)
    return kept + (
        _received(scenario, candidate, bank, dispatch_direction) if candidate.ep > 1 else 0.0
    )


def _kept_bytes(scenario: Scenario, candidate: LayoutCandidate, bank: Bank) -> float:
    """Returns the bytes per token that recomputation keeps: decisions.

    Selective recomputation keeps also received rows and the sums of outputs.
    """
    decisions = 8 * bank.routes  # the expert
    if candidate.recompute == "full" or candidate.ep == 1:
        return decisions
    outputs = bank.units(bank.target) * bank.d_out * scenario.workload.bytes_per_element
    return decisions + outputs + _received(scenario, candidate, bank, dispatch_direction)


def _buffer_bytes(scenario: Scenario, candidate: LayoutCandidate, bank: Bank) -> float:
    """Returns the bytes per token of rows and outputs that are being exchanged."""
    if candidate.ep == 1:
        return 0.0
    return _received(scenario, candidate, bank, dispatch_direction) + 2 * _received(
        scenario, candidate, bank, combine_direction
    )


# Moving tokens or moving weights ------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Bytes and seconds of one rank's step, if the experts' work is shared by moving tokens or by
    moving weights. Bytes are those that leave the rank.
    """

    ep: int
    tokens_bytes: float  # EP: every depth step's exchanges, forward and backward
    weights_bytes: float  # FSDP over the same ranks: gathers and a scatter of every group member
    # The same, if weights were gathered anew for every depth step, forward and backward.
    weights_bytes_per_use: float
    break_even_tokens: float  # per rank and step: with fewer, tokens are less to move
    tokens_s: float
    weights_s: float


def compare(scenario: Scenario, *, ep: int, dispatcher: str) -> Comparison:
    """Compares both ways of sharing the experts among the same `ep` ranks."""
    work, hardware = scenario.workload, scenario.hardware
    candidate = LayoutCandidate(1, ep, ep, "none", dispatcher)
    exchanges = [
        call for call in _exchanges(scenario, candidate, "p50") if "counts" not in call.name
    ]
    group = strided_group(ep, 1, hardware.ranks_per_node)
    gathers = _gathers_per_pass(work)
    once, anew = (
        work.expert_parameters * (count * work.bytes_per_element + GRADIENT_BYTES) * (ep - 1) / ep
        for count in (gathers, 2 * work.repeats)
    )
    tokens_bytes = sum(call.num_bytes for call in exchanges)
    gathered = work.expert_parameters * work.bytes_per_element
    weights_s = gathers * collective_s("all_gather", gathered, group, hardware, scenario.table)
    weights_s += collective_s(
        "reduce_scatter", work.expert_parameters * GRADIENT_BYTES, group, hardware, scenario.table
    )
    return Comparison(
        ep,
        tokens_bytes,
        once,
        anew,
        scenario.tokens * once / tokens_bytes,
        sum(call.seconds for call in exchanges),
        weights_s,
    )
