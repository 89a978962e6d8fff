"""Predicts the cost of a step on a layout: memory of a rank, bytes of collectives, seconds by part.

    step = max(core, g·gathers) + (1 − g)·gathers + gradients + optimizer,
           at least the host's time to launch the operations one by one (unless captured),
           plus σ·√(2 ln n) of it for the slowest of n ranks
    core = computation + exchanges of rows, which nothing hides

Computation is a roofline per group of operations: routed experts by FLOPs or bytes moved, dense
products by a share of the peak, the rest by passes over memory. Layouts that exchange nothing within
a pass may be captured as CUDA graphs; the few launches outside of these are not counted.

Every micro-batch computes, exchanges rows in every depth step, gathers weights and scatters
gradients. A layer of the group is gathered once for the forward and backward pass together, however
often it repeats (without repeats, once for each). Sums of unsharded gradients and the optimizer run
once per step. As the trainer does, the model sums unsharded gradients in float32 after the backward
pass, overlapped with nothing, and sends rows in the precision of the products, once per direction,
bank, use and pass. Recomputation keeps routing decisions; selective also keeps received rows, and
full sends them again.

The hottest rank's load counts at its median for time, and at its 99th percentile for memory.
"""

from math import log, sqrt

from .prediction import LayoutCandidate, PlannedCollective, Prediction, Scenario, StepTime
from .step_collectives import (
    dispatch_launches,
    gradient_sums,
    muon_exchanges,
    row_exchanges,
    weight_gathers,
)
from .step_memory import muon_held, predict_memory, weights_held
from .workload import Bank

RECOMPUTATION = ("none", "selective", "full")  # from the fastest to the smallest
SHARDINGS = ("none", "fsdp")
# Per weight: master, gradient and moments are read, master and moments written. Muon has one moment.
OPTIMIZER_PASSES_BYTES, MUON_PASSES_BYTES = 28, 20


def predict(scenario: Scenario, candidate: LayoutCandidate) -> Prediction:
    """Returns the cost of a step on one layout."""
    hardware, work = scenario.hardware, scenario.workload
    exchanges, gathers, sums = (
        tuple(make(scenario, candidate)) for make in (row_exchanges, weight_gathers, gradient_sums)
    )
    updates = tuple(muon_exchanges(scenario, candidate))
    time = _step_time(scenario, candidate, *map(_seconds, (exchanges, gathers, sums, updates)))
    memory = predict_memory(scenario, candidate)
    rate = scenario.micro_batches * scenario.tokens / time.total
    return Prediction(
        candidate,
        memory,
        time,
        (*exchanges, *gathers, *sums, *updates),
        fits=memory.total <= hardware.usable_memory * hardware.memory_bytes,
        tokens_per_s=rate * candidate.world_size,
        mfu=3 * work.forward_flops * rate / hardware.peak(work.precision),
        eager_host_s=host_s(scenario, candidate),
    )


def _seconds(calls: tuple[PlannedCollective, ...]) -> float:
    return sum(call.seconds for call in calls)


# Time ---------------------------------------------------------------------------------------------


def _step_time(
    scenario: Scenario, candidate: LayoutCandidate, exchange: float, gathered: float, *sent: float
) -> StepTime:
    hardware, work, (sums, updates) = scenario.hardware, scenario.workload, sent
    passes = scenario.micro_batches * _passes(candidate.recompute)
    experts = sum(uses * expert_s(scenario, bank, candidate.ep) for bank, uses in work.uses)
    compute = passes * (experts + dense_s(scenario) + elementwise_s(scenario))
    core, overlapped = compute + exchange, hardware.gather_overlap * gathered
    gather = max(core, overlapped) + (gathered - overlapped) - core
    optimizer = optimizer_s(scenario, candidate, updates)
    device = core + gather + sums + optimizer
    captured = scenario.captures and candidate.ep == 1 and candidate.sharding == "none"
    waiting = 0.0 if captured else max(0.0, host_s(scenario, candidate) - device)
    straggler = hardware.straggler * sqrt(2 * log(candidate.world_size)) * (device + waiting)
    return StepTime(compute, exchange, gather, sums, optimizer, waiting, straggler)


def optimizer_s(scenario: Scenario, candidate: LayoutCandidate, updates: float) -> float:
    """Returns the seconds of the weights' update; Muon's exchanges hide its products, or they it."""
    work, hardware = scenario.workload, scenario.hardware
    own = muon_held(work, candidate)
    touched = OPTIMIZER_PASSES_BYTES * (weights_held(work, candidate) - own)
    seconds = (touched + MUON_PASSES_BYTES * own) / hardware.memory_bandwidth
    if work.muon is None:
        return seconds
    fullest = work.expert_parameters(candidate.ep) / max(1.0, work.expert_parameters())
    flops = work.muon.flops / max(1, min(candidate.sharing, work.muon.matrices))
    flops += work.muon.expert_flops * fullest / (candidate.sharing // candidate.ep)
    return seconds + max(updates, flops / (hardware.matmul_efficiency * hardware.peak("bfloat16")))


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
    """Returns the seconds of a forward pass without the routed experts; odd widths take longer."""
    work, share = scenario.workload, scenario.hardware.odd_width_efficiency
    more = sum(flops * (share**-odd - 1) for odd, flops in enumerate(work.odd_flops, 1))
    flops = scenario.tokens * (work.dense_flops + more)
    return flops / _flops_per_s(scenario, scenario.tokens)


def elementwise_s(scenario: Scenario) -> float:
    """Returns the seconds of a forward pass through norms, residuals and gates.

    They are bound by memory bandwidth: over the three passes of a step, every byte kept for the
    backward pass crosses the bus `memory_passes` times.
    """
    kept = scenario.tokens * scenario.workload.saved_bytes
    return kept * scenario.hardware.memory_passes / 3 / scenario.hardware.memory_bandwidth


def expert_s(scenario: Scenario, bank: Bank, ep: int) -> float:
    """Returns the seconds of one forward use of a bank on the hottest rank.

    The larger of the time of its products and the time of the bytes they read and write.
    """
    work, hardware = scenario.workload, scenario.hardware
    routes = scenario.tokens * bank.routes * scenario.skew.factor(bank, ep)
    rows_per_expert = scenario.tokens * ep * bank.routes / bank.total_experts
    products = 2 * routes * bank.weights_per_expert / _flops_per_s(scenario, rows_per_expert)
    weights = bank.fullest(ep) * bank.weights_per_expert
    touched = routes * (bank.d_in + 2 * bank.kept_columns + bank.d_out) + weights
    touched *= hardware.expert_passes * work.bytes_per_element
    return max(products, touched / hardware.memory_bandwidth)


def _flops_per_s(scenario: Scenario, rows: float) -> float:
    hardware = scenario.hardware
    share = hardware.matmul_efficiency * rows / (rows + hardware.matmul_half_rows)
    return share * hardware.peak(scenario.workload.precision)
