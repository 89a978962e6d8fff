"""Lists the collectives of a step on a layout, with calls, bytes and seconds of each.

These are exchanges of rows (EP), gathers and scatters of sharded weights (FSDP), and gradient sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..distributed.dispatch.table import DEFAULT, entry_of
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
from .prediction import Collective, LayoutCandidate, Scenario
from .workload import Bank, Workload

GRADIENT_BYTES = 4
_TO_ALL_COLLECTIVES = ("all_gather", "reduce_scatter")


def row_exchanges(
    scenario: Scenario, candidate: LayoutCandidate, quantile: str
) -> Iterator[Collective]:
    """Yields the row exchanges of each bank; full recomputation repeats dispatch and combine."""
    if candidate.ep == 1:
        return
    again = 3 if candidate.recompute == "full" else 2
    crosses = ranks_sharing_a_node(candidate.ep, scenario.hardware.ranks_per_node) < candidate.ep
    for bank, uses in scenario.workload.uses:
        skew = scenario.skew.factor(bank, candidate.ep)[quantile]
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
        if not knows_counts(bank, candidate):
            yield Collective(
                f"{bank.kind} counts",
                "all_to_all",
                candidate.ep,
                crosses,
                uses,
                8.0 * bank.total_experts,
                _counts_s(scenario, candidate),
            )


def knows_counts(bank: Bank, candidate: LayoutCandidate) -> bool:
    """Tells whether ranks know in advance how many rows they exchange.

    They do if the router fixes the counts, or if `dedup` sends whole heads and every rank serves
    equally many.
    """
    uses_heads = candidate.dispatcher == DEFAULT
    return bank.balanced or (uses_heads and bank.heads > 1 and bank.heads % candidate.ep == 0)


def exchange_cost(
    scenario: Scenario, candidate: LayoutCandidate, bank: Bank, direction: Direction, skew: float
) -> tuple[float, float]:
    """Returns bytes that leave a rank, and seconds, of one direction of an exchange."""
    hardware = leaving_pod(scenario.hardware, candidate.ep)
    if entry_of(candidate.dispatcher).pattern.to_all:
        whole = candidate.ep * scenario.tokens * direction.tokens_bytes(bank.units(direction.unit))
        group = strided_group(candidate.ep, 1, hardware.ranks_per_node)
        # One pass gathers and the other scatters: dispatch forward, combine backward.
        both = (collective_s(op, whole, group, hardware) for op in _TO_ALL_COLLECTIVES)
        return whole * (candidate.ep - 1) / candidate.ep, sum(both) / 2
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
    )
    return traffic.num_bytes, seconds


def dispatch_launches(dispatcher: str) -> int:
    """Returns the operations that a dispatcher adds to one forward use of a bank.

    Counted on four ranks with Gloo (tests/planning/test_launches.py). On a GPU, kernels that list
    what to send come on top; on the CPU they are C++ calls.
    """
    pattern = entry_of(dispatcher).pattern
    if pattern.to_all:
        return 36
    if pattern.node_first:
        return 64
    return 32 if pattern.row_per_route else 27


def _counts_s(scenario: Scenario, candidate: LayoutCandidate) -> float:
    """Returns the seconds to exchange counts and read them on the host: latency only."""
    hardware = scenario.hardware
    fast = ranks_sharing_a_node(candidate.ep, hardware.ranks_per_node) - 1
    slow = candidate.ep - 1 - fast
    posted = fast * hardware.fast_post_s + slow * hardware.slow_post_s
    return hardware.host_sync_s + hardware.exchange_start_s + posted


@dataclass(frozen=True)
class WeightUnit:
    """Groups weights that FSDP gathers and scatters together."""

    name: str
    dense: float
    experts: float  # of one rank, before sharding
    times: int  # units like this in the model
    gathers: int  # per step, forward and backward together


def weight_units(work: Workload, ep: int) -> list[WeightUnit]:
    """Returns the embedding with the head, and every layer of the group."""
    layers = [
        WeightUnit(
            "layer",
            member.dense_parameters,
            member.expert_parameters / ep,
            member.copies,
            gathers_per_pass(work),
        )
        for member in work.members
    ]
    return [WeightUnit("embedding", work.root_parameters, 0.0, 1, 1), *layers]


def gathers_per_pass(work: Workload) -> int:
    """Returns how often a step gathers a layer.

    Layers that repeat stay gathered until their last use in the backward pass; others are freed
    after the forward pass.
    """
    return 1 if work.repeats > 1 else 2


def weight_gathers(scenario: Scenario, candidate: LayoutCandidate) -> Iterator[Collective]:
    """Yields FSDP's collectives, as distributed/sharding.py issues them.

    Every unit is gathered, its gradient scattered, and the gradient summed over replicas.
    """
    if candidate.sharding != "fsdp":
        return
    work, hardware = scenario.workload, scenario.hardware
    shards = {
        "dense": strided_group(candidate.dp_shard, 1, hardware.ranks_per_node),
        "experts": strided_group(candidate.efsdp, candidate.ep, hardware.ranks_per_node),
    }
    replicas = strided_group(candidate.dp_replicate, candidate.dp_shard, hardware.ranks_per_node)
    for unit in weight_units(work, candidate.ep):
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


def gradient_sums(scenario: Scenario, candidate: LayoutCandidate) -> Iterator[Collective]:
    """Yields the sums of unsharded gradients, once per step.

    Dense gradients are summed over the world, experts' over the ranks that hold the same experts.
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
        collective_s(op, num_bytes, group, scenario.hardware),
    )
