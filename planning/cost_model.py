"""Predicts the cost of a step on a layout: memory of a rank, bytes of collectives, seconds by part.

A model with repeated layers can pay for its experts in two ways. This module gives both the same
units:

    move tokens   (EP)     every depth step exchanges rows: traffic ∝ tokens × depth steps
    move weights  (FSDP)   a layer of the group is gathered once for the forward and backward pass
                           together, however often it repeats (without repeats, once for each):
                           traffic ∝ weights

    step = max(core, g·gathers) + (1 − g)·gathers + gradients + optimizer,
           at least the host's time to launch the operations one by one,
           plus σ·√(2 ln n) of it for the slowest of n ranks
    core = computation + exchanges of rows, which nothing hides

Computation is a roofline per group of operations: routed experts by FLOPs or bytes moved, dense
products by a share of the peak, the rest by passes over memory. For compiled or captured graphs,
lower the hardware's `launch_s`.

Every micro-batch computes, exchanges rows, gathers weights and scatters gradients. Sums of
unsharded gradients and the optimizer run once per step. As the trainer does, the model sums
unsharded gradients in float32 after the backward pass, overlapped with nothing, and sends rows in
the precision of the products, once per direction, bank, use and pass. Recomputation keeps routing
decisions; selective also keeps received rows, and full sends them again.
"""

from dataclasses import replace
from math import log, sqrt

from .prediction import Collective, LayoutCandidate, Prediction, Scenario, StepTime
from .step_collectives import (
    dispatch_launches,
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
    """Returns the cost of a step on one layout.

    Args:
        scenario: model, machine, tokens and routing.
        candidate: the layout.
        quantile: p50, p90 or p99 of the hottest rank's factor, for time; memory always uses p99.
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
    return scenario.skew.factor(bank, candidate.ep)[quantile]


def host_s(scenario: Scenario, candidate: LayoutCandidate) -> float:
    """Returns the seconds that the host needs to launch a step's operations one by one.

    A shorter step waits for the host. Recomputation launches the model's operations again; the
    dispatcher's are launched again only if rows are sent again.
    """
    work = scenario.workload
    launches = _passes(candidate.recompute) * work.launches
    if candidate.ep > 1:
        again = 4 if candidate.recompute == "full" else 3
        uses = sum(uses for _, uses in work.uses)
        launches += again * uses * dispatch_launches(candidate.dispatcher)
    return scenario.hardware.launch_s * scenario.micro_batches * launches


def _passes(recompute: str) -> int:
    """Returns a step's computation in forward passes; the backward pass counts as two."""
    return 3 if recompute == "none" else 4


def dense_s(scenario: Scenario) -> float:
    """Returns the seconds of a forward pass without the routed experts."""
    flops = scenario.tokens * scenario.workload.dense_flops
    return flops / _flops_per_s(scenario, scenario.tokens)


def elementwise_s(scenario: Scenario) -> float:
    """Returns the seconds of a forward pass through norms, residuals and gates.

    They are bound by memory bandwidth: over the three passes of a step, every byte kept for the
    backward pass crosses the bus `memory_passes` times.
    """
    kept = scenario.tokens * scenario.workload.saved_bytes
    return kept * scenario.hardware.memory_passes / 3 / scenario.hardware.memory_bandwidth


def expert_s(scenario: Scenario, bank: Bank, ep: int, skew: float) -> float:
    """Returns the seconds of one forward use of a bank on the hottest rank.

    The larger of the time of its products and the time of the bytes they read and write.
    """
    work, hardware = scenario.workload, scenario.hardware
    routes = scenario.tokens * bank.routes * skew
    rows_per_expert = scenario.tokens * ep * bank.routes / bank.total_experts
    products = 2 * routes * bank.weights_per_expert / _flops_per_s(scenario, rows_per_expert)
    touched = routes * (bank.d_in + 2 * bank.kept_columns + bank.d_out) + bank.parameters / ep
    return max(products, touched * work.bytes_per_element / hardware.memory_bandwidth)


def _flops_per_s(scenario: Scenario, rows: float) -> float:
    hardware = scenario.hardware
    share = hardware.matmul_efficiency * rows / (rows + hardware.matmul_half_rows)
    return share * hardware.peak(scenario.workload.precision)
