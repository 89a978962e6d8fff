"""Lists the collectives of a step on a layout, with calls, bytes and seconds of each.

These are exchanges of rows (EP), gathers and scatters of sharded weights (FSDP), and gradient sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ..distributed.dispatch.table import DEFAULT, entry_of
from .communication import (
    Direction,
    RankGroup,
    collective_s,
    combine_direction,
    dispatch_direction,
    exchange_s,
    exchange_traffic,
    ranks_sharing_a_node,
    strided_group,
)
from .prediction import LayoutCandidate, PlannedCollective, Scenario
from .workload import Bank, Workload

GRADIENT_BYTES = 4


def row_exchanges(scenario: Scenario, candidate: LayoutCandidate) -> Iterator[PlannedCollective]:
    """Yields the row exchanges of each bank; full recomputation repeats dispatch and combine."""
    if candidate.ep == 1:
        return
    work = scenario.workload
    passes = 3 if candidate.recompute == "full" else 2
    crosses = ranks_sharing_a_node(candidate.ep, scenario.hardware.ranks_per_node) < candidate.ep
    for bank, uses in work.uses:
        calls = scenario.micro_batches * uses
        for way, make in (("dispatch", dispatch_direction), ("combine", combine_direction)):
            yield PlannedCollective(
                f"{bank.kind} {way}",
                candidate.dispatcher,
                candidate.ep,
                crosses,
                calls * passes,
                *_exchange_cost(scenario, candidate, make(bank, work.bytes_per_element)),
            )
        if not _knows_counts(bank, candidate):
            yield PlannedCollective(
                f"{bank.kind} counts",
                "all_to_all",
                candidate.ep,
                crosses,
                calls,
                8.0 * bank.total_experts,
                _counts_s(scenario, candidate),
            )


def _knows_counts(bank: Bank, candidate: LayoutCandidate) -> bool:
    """Tells whether ranks know in advance how many rows they exchange.

    They do if the router fixes the counts, or if `dedup` sends whole heads and every rank serves
    equally many.
    """
    uses_heads = candidate.dispatcher == DEFAULT
    return bank.balanced or (uses_heads and bank.heads > 1 and bank.heads % candidate.ep == 0)


def _exchange_cost(
    scenario: Scenario, candidate: LayoutCandidate, direction: Direction
) -> tuple[float, float]:
    """Returns bytes that leave a rank, and seconds, of one direction of an exchange."""
    hardware, dispatcher = scenario.hardware, candidate.dispatcher
    traffic = exchange_traffic(
        direction,
        tokens=scenario.tokens,
        ep=candidate.ep,
        ranks_per_node=hardware.ranks_per_node,
        dispatcher=dispatcher,
    )
    skew = scenario.skew.factor(direction.bank, candidate.ep)
    seconds = exchange_s(traffic, hardware, dispatcher=dispatcher, skew=skew)
    return traffic.fast_bytes + traffic.slow_bytes, seconds


def dispatch_launches(dispatcher: str) -> int:
    """Returns the operations that a dispatcher adds to one forward use of a bank.

    Counted on four ranks with Gloo (tests/planning/test_cost_model.py). On a GPU, kernels that list
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
    experts: float  # of the fullest rank, before sharding
    times: int  # units like this in the model
    gathers: int  # per micro-batch, forward and backward together


def weight_units(work: Workload, ep: int) -> list[WeightUnit]:
    """Returns the embedding with the head, and every layer of the group.

    Layers that repeat stay gathered until their last use in the backward pass; others are freed
    after the forward pass.
    """
    gathers = 1 if work.repeats > 1 else 2
    units = [WeightUnit("embedding", work.root_parameters, 0.0, 1, 1)]
    for member in work.members:
        experts = member.expert_parameters(ep)
        units.append(WeightUnit("layer", member.dense_parameters, experts, member.copies, gathers))
    return units


def weight_gathers(scenario: Scenario, candidate: LayoutCandidate) -> Iterator[PlannedCollective]:
    """Yields FSDP's collectives, as distributed/sharding.py issues them.

    Every unit is gathered, its gradient scattered, and the gradient summed over replicas.
    """
    if candidate.sharding != "fsdp":
        return
    work, per_node = scenario.workload, scenario.hardware.ranks_per_node
    replicas = strided_group(candidate.dp_replicate, candidate.dp_shard, per_node)
    for unit in weight_units(work, candidate.ep):
        for kind, weights, shards in (
            ("dense", unit.dense, strided_group(candidate.dp_shard, 1, per_node)),
            ("experts", unit.experts, strided_group(candidate.efsdp, candidate.ep, per_node)),
        ):
            gradients = weights * GRADIENT_BYTES
            for act, op, calls, num_bytes, group in (
                ("gather", "all_gather", unit.gathers, weights * work.bytes_per_element, shards),
                ("scatter", "reduce_scatter", 1, gradients, shards),
                ("sum", "all_reduce", 1, gradients / shards.size, replicas),
            ):
                name, calls = f"{act} {unit.name}, {kind}", calls * unit.times
                yield from _dense_call(
                    scenario, name, op, scenario.micro_batches * calls, num_bytes, group
                )


def gradient_sums(scenario: Scenario, candidate: LayoutCandidate) -> Iterator[PlannedCollective]:
    """Yields the sums of unsharded gradients, once per step.

    Dense gradients are summed over the world, experts' over the ranks that hold the same experts.
    """
    if candidate.sharding == "fsdp":
        return
    work, per_node = scenario.workload, scenario.hardware.ranks_per_node
    world, ep = candidate.world_size, candidate.ep
    for kind, weights, group in (
        ("dense", work.dense_parameters, strided_group(world, 1, per_node)),
        ("expert", work.expert_parameters(ep), strided_group(world // ep, ep, per_node)),
    ):
        num_bytes = weights * GRADIENT_BYTES
        yield from _dense_call(scenario, f"sum {kind} gradients", "all_reduce", 1, num_bytes, group)


def muon_exchanges(scenario: Scenario, candidate: LayoutCandidate) -> Iterator[PlannedCollective]:
    """Yields what Muon sends (distributed/muon.py), in float32.

    The owner of a matrix sends its update to all ranks that store it. If FSDP cuts the matrix, the
    owner also collects the momentum. A rank's whole experts need neither.
    """
    work, per_node, ep = scenario.workload, scenario.hardware.ranks_per_node, candidate.ep
    if work.muon is None:
        return
    ranks = candidate.sharing
    experts = sum(
        member.copies * bank.fullest(ep) * bank.weights_per_expert
        for member in work.members
        for bank in member.banks
        if candidate.sharding == "none" or bank.fullest(ep) < ranks // ep
    )
    for kind, weights, group in (
        ("dense", work.muon.weights, strided_group(ranks, 1, per_node)),
        ("expert", experts, strided_group(ranks // ep, ep, per_node)),
    ):
        name, num_bytes = f"Muon's {kind} updates", weights * GRADIENT_BYTES
        if candidate.sharding == "none":
            yield from _dense_call(scenario, name, "broadcast", 1, num_bytes, group)
        else:
            yield from _dense_call(scenario, name, "all_to_all", 2, num_bytes / group.size, group)


def _dense_call(
    scenario: Scenario, name: str, op: str, calls: float, num_bytes: float, group: RankGroup
) -> Iterator[PlannedCollective]:
    if group.size == 1 or num_bytes == 0:
        return
    rounds = 2 if op == "all_reduce" else 1
    yield PlannedCollective(
        name,
        op,
        group.size,
        group.nodes > 1,
        calls,
        rounds * num_bytes * (group.size - 1) / group.size,
        collective_s(op, num_bytes, group, scenario.hardware),
    )
