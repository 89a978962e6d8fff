"""Counts bytes on the rank with the most rows: weights, gradients, moments, activations, routed
rows.

A weight takes 4 bytes for its float32 master, 8 for Adam's moments and 4 for its gradient, plus
2 + 2 for the products' copy and its gradient in bfloat16: 18 or 20 before sharding. Unsharded
gradients have a second copy in the buckets that are summed.
"""

from collections.abc import Callable

from ..distributed.dispatch.table import entry_of
from ..model.head_loss import rows_of_chunk
from .communication import Direction, combine_direction, dispatch_direction, exchange_traffic
from .prediction import LayoutCandidate, Memory, Scenario
from .step_collectives import GRADIENT_BYTES, weight_units
from .workload import Bank, Workload, kept_by_bank

MASTER_BYTES, MOMENTS_BYTES = 4, 8


def predict_memory(scenario: Scenario, candidate: LayoutCandidate) -> Memory:
    """Returns the bytes on the rank with the most rows, at the 99th percentile of its load."""
    work = scenario.workload
    held = weights_held(work, candidate)
    weights, gradients = _weights_in_use(work, candidate)
    activations, routed = _activations(scenario, candidate)
    return Memory(
        weights,
        gradients,
        MASTER_BYTES * held,
        MOMENTS_BYTES * held,
        activations,
        routed,
        # One chunk with its log-softmax and gradient in float32 (model/head_loss.py).
        logits=min(scenario.tokens, rows_of_chunk(work.vocab_size, "cuda"))
        * work.vocab_size
        * (work.bytes_per_element + 8),
    )


def weights_held(work: Workload, candidate: LayoutCandidate) -> float:
    """Returns how many weights a rank keeps master and moments of."""
    if candidate.sharding == "fsdp":
        return (work.dense_parameters + work.expert_parameters) / candidate.dp_shard
    return work.dense_parameters + work.expert_parameters / candidate.ep


def _weights_in_use(work: Workload, candidate: LayoutCandidate) -> tuple[float, float]:
    """Returns the bytes of weights in the products' precision, and of gradients.

    Unsharded: a low-precision copy for a pass, its gradient, the float32 gradient, and the bucket
    in which it is summed. FSDP: what is gathered at a time. Layers that repeat stay gathered until
    the pass ends, and so do their gradients. Of other layers two are gathered at a time, the
    current and the next one, plus the embedding with the head.
    """
    held = weights_held(work, candidate)
    low = work.bytes_per_element if work.bytes_per_element < MASTER_BYTES else 0
    if candidate.sharding == "none":
        buckets = GRADIENT_BYTES if candidate.world_size > 1 else 0
        return low * held, (GRADIENT_BYTES + low + buckets) * held
    layers = [
        unit.dense + unit.experts
        for unit in weight_units(work, candidate.ep)[1:]
        for _ in range(unit.times)
    ]
    gathered = work.root_parameters + sum(layers if work.repeats > 1 else sorted(layers)[-2:])
    return (
        work.bytes_per_element * gathered,
        work.bytes_per_element * gathered + GRADIENT_BYTES * held,
    )


def _activations(scenario: Scenario, candidate: LayoutCandidate) -> tuple[float, float]:
    """Returns the bytes kept for the backward pass, outside of experts and of routed rows."""
    work, tokens = scenario.workload, scenario.tokens
    dense, routed = (
        work.saved_bytes,
        sum(uses * _routed_bytes(scenario, candidate, bank) for bank, uses in work.uses),
    )
    buffers = max((_buffer_bytes(scenario, candidate, bank) for bank, _ in work.uses), default=0.0)
    if candidate.recompute == "none":
        return tokens * dense, tokens * (routed + buffers)
    kept = work.num_layers * 4 * work.d_model  # the float32 residual stream before every depth step
    kept_routed = sum(uses * _kept_bytes(scenario, candidate, bank) for bank, uses in work.uses)
    one = 1 / work.num_layers  # the depth step that is being recomputed
    return tokens * (kept + one * dense), tokens * (kept_routed + one * routed + buffers)


def _received(
    scenario: Scenario,
    candidate: LayoutCandidate,
    bank: Bank,
    way: Callable[[Bank, int], Direction],
) -> float:
    """Returns the bytes per token of rows that the hottest rank receives."""
    direction = way(bank, scenario.workload.bytes_per_element)
    if entry_of(candidate.dispatcher).pattern.to_all:
        return candidate.ep * direction.tokens_bytes(bank.units(direction.unit))
    traffic = exchange_traffic(
        direction,
        tokens=1,
        ep=candidate.ep,
        ranks_per_node=scenario.hardware.ranks_per_node,
        dispatcher=candidate.dispatcher,
    )
    return min(scenario.skew.factor(bank, candidate.ep)["p99"], traffic.cap) * traffic.held_bytes


def _routed_bytes(scenario: Scenario, candidate: LayoutCandidate, bank: Bank) -> float:
    """Returns the bytes per token of hidden rows and indices that a rank serves, and of received
    rows.
    """
    hottest = scenario.skew.factor(bank, candidate.ep)["p99"]
    kept = hottest * kept_by_bank(bank, scenario.workload.bytes_per_element)
    return kept + (
        _received(scenario, candidate, bank, dispatch_direction) if candidate.ep > 1 else 0.0
    )


def _kept_bytes(scenario: Scenario, candidate: LayoutCandidate, bank: Bank) -> float:
    """Returns the bytes per token that recomputation keeps: decisions.

    Selective recomputation also keeps received rows and the sums of outputs.
    """
    decisions = 8 * bank.routes  # the expert
    if candidate.recompute == "full" or candidate.ep == 1:
        return decisions
    outputs = bank.units(bank.target) * bank.d_out * scenario.workload.bytes_per_element
    return decisions + outputs + _received(scenario, candidate, bank, dispatch_direction)


def _buffer_bytes(scenario: Scenario, candidate: LayoutCandidate, bank: Bank) -> float:
    if candidate.ep == 1:
        return 0.0
    return _received(scenario, candidate, bank, dispatch_direction) + 2 * _received(
        scenario, candidate, bank, combine_direction
    )
