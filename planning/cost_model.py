"""Predicts what a step costs on a layout: memory of a rank, bytes of collectives, seconds by part.

A model whose layers repeat can pay for its experts in two ways, and this module puts both into the
same units:

    move tokens   (EP)     every depth step exchanges rows: traffic ∝ tokens × depth steps, weights
                           stay where they are
    move weights  (FSDP)   a group member is gathered once for the forward and backward passes
                           together, however often it repeats (without repeats once for each):
                           traffic ∝ weights, tokens stay where they are

    step = max(core, g·gathers) + (1 − g)·gathers + gradients + optimizer,
           no less than the host needs to launch the operations one by one,
           and σ·√(2 ln n) of it for the slowest of n ranks
    core = computation + exchanges of rows, which nothing hides

Computation is a roofline per group of operations: routed experts by their products or the bytes
these move, dense products by a share of the peak, all else by passes over memory. Where graphs are
compiled or captured, a smaller `launch_s` of the hardware says what they save.

Every micro-batch of a step computes, exchanges rows, gathers weights and scatters gradients; sums
of unsharded gradients and the optimizer come once. The trainer is taken as it is built: it sums
unsharded gradients in float32 after the backward pass, with nothing to hide that; rows travel in
the precision of the products, once in each direction per bank, use and pass. Recomputation keeps
routing decisions; selective recomputation also keeps what travelled, and full sends it once more.

step_collectives.py counts what travels, step_memory.py what a rank must hold.
"""

from dataclasses import dataclass, replace
from math import log, sqrt

from .communication import collective_s, strided_group
from .prediction import Collective, LayoutCandidate, Prediction, Scenario, StepTime
from .step_collectives import (
    GRADIENT_BYTES,
    dispatch_launches,
    gathers_per_pass,
    gradient_sums,
    row_exchanges,
    weight_gathers,
)
from .step_memory import predict_memory, weights_held
from .workload import Bank

RECOMPUTATION = ("none", "selective", "full")  # from the fastest to the smallest
SHARDINGS = ("none", "fsdp")
# Per weight: master, gradient and moments are read, master and moments written.
OPTIMIZER_PASSES_BYTES = 28


def predict(scenario: Scenario, candidate: LayoutCandidate, *, quantile: str = "p50") -> Prediction:
    """Returns what a step on one layout costs.

    Args:
        scenario: model, machine, tokens and routing.
        candidate: the layout.
        quantile: p50, p90 or p99 of the hottest rank's factor, for time; memory takes p99 always.
    """
    hardware, work = scenario.hardware, scenario.workload
    exchanges, gathers = (
        [replace(call, calls=scenario.micro_batches * call.calls) for call in calls]
        for calls in (
            row_exchanges(scenario, candidate, quantile),
            weight_gathers(scenario, candidate),
        )
    )
    sums = list(gradient_sums(scenario, candidate))
    time = _step_time(scenario, candidate, exchanges, gathers, sums, quantile)
    memory = predict_memory(scenario, candidate)
    rate = scenario.micro_batches * scenario.tokens / time.total
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
    passes = scenario.micro_batches * _passes(candidate.recompute)
    experts = sum(
        uses * expert_s(scenario, bank, candidate.ep, _skew(scenario, bank, candidate, quantile))
        for bank, uses in work.uses
    )
    compute = passes * (experts + dense_s(scenario) + elementwise_s(scenario))
    moved = sum(call.seconds for call in exchanges)
    core, gathered = compute + moved, sum(call.seconds for call in gathers)
    overlapped = hardware.gather_overlap * gathered
    gather = max(core, overlapped) + (gathered - overlapped) - core
    gradients = sum(call.seconds for call in sums)
    optimizer = OPTIMIZER_PASSES_BYTES * weights_held(work, candidate) / hardware.memory_bandwidth
    device = core + gather + gradients + optimizer
    waiting = max(0.0, host_s(scenario, candidate) - device)
    straggler = hardware.straggler * sqrt(2 * log(candidate.world_size)) * (device + waiting)
    return StepTime(compute, moved, gather, gradients, optimizer, waiting, straggler)


def _skew(scenario: Scenario, bank: Bank, candidate: LayoutCandidate, quantile: str) -> float:
    return scenario.skew.factor(bank, candidate.ep).at(quantile)


def host_s(scenario: Scenario, candidate: LayoutCandidate) -> float:
    """Returns the seconds that the host needs to launch a step's operations one by one.

    A step that is shorter waits for the host. The model's are launched anew where it is
    recomputed, the dispatcher's only where rows travel again.
    """
    work = scenario.workload
    launches = _passes(candidate.recompute) * work.launches
    if candidate.ep > 1:
        again = 4 if candidate.recompute == "full" else 3
        uses = sum(uses for _, uses in work.uses)
        launches += again * uses * dispatch_launches(candidate.dispatcher)
    return scenario.hardware.launch_s * scenario.micro_batches * launches


def _passes(recompute: str) -> int:
    """Returns a step's computation in forward passes: the backward pass is worth two."""
    return 3 if recompute == "none" else 4


def dense_s(scenario: Scenario) -> float:
    """Returns the seconds of a forward pass through everything but the routed experts."""
    flops = scenario.tokens * scenario.workload.dense_flops
    return flops / _flops_per_s(scenario, scenario.tokens)


def elementwise_s(scenario: Scenario) -> float:
    """Returns the seconds of a forward pass through norms, residuals and gates.

    The memory bus bounds them: in a step of three passes, every byte that is kept for the backward
    pass crosses it `memory_passes` times.
    """
    kept = scenario.tokens * scenario.workload.saved_bytes
    return kept * scenario.hardware.memory_passes / 3 / scenario.hardware.memory_bandwidth


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
    calls = row_exchanges(scenario, candidate, "p50")
    exchanges = [call for call in calls if "counts" not in call.name]
    tokens_bytes = sum(call.num_bytes for call in exchanges)
    group = strided_group(ep, 1, hardware.ranks_per_node)
    gathers = gathers_per_pass(work)
    gathered_bytes = work.expert_parameters * work.bytes_per_element
    scattered_bytes = work.expert_parameters * GRADIENT_BYTES
    gather_s = collective_s("all_gather", gathered_bytes, group, hardware, scenario.table)
    scatter_s = collective_s("reduce_scatter", scattered_bytes, group, hardware, scenario.table)
    once, anew = (
        (count * gathered_bytes + scattered_bytes) * (ep - 1) / ep
        for count in (gathers, 2 * work.repeats)
    )
    return Comparison(
        ep,
        tokens_bytes=tokens_bytes,
        weights_bytes=once,
        weights_bytes_per_use=anew,
        break_even_tokens=scenario.tokens * once / tokens_bytes,
        tokens_s=sum(call.seconds for call in exchanges),
        weights_s=gathers * gather_s + scatter_s,
    )
