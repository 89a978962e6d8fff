"""The kernels that a rank launches in a step under one layout: those of kernel_times.py, for its share
of the experts and its routes, and once more where layers are recomputed.
"""

from collections.abc import Iterable
from dataclasses import replace

from .kernel import Kernel, Shape
from .kernel_times import step_kernels, why_unknown
from .prediction import LayoutCandidate, Scenario
from .workload import Bank

_NOT_RECOMPUTED = ("embedding", "head and loss", "weights")
OF_EXPERTS = ("feed-forward experts", "V and O experts")


def why_no_kernels(scenario: Scenario) -> str | None:
    """Says why computation is not taken kernel by kernel; None where it is."""
    hardware, work = scenario.hardware, scenario.workload
    if hardware.fitted:
        return f"that of {hardware.name} was fitted to measured runs (--sources)"
    if work.model is None:
        return "the model is known by its sums alone"
    if reason := why_unknown(work.model):
        return f"the list of kernels does not know {reason}"
    return None


def rank_kernels(
    scenario: Scenario, candidate: LayoutCandidate, quantile: str = "p50"
) -> tuple[Kernel, ...] | None:
    """Returns the kernels of one micro-batch of the hottest rank; None: see `why_no_kernels`.

    Those that were measured (`Scenario.kernel_ratios`) take their predicted time times what was found.
    The optimizer is not among them: it works once in a step, on what the rank holds.
    """
    if why_no_kernels(scenario) is not None:
        return None
    shape = rank_shape(scenario, candidate, quantile)
    ratios = scenario.kernel_ratios
    found = tuple(
        replace(kernel, time=kernel.time.times(ratios[kernel.name]))
        if kernel.name in ratios
        else kernel
        for kernel in step_kernels(scenario.hardware, shape)
    )
    if candidate.recompute == "none":
        return found
    return tuple(
        replace(kernel, calls=2 * kernel.calls)
        if kernel.forward and kernel.part not in _NOT_RECOMPUTED
        else kernel
        for kernel in found
    )


def rank_shape(scenario: Scenario, candidate: LayoutCandidate, quantile: str = "p50") -> Shape:
    """Returns what the hottest rank computes."""
    work, skew = scenario.workload, scenario.skew
    assert work.model is not None
    banks = {bank.kind: bank for bank, _ in work.uses}

    def hottest(bank: Bank | None) -> float:
        return 1.0 if bank is None else skew.factor(bank, candidate.ep).at(quantile)

    feed_forward, value = banks.get("feed_forward"), banks.get("value")
    return Shape(
        work.model,
        scenario.tokens,
        work.seq_len,
        work.precision,
        candidate.ep,
        hottest(feed_forward),
        hottest(value),
        max((skew.spread(bank) for bank in banks.values()), default=0.0),
        deferred=candidate.recompute == "none",
        num_experts=feed_forward.num_experts if feed_forward else None,
        head_experts=value.num_experts if value else None,
    )


def kernel_seconds(kernels: tuple[Kernel, ...]) -> tuple[float, float]:
    """Returns the seconds of the experts' kernels, and those of all others."""
    experts = sum(kernel.seconds for kernel in kernels if kernel.part in OF_EXPERTS)
    return experts, sum(kernel.seconds for kernel in kernels) - experts


def kernel_launches(kernels: Iterable[Kernel]) -> float:
    """Returns how many kernels the host launches in a micro-batch, the optimizer's left out."""
    return sum(kernel.calls * kernel.time.launches for kernel in kernels)
