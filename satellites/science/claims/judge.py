"""Claims and verdicts: the papers' statements as one number per seed and a bound.

The rule is that of `moebius compare` (satellites/science/compare/statistics.py). With at least five seeds, a
claim *holds* if the confidence interval of the mean, corrected for the number of findings, is on
the claimed side of the bound. It *does not hold* if the whole interval is on the other side, and is
*undecided* otherwise.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

from ..compare.statistics import Verdict, verdict
from .measures import log_slope, steps_to_reach
from .toys import GRANULARITIES, WINDOWS, granular

Runs = Mapping[
    str, Sequence[Mapping[str, Any]]
]  # arm -> records, by seed, the same seeds for every arm
MOST_STEPS = 0.6  # of the dense model's
MAXVIO_FALL = 2.0
VANISHED = 0.25  # of the gain with the norm
FINDINGS = 8  # of all claims together: each has one, H3 and G1 two


@dataclass(frozen=True)
class Finding:
    """Holds one number per seed and a bound."""

    claim: str
    says: str
    figure: str
    values: tuple[float, ...]
    side: Literal["at most", "above"]
    bound: float
    detail: str

    @property
    def verdict(self) -> Verdict:
        """Returns the verdict by the rule above."""
        return verdict(self.values, self.side, self.bound, claims=FINDINGS)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain values for the results file; a number that is not finite is a word."""
        values = [value if math.isfinite(value) else str(value) for value in self.values]
        return asdict(self) | {"values": values, "verdict": self.verdict}


@dataclass(frozen=True)
class Claim:
    """Describes a claim and the arms that it compares."""

    arms: tuple[str, ...]
    judge: Callable[[Runs], list[Finding]]


def faster_than_dense(runs: Runs) -> list[Finding]:
    """M8: Mixture of Tokens (arXiv 2310.15961) against the dense model, for the same number of
    steps.

    A loss that is never reached counts as reached at the last step.
    """
    shares = [
        min(1.0, steps_to_reach(mixed["validation_loss"], final_loss(dense)) / dense["steps"])
        for dense, mixed in zip(runs["dense"], runs["MoT"], strict=True)
    ]
    dense, mixed = runs["dense"][0], runs["MoT"][0]
    flops = mixed["training_flops_per_token"] / dense["training_flops_per_token"]
    times = fmean(run["step_s"] for run in runs["MoT"]) / fmean(
        run["step_s"] for run in runs["dense"]
    )
    says = (
        "MoT reaches the dense model's final validation loss in at most "
        f"{MOST_STEPS:.0%} of its steps"
    )
    detail = (
        f"final loss dense {mean_loss(runs['dense']):.3f}, MoT {mean_loss(runs['MoT']):.3f}; "
        f"a step of MoT has {flops:.2f} times the FLOPs and takes {times:.2f} times as long"
    )
    return [
        Finding("M8", says, "steps needed ÷ steps", tuple(shares), "at most", MOST_STEPS, detail)
    ]


def mixing_is_learned(runs: Runs) -> list[Finding]:
    """M11: uniform against learned mixing, by seed."""
    pairs = zip(runs["MoT, uniform"], runs["MoT"], strict=True)
    excess = tuple(final_loss(uniform) - final_loss(learned) for uniform, learned in pairs)
    learned, uniform = mean_loss(runs["MoT"]), mean_loss(runs["MoT, uniform"])
    detail = f"final loss learned {learned:.3f}, uniform {uniform:.3f}"
    says = "MoT with uniform mixing is worse than with learned mixing"
    return [Finding("M11", says, "loss of uniform − learned, nats", excess, "above", 0.0, detail)]


def balance_loss_works(runs: Runs) -> list[Finding]:
    """T3: largest load over mean load, minus 1, averaged over layers and the last tenth of
    training.
    """
    without = [last_tenth(run["max_violation"]) for run in runs["top-1, balance 0"]]
    balanced = [last_tenth(run["max_violation"]) for run in runs["top-1, balance 0.01"]]
    falls = tuple(before / after for before, after in zip(without, balanced, strict=True))
    says = f"the balance loss (0.01) lets MaxVio fall more than {MAXVIO_FALL:g} times"
    detail = (
        f"MaxVio {fmean(without):.2f} without, {fmean(balanced):.2f} with; "
        f"final loss {mean_loss(runs['top-1, balance 0']):.3f}, "
        f"{mean_loss(runs['top-1, balance 0.01']):.3f}"
    )
    return [Finding("T3", says, "MaxVio without ÷ with", falls, "above", MAXVIO_FALL, detail)]


def less_collapse(runs: Runs) -> list[Finding]:
    """X2: slopes of ln RC over training, X-MoE (arXiv 2204.09179) against a linear router with the
    same balance loss.
    """
    linear = [log_slope(collapse_curve(run)) for run in runs["top-1, balance 0.01"]]
    sphere = [log_slope(collapse_curve(run)) for run in runs["X-MoE"]]
    says = (
        "representations collapse less under X-MoE's router: the slope of ln RC is larger than "
        "under a linear router"
    )
    ends = [fmean(collapse_curve(run)[-1][1] for run in runs[arm]) for arm in LINEAR_AND_SPHERE]
    later = [
        [log_slope(second_half(collapse_curve(run))) for run in runs[arm]]
        for arm in LINEAR_AND_SPHERE
    ]
    later_differences = [ours - theirs for theirs, ours in zip(*later, strict=True)]
    used, effective = (
        [fmean(size(run) for run in runs[arm]) for arm in LINEAR_AND_SPHERE]
        for size in (used_experts, share_of_experts)
    )
    detail = (
        f"slope of ln RC per 1000 steps linear {fmean(linear):.2f}, X-MoE {fmean(sphere):.2f}; "
        f"over the second half of the probes {fmean(later[0]):.2f}, {fmean(later[1]):.2f} "
        "(differences "
        f"{by_seed(later_differences)}); last RC {ends[0]:.3g}, {ends[1]:.3g}; "
        f"experts used {used[0]:.0%}, {used[1]:.0%} of all (effective {effective[0]:.0%}, "
        f"{effective[1]:.0%}); "
        f"final loss {mean_loss(runs['top-1, balance 0.01']):.3f}, {mean_loss(runs['X-MoE']):.3f}"
    )
    difference = tuple(ours - theirs for ours, theirs in zip(sphere, linear, strict=True))
    return [
        Finding("X2", says, "slope of X-MoE − slope of linear", difference, "above", 0.0, detail)
    ]


def more_experts_active(runs: Runs) -> list[Finding]:
    """H3: activated experts in a window relative to random routing, against the better of two
    controls.

    More and narrower draws activate more experts by themselves, so the plain fraction (arXiv
    2404.15045) proves nothing.
    """
    findings = []
    ratios = {arm: [activation_ratio(run) for run in runs[arm]] for arm in ACTIVATION_ARMS}
    spread = {arm: fmean(share_of_experts(run) for run in runs[arm]) for arm in ACTIVATION_ARMS}
    detail = "; ".join(
        f"{arm}: ratio {fmean(ratios[arm]):.3f}, effective experts {spread[arm]:.0%} of all"
        for arm in ACTIVATION_ARMS
    )
    for heads in (2, 3):
        ours = ratios[f"MH-MoE h={heads}"]
        margins = tuple(
            mine - max(smoe, fine)
            for mine, smoe, fine in zip(ours, ratios["SMoE"], ratios["fine-grained"], strict=True)
        )
        says = (
            f"MH-MoE h={heads} activates more experts, measured ÷ random, than SMoE and "
            "fine-grained at equal cost"
        )
        findings.append(
            Finding(
                f"H3, h={heads}",
                says,
                "ratio − better control's ratio",
                margins,
                "above",
                0.0,
                detail,
            )
        )
    return findings


def granularity_helps(runs: Runs) -> list[Finding]:
    """G1: final losses of expert choice by position with G = 1, 4, 8 (arXiv 2402.07871), with and
    without an output norm.
    """
    with_norm, without = granular_losses(runs, norm=True), granular_losses(runs, norm=False)
    smallest = tuple(min(one - four, four - eight) for one, four, eight in with_norm)
    kept = tuple(map(share_kept, without, with_norm))
    means = [
        ", ".join(f"{fmean(column):.3f}" for column in zip(*losses, strict=True))
        for losses in (with_norm, without)
    ]
    detail = f"final loss at G = 1, 4, 8: with the norm {means[0]}; without {means[1]}"
    falls = Finding(
        "G1, norm",
        "with an output norm the loss falls with G",
        "smaller of the falls G 1 → 4, 4 → 8, nats",
        smallest,
        "above",
        0.0,
        detail,
    )
    vanishes = f"without the norm the gain of G > 1 vanishes (to {VANISHED:.0%}, a bound of ours)"
    if falls.verdict != "holds":  # without a gain that is sure there is none to vanish
        detail += f"; not judged, since G1, norm: {falls.verdict}; shares {by_seed(kept)}"
        kept = (math.nan,) * len(kept)
    return [
        falls,
        Finding(
            "G1, no norm",
            vanishes,
            "gain without ÷ gain with the norm",
            kept,
            "at most",
            VANISHED,
            detail,
        ),
    ]


def share_kept(without: tuple[float, ...], with_norm: tuple[float, ...]) -> float:
    """Returns the share of the gain of G > 1 kept without the norm (mean over G); NaN if there is
    no gain.
    """
    gain_without, gain = without[0] - fmean(without[1:]), with_norm[0] - fmean(with_norm[1:])
    return gain_without / gain if gain > 0 else math.nan


def granular_losses(runs: Runs, *, norm: bool) -> list[tuple[float, ...]]:
    """Returns final losses at G = 1, 4, 8, one tuple per seed."""
    columns = [
        [final_loss(run) for run in runs[granular(value, norm=norm)]] for value in GRANULARITIES
    ]
    return list(zip(*columns, strict=True))


def by_seed(values: Sequence[float]) -> str:
    """Formats numbers in sequence."""
    return ", ".join(f"{value:.3g}" for value in values)


def final_loss(run: Mapping[str, Any]) -> float:
    """Returns the validation loss after the last step, in nats per token."""
    return run["validation_loss"][-1][1]


def mean_loss(runs: Sequence[Mapping[str, Any]]) -> float:
    """Returns the final loss, averaged over seeds."""
    return fmean(final_loss(run) for run in runs)


def last_tenth(curve: Sequence[tuple[int, float]]) -> float:
    """Returns the mean over the last tenth of a curve's points."""
    return fmean(value for _, value in curve[-max(1, len(curve) // 10) :])


def collapse_curve(run: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Returns RC at every probe, as the geometric mean over layers."""
    return [
        (probe["step"], math.exp(fmean(math.log(layer["collapse"]) for layer in probe["layers"])))
        for probe in run["routings"]
    ]


def second_half(curve: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Returns the part of a curve after the initial transient."""
    return curve[len(curve) // 2 :]


def activation_ratio(run: Mapping[str, Any], windows: Sequence[int] = WINDOWS) -> float:
    """Returns measured ÷ random, averaged over windows and layers."""
    layers = run["routings"][-1]["layers"]
    return fmean(layer[f"activated_{window}_ratio"] for layer in layers for window in windows)


def used_experts(run: Mapping[str, Any]) -> float:
    """Returns the share of experts with at least one row, averaged over layers."""
    layers = run["routings"][-1]["layers"]
    return fmean(layer["experts_used"] / layer["num_experts"] for layer in layers)


def share_of_experts(run: Mapping[str, Any]) -> float:
    """Returns effective experts ÷ experts, averaged over layers."""
    layers = run["routings"][-1]["layers"]
    return fmean(layer["effective_experts"] / layer["num_experts"] for layer in layers)


LINEAR_AND_SPHERE = ("top-1, balance 0.01", "X-MoE")
ACTIVATION_ARMS = ("SMoE", "fine-grained", "MH-MoE h=2", "MH-MoE h=3")
CLAIMS = {
    "M8": Claim(("dense", "MoT"), faster_than_dense),
    "M11": Claim(("MoT", "MoT, uniform"), mixing_is_learned),
    "T3": Claim(("top-1, balance 0", "top-1, balance 0.01"), balance_loss_works),
    "X2": Claim(("top-1, balance 0.01", "X-MoE"), less_collapse),
    "H3": Claim(ACTIVATION_ARMS, more_experts_active),
    "G1": Claim(
        tuple(granular(g, norm=norm) for norm in (True, False) for g in GRANULARITIES),
        granularity_helps,
    ),
}
