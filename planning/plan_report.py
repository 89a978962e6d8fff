"""`moebius plan` for people: which layout, how fast, and whether to move tokens or weights: table,
words, JSON and picture.
"""

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .cost_model import Comparison, compare, host_s, predict
from .kernel_report import computation_line, kernels_as_json
from .planner import (
    UNCONSTRAINED,
    Constraints,
    Plan,
    RankedPlans,
    SizeRange,
    experts_at_break_even,
    rank_plans,
    size_ranges,
)
from .prediction import Prediction, Scenario
from .routing_skew import CONCENTRATION, CONCENTRATION_SOURCE

SKIPS = ("…", "...", "..")
QUANTILES = ("p50", "p90", "p99")


@dataclass(frozen=True)
class PlanReport:
    """The plans of all sizes that have one, and what follows from them."""

    scenario: Scenario
    sizes: tuple[RankedPlans, ...]
    impossible: dict[int, str]  # nodes → why not
    comparison: Comparison | None  # None: the model has no experts, or no node could share them
    size_ranges: tuple[SizeRange, ...]
    # By how much the experts must grow in number until EP pays at the largest size; None: unknown.
    growth: int | None


def parse_nodes(words: Sequence[str]) -> list[int]:
    """Reads numbers of nodes, in ascending order.

    "…" (or "..") between two doubles the first until the second is reached: 1 … 6 is 1 2 4 6.

    Raises:
        ValueError: a word is no number of nodes, or nothing stands before or after "…".
    """
    nodes: list[int] = []
    skip = False
    for word in words:
        if word in SKIPS:
            if skip or not nodes:
                raise ValueError(
                    f"--nodes {' '.join(words)}: {word} must stand between two numbers"
                )
            skip = True
            continue
        if not word.isdecimal() or int(word) < 1:
            raise ValueError(
                f"--nodes {' '.join(words)}: {word!r} is no number of nodes; write 1 2 8, or 1 … "
                "1250"
            )
        last = int(word)
        while skip and nodes[-1] * 2 < last:
            nodes.append(nodes[-1] * 2)
        nodes, skip = [*nodes, last], False
    if skip:
        raise ValueError(f"--nodes {' '.join(words)}: a number must follow {words[-1]}")
    return sorted(set(nodes))


def make_report(
    scenario: Scenario, nodes: Sequence[int], constraints: Constraints = UNCONSTRAINED
) -> PlanReport:
    """Plans every size and compares moving tokens with moving weights.

    Args:
        scenario: model, machine, tokens and routing.
        nodes: the sizes, in numbers of nodes.
        constraints: what the user has decided.

    Raises:
        ValueError: none of them has a layout; the message is that of the largest.
    """
    plans, impossible = [], {}
    for count in nodes:
        try:
            plans.append(rank_plans(scenario, count, constraints))
        except ValueError as error:
            impossible[count] = str(error)
    if not plans:
        raise ValueError(impossible[max(impossible)])
    found = size_ranges(plans, scenario.hardware.ranks_per_node) if constraints.ep is None else []
    never = found and not any(size_range.ep_pays for size_range in found)
    growth = experts_at_break_even(scenario, plans[-1].nodes) if never else None
    return PlanReport(scenario, tuple(plans), impossible, _comparison(plans), tuple(found), growth)


def _comparison(plans: Sequence[RankedPlans]) -> Comparison | None:
    """Compares over the ranks of the best plan with EP, at the largest size that has one."""
    best = _largest_with_ep(plans)
    if best is None:
        return None
    return compare(best.scenario, ep=best.candidate.ep, dispatcher=best.candidate.dispatcher)


def host_lines(report: PlanReport) -> list[str]:
    """Warns where the best layout of the largest size waits for the host."""
    best = report.sizes[-1].fitting[0]
    waiting = best.prediction.time.host
    if waiting == 0:
        return []
    launching = host_s(best.scenario, best.candidate)
    return [
        f"the host: to launch a step's operations one by one takes {_ms(launching)}, "
        f"{_ms(waiting)} more than what they do, and the times and MFU above are with that; compile "
        "the model, or give a rank more tokens"
    ]


def _largest_with_ep(plans: Sequence[RankedPlans]) -> Plan | None:
    found = (ranked.best(with_ep=True) for ranked in reversed(plans))
    return next((best for best in found if best is not None), None)


# The table ----------------------------------------------------------------------------------------


# What a column shows may be folded to more lines where the terminal is narrow, and is never cut.
_COLUMNS = {
    "GPUs": "right",
    "layout": "right",
    "ep": "right",
    "shard": "left",
    "dispatcher": "left",
    "recompute": "left",
    "GB": "right",
    "ms": "right",
    "c+x+w %": "right",
    "tok/s": "right",
    "MFU": "right",
}


def render_plans(report: PlanReport, *, top: int) -> Group:
    """Renders the table of plans and below it what they mean; it fits 80 columns.

    Args:
        report: the plans of every size.
        top: how many of every size are shown, and the best one with or without expert parallelism
            if it is not among them.
    """
    table = _table(_COLUMNS)
    shown: list[Plan] = []
    for ranked in report.sizes:
        for row, plan in enumerate(_shown(ranked, top)):
            style = "bold" if row == 0 else "" if plan.prediction.fits else "dim"
            table.add_row(*map(Text, _cells(plan)), style=style)
            shown.append(plan)
    lines = [Text(line, style=style) for line, style in _explanations(report, shown)]
    return Group(table, Text(""), *lines)


def _table(columns: Mapping[str, str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for heading, justify in columns.items():
        table.add_column(heading, justify=cast(Any, justify), overflow="fold")
    return table


def _shown(ranked: RankedPlans, top: int) -> list[Plan]:
    """Returns the best plans, and the best with or without EP if it is not among them."""
    best = list(ranked.fitting[:top])
    for with_ep in (True, False):
        other = ranked.best(with_ep=with_ep)
        if other is not None and other not in best:
            best.append(other)
    return best


def _cells(entry: Plan) -> tuple[str, ...]:
    candidate, found = entry.candidate, entry.prediction
    world = candidate.world_size
    return (
        f"{world}" if not entry.unused_ranks else f"{world}/{world + entry.unused_ranks}",
        f"{candidate.dp_replicate}×{candidate.dp_shard}",
        f"{candidate.ep}{'~' if entry.changes else ''}",
        candidate.sharding,
        candidate.dispatcher,
        candidate.recompute,
        f"{found.memory.total / 1e9:.1f}",
        f"{1e3 * found.time.total:.1f}",
        _shares(found),
        _large(found.tokens_per_s),
        f"{100 * found.mfu:.1f}",
    )


def _shares(found: Prediction) -> str:
    time = found.time
    parts = (time.compute, time.exchange, time.gather + time.gradients)
    return "+".join(f"{100 * part / time.total:.0f}" for part in parts)


def _large(number: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= factor:
            return f"{number / factor:.4g}{unit}"
    return f"{number:.0f}"


# The words ----------------------------------------------------------------------------------------


def _explanations(report: PlanReport, shown: Sequence[Plan]) -> list[tuple[str, str]]:
    lines = [(line, "") for line in (*tokens_or_weights_lines(report), *skew_lines(report))]
    lines += [
        (f"{count} {'node' if count == 1 else 'nodes'}: {why}", "yellow")
        for count, why in report.impossible.items()
    ]
    lines += [(line, "yellow") for line in host_lines(report)]
    return [*lines, ("", ""), *((line, "dim") for line in _legend(report, shown))]


def tokens_or_weights_lines(report: PlanReport) -> list[str]:
    """Tells whether to move tokens or weights, and from which size expert parallelism pays."""
    if report.comparison is None:
        if not report.scenario.workload.uses:
            return ["tokens or weights: the model has no experts; only weights can move"]
        return ["tokens or weights: no layout spreads the experts over several ranks"]
    found, repeats = report.comparison, report.scenario.workload.repeats
    anew = ""
    if repeats > 1:
        per_use = _bytes(found.weights_bytes_per_use)
        anew = f"; gathered anew for each of {repeats} repeats: {per_use}"
    return [
        f"tokens or weights: among {found.ep} ranks, moving tokens sends "
        f"{_bytes(found.tokens_bytes)} per rank and step ({_ms(found.tokens_s)}), moving the "
        f"experts' weights {_bytes(found.weights_bytes)} "
        f"({_ms(found.weights_s)}{anew})",
        f"below {_large(found.break_even_tokens)} tokens per rank and step tokens are less to "
        "move, above it weights; "
        f"planned: {report.scenario.tokens:,}",
        f"expert parallelism {_where_it_pays(report)}",
    ]


def _where_it_pays(report: PlanReport) -> str:
    if not report.size_ranges:
        return (
            "cannot be compared: only layouts without it, or only ones with it, were planned or fit"
        )
    paying = [size_range for size_range in report.size_ranges if size_range.ep_pays]
    if not paying:
        first, last = report.size_ranges[0].first_ranks, report.size_ranges[-1].last_ranks
        sizes = _span(SizeRange(first, last, ep_pays=False))
        grown = ""
        if report.growth:
            grown = f"; at {last:,} it would with {report.growth} times as many experts"
        return f"pays at none of the sizes planned ({sizes} GPUs){grown}"
    if paying[-1] is report.size_ranges[-1] and len(paying) == 1:
        return f"pays from {paying[0].first_ranks:,} GPUs on, as far as planned"
    return f"pays at {', '.join(f'{_span(size_range)} GPUs' for size_range in paying)}"


def _span(sizes: SizeRange) -> str:
    first, last = sizes.first_ranks, sizes.last_ranks
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def skew_lines(report: PlanReport) -> list[str]:
    """Tells how hot the hottest rank of the best plan with EP is, and what it costs."""
    best = _largest_with_ep(report.sizes)
    if best is None:
        return []
    named = []
    for kind, at in hottest_factors(best).items():
        named.append(f"{kind} {' / '.join(f'{factor:.2f}' for factor in at.values())}")
    candidate, source = best.candidate, report.scenario.skew.source
    times = " / ".join(_ms(seconds) for seconds in step_quantiles(best).values())
    return [
        f"hottest of {candidate.ep} ranks over their mean, {' / '.join(QUANTILES)}: "
        f"{'; '.join(named)} ({source})",
        f"a step of the best layout with ep {candidate.ep} on {candidate.world_size:,} GPUs: "
        f"{times}",
    ]


def hottest_factors(plan: Plan) -> dict[str, dict[str, float]]:
    """Returns the hottest rank's load over the mean, by bank and quantile."""
    scenario, ep = plan.scenario, plan.candidate.ep
    return {
        bank.kind: {name: scenario.skew.factor(bank, ep).at(name) for name in QUANTILES}
        for bank, _ in scenario.workload.uses
    }


def step_quantiles(plan: Plan) -> dict[str, float]:
    """Returns the seconds of a step at the quantiles of the hottest rank's factor."""
    return {
        name: predict(plan.scenario, plan.candidate, quantile=name).time.total for name in QUANTILES
    }


def _legend(report: PlanReport, shown: Sequence[Plan]) -> list[str]:
    lines = [
        "layout: dp_replicate×dp_shard; shard: fsdp shards weights over dp_shard, none keeps dense "
        "ones whole",
        "GB: of the fullest rank; c+x+w %: of the step for computation, exchanges of rows, gathers "
        "and sums of weights",
        f"{_work(report.scenario)} per rank and step, "
        f"{report.scenario.workload.precision}; MFU in %, without recomputation",
    ]
    if any(entry.unused_ranks for entry in shown):
        lines.append("GPUs a/b: b − a ranks stay unused, because the rest divides better")
    changes = {change for entry in shown for change in entry.changes}
    if changes:
        lines.append(
            "~: ep must divide every bank of experts, so this is planned with more of them: "
            f"{_rounded_up(report.scenario, changes)}"
        )
    lines.append(computation_line(report.scenario))
    lines.append(
        "--sources says where every figure comes from; speeds are predictions, not measurements"
    )
    return lines


def _work(scenario: Scenario) -> str:
    if scenario.micro_batches == 1:
        return f"{scenario.tokens:,} tokens"
    return f"{scenario.micro_batches} micro-batches of {scenario.tokens:,} tokens"


def _rounded_up(scenario: Scenario, changes: Set[tuple[str, int]]) -> str:
    found = []
    for bank, _ in scenario.workload.uses:
        counts = sorted(count for kind, count in changes if kind == bank.kind)
        if counts:
            of_head = "" if bank.kind == "feed_forward" else " (per head)"
            more = ", ".join(map(str, counts))
            found.append(f"{bank.kind}{of_head} {bank.num_experts} → {more}")
    return "; ".join(sorted(found))


def _bytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def render_detail(plan: Plan) -> Group:
    """Renders where a plan's memory and time go, and every kind of collective of a step."""
    candidate, found = plan.candidate, plan.prediction
    memory = ", ".join(
        f"{name} {_bytes(size)}" for name, size in asdict(found.memory).items() if size
    )
    time = ", ".join(
        f"{name} {_ms(seconds)}" for name, seconds in asdict(found.time).items() if seconds
    )
    table = _table(
        {
            "collective": "left",
            "operation": "left",
            "ranks": "right",
            "links": "left",
            "calls": "right",
            "each": "right",
            "each takes": "right",
            "all": "right",
        }
    )
    for call in found.collectives:
        links = "slow" if call.crosses_nodes else "fast"
        table.add_row(
            call.name,
            call.op,
            str(call.group_size),
            links,
            f"{call.calls:g}",
            _bytes(call.bytes_per_call),
            f"{1e6 * call.seconds_per_call:,.0f} µs",
            _ms(call.seconds),
        )
    title = (
        f"dp_replicate {candidate.dp_replicate} × dp_shard {candidate.dp_shard}, "
        f"ep {candidate.ep}, {candidate.world_size:,} GPUs"
    )
    return Group(
        Text(""), Text(title, style="bold"), Text(f"memory: {memory}"), Text(f"step: {time}"), table
    )


def render_sources(scenario: Scenario) -> Table:
    """Renders every figure of the machine and of the routing, and where it comes from."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("figure", "value", "source"):
        table.add_column(heading, no_wrap=heading != "source")
    for key, source in sorted(scenario.hardware.sources.items()):
        table.add_row(key, f"{getattr(scenario.hardware, key):.4g}", Text(source))
    origin = (
        CONCENTRATION_SOURCE if scenario.skew.concentration == CONCENTRATION else "as asked for"
    )
    table.add_row("routing skew", "", Text(f"{scenario.skew.source}: {origin}"))
    table.add_row(
        "bytes kept per token",
        f"{scenario.workload.saved_bytes:.4g}",
        Text("counted on the meta device, autograd's own"),
    )
    if scenario.table is not None:
        table.add_row(
            "collectives",
            "",
            Text(f"{scenario.table.source}, where groups of that size were measured"),
        )
    return table


# JSON ---------------------------------------------------------------------------------------------


def plans_as_json(report: PlanReport) -> dict[str, Any]:
    """Returns the whole report as plain values for JSON: bytes, seconds, tokens per second."""
    scenario, best = report.scenario, _largest_with_ep(report.sizes)
    return {
        "hardware": {
            key: getattr(scenario.hardware, key) for key in ("name", *scenario.hardware.sources)
        },
        "sources": {**scenario.hardware.sources, "routing skew": scenario.skew.source},
        "tokens_per_rank": scenario.tokens,
        "micro_batches": scenario.micro_batches,
        "precision": scenario.workload.precision,
        "plans": [_plain_plan(ranked, scenario.hardware.ranks_per_node) for ranked in report.sizes],
        "impossible": {str(count): why for count, why in report.impossible.items()},
        "tokens_or_weights": None if report.comparison is None else asdict(report.comparison),
        "hottest_rank": None
        if best is None
        else {"factors": hottest_factors(best), "step_seconds": step_quantiles(best)},
        "expert_parallelism": [asdict(size_range) for size_range in report.size_ranges],
        "experts_grow_until_it_pays": report.growth,
        "kernels": kernels_as_json(report.sizes[-1].fitting[0]),
    }


def _plain_plan(ranked: RankedPlans, ranks_per_node: int) -> dict[str, Any]:
    layouts = []
    for entry in ranked.plans:
        found = entry.prediction
        calls = [
            {**asdict(call), "bytes_per_step": call.num_bytes, "seconds_per_step": call.seconds}
            for call in found.collectives
        ]
        layouts.append(
            {
                **asdict(entry.candidate),
                "world_size": entry.candidate.world_size,
                "unused_ranks": entry.unused_ranks,
                "rounded_up": dict(entry.changes),
                "fits": found.fits,
                "memory_bytes": {**asdict(found.memory), "total": found.memory.total},
                "seconds": {**asdict(found.time), "total": found.time.total},
                "tokens_per_s": found.tokens_per_s,
                "mfu": found.mfu,
                "collectives": calls,
            }
        )
    return {"nodes": ranked.nodes, "ranks": ranked.nodes * ranks_per_node, "layouts": layouts}


# The picture --------------------------------------------------------------------------------------

_INK, _TOKENS, _WEIGHTS, _CROSSING = "#22313f", "#d1495b", "#2e6f95", "#8d6a9f"


def draw_plans(report: PlanReport, path: Path, *, title: str) -> Path:
    """Draws step time and MFU against the number of GPUs, with and without expert parallelism, and
    where one overtakes the other. Returns the path.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(12, 5.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    panels = figure.subplots(1, 2)
    _draw_lines(
        panels[0],
        report,
        "milliseconds per step",
        lambda plan: 1e3 * plan.prediction.time.total,
    )
    _draw_band(panels[0], report)
    _draw_lines(panels[1], report, "MFU in %", lambda plan: 100 * plan.prediction.mfu)
    for panel in panels:
        panel.set_ylim(bottom=0)
        _draw_crossings(panel, report)
    panels[0].legend(frameon=False, fontsize=10.5, loc="best")
    hardware, tokens = report.scenario.hardware.name, report.scenario.tokens
    figure.suptitle(
        f"{title} on {hardware}, {tokens:,} tokens per rank and step: predicted",
        x=0.01,
        ha="left",
        fontsize=14,
        fontweight="bold",
        color=_INK,
    )
    figure.savefig(path)
    return path


def _draw_lines(panel: Any, report: PlanReport, label: str, value: Any) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="#e4e8ec", linewidth=0.8)
    panel.set_axisbelow(True)
    for with_ep, color, name in (
        (False, _WEIGHTS, "without EP: weights move"),
        (True, _TOKENS, "with EP: tokens move"),
    ):
        points = [
            (ranked.nodes * report.scenario.hardware.ranks_per_node, value(best))
            for ranked in report.sizes
            if (best := ranked.best(with_ep=with_ep)) is not None
        ]
        if points:
            panel.plot(
                *zip(*points, strict=True), "o-", color=color, linewidth=2, markersize=5, label=name
            )
    ranks = [ranked.nodes * report.scenario.hardware.ranks_per_node for ranked in report.sizes]
    if len(ranks) > 1:
        panel.set_xscale("log", base=2)
    named = [
        count
        for count, after in zip(ranks, [*ranks[1:], math.inf], strict=True)
        if after > 1.4 * count
    ]
    panel.set_xticks(named, [f"{count:,}" for count in named], rotation=45 if len(named) > 6 else 0)
    panel.minorticks_off()
    panel.set_xlabel("GPUs", fontsize=11)
    panel.set_ylabel(label, fontsize=11)


def _draw_band(panel: Any, report: PlanReport) -> None:
    """Draws the band between the median and the 99th percentile of the hottest rank's factor."""
    found = [(ranked.nodes, ranked.best(with_ep=True)) for ranked in report.sizes]
    bands = [(nodes, step_quantiles(best)) for nodes, best in found if best is not None]
    if not bands:
        return
    ranks = [nodes * report.scenario.hardware.ranks_per_node for nodes, _ in bands]
    low, high = ([1e3 * band[name] for _, band in bands] for name in ("p50", "p99"))
    panel.fill_between(
        ranks,
        low,
        high,
        color=_TOKENS,
        alpha=0.18,
        linewidth=0,
        label="its routing skew, p50 to p99",
    )


def _draw_crossings(panel: Any, report: PlanReport) -> None:
    spans = report.size_ranges
    for before, after in itertools.pairwise(spans):
        at = math.sqrt(before.last_ranks * after.first_ranks)
        panel.axvline(at, color=_CROSSING, linestyle="--", linewidth=1.4)
        words = "EP pays" if after.ep_pays else "EP no longer pays"
        panel.annotate(
            f"{words}\nfrom {after.first_ranks:,} GPUs",
            (at, 0.06),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            xytext=(5, 0),
            color=_CROSSING,
            fontsize=10,
        )
    if len(spans) == 1:
        always = (
            "EP pays at all of these sizes"
            if spans[0].ep_pays
            else "no crossover: EP pays at none of these sizes"
        )
        panel.annotate(always, (0.03, 0.06), xycoords="axes fraction", color=_CROSSING, fontsize=10)
