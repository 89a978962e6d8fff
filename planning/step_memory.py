"""Counts bytes on the rank with the most rows: weights, gradients, moments, activations, routed
rows.

A weight takes 4 bytes for its float32 master, 8 for Adam's moments (4 for Muon's) and 4 for its
gradient, plus 2 + 2 for the products' copy and its gradient in bfloat16: 18 or 20 before sharding. Unsharded
gradients have a second copy in the buckets that are summed. Averages count as moments.
"""

from ..model.head_loss import rows_of_chunk
from .communication import Direction, combine_direction, dispatch_direction, exchange_traffic
from .prediction import LayoutCandidate, Memory, Scenario
from .routing_skew import FULL
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
        (MOMENTS_BYTES + scenario.average_bytes) * held
        - MOMENTS_BYTES / 2 * muon_held(work, candidate),
        activations,
        routed,
        # One chunk with its log-softmax and gradient in float32 (model/head_loss.py).
        logits=min(scenario.tokens, rows_of_chunk(work.vocab_size, "cuda"))
        * work.vocab_size
        * (work.bytes_per_element + 8),
    )


def weights_held(work: Workload, candidate: LayoutCandidate) -> float:
    """Returns how many weights a rank keeps master and moments of."""
    dense, experts = work.dense_parameters, work.expert_parameters(candidate.ep)
    if candidate.sharding == "fsdp":
        return dense / candidate.dp_shard + experts / candidate.efsdp
    return dense + experts


def muon_held(work: Workload, candidate: LayoutCandidate) -> float:
    """Returns how many of them Muon updates, which have one moment."""
    if work.muon is None:
        return 0.0
    others = work.dense_parameters - work.muon.weights
    shards = candidate.dp_shard if candidate.sharding == "fsdp" else 1
    return weights_held(work, candidate) - others / shards


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
    rows = [(uses, *_bytes_of_rows(scenario, candidate, bank)) for bank, uses in work.uses]
    routed = sum(uses * at_work for uses, at_work, _, _ in rows)
    buffers = max((buffer for *_, buffer in rows), default=0.0)
    if candidate.recompute == "none":
        return tokens * work.saved_bytes, tokens * (routed + buffers)
    kept = work.num_layers * 4 * work.d_model  # the float32 residual stream before every depth step
    kept_rows = sum(uses * waiting for uses, _, waiting, _ in rows)
    one = 1 / work.num_layers  # the depth step that is being recomputed
    return tokens * (kept + one * work.saved_bytes), tokens * (kept_rows + one * routed + buffers)


def _bytes_of_rows(
    scenario: Scenario, candidate: LayoutCandidate, bank: Bank
) -> tuple[float, float, float]:
    """Returns the bytes per token of one use at work, of one that waits to be recomputed, and of
    the buffers of an exchange, on the hottest rank.

    At work, a rank keeps hidden rows and indices of what it serves, and received rows. Full
    recomputation keeps decisions; selective also keeps received rows and the sums of outputs.
    """
    size, ep = scenario.workload.bytes_per_element, candidate.ep
    served = scenario.skew.factor(bank, ep, FULL) * kept_by_bank(bank, size)
    decisions = 8 * bank.routes  # the expert
    if ep == 1:
        return served, decisions, 0.0
    received = _received(scenario, candidate, dispatch_direction(bank, size))
    answers = _received(scenario, candidate, combine_direction(bank, size))
    outputs = bank.units(bank.target) * bank.d_out * size
    kept = decisions if candidate.recompute == "full" else decisions + outputs + received
    return served + received, kept, received + 2 * answers


def _received(scenario: Scenario, candidate: LayoutCandidate, direction: Direction) -> float:
    """Returns the bytes per token of rows that the hottest rank receives."""
    traffic = exchange_traffic(
        direction,
        tokens=1,
        ep=candidate.ep,
        ranks_per_node=scenario.hardware.ranks_per_node,
        dispatcher=candidate.dispatcher,
    )
    skew = scenario.skew.factor(direction.bank, candidate.ep, FULL)
    return min(skew, traffic.cap) * traffic.held_bytes
