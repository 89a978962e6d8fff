"""`moebius plan` for people: which layout, how fast, and whether to move tokens or weights: table,
words, JSON and picture.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .cost_model import Comparison, Prediction, Setting, compare, host_s, predict
from .planner import (
    ANYTHING,
    Plan,
    Planned,
    Stretch,
    Wishes,
    experts_at_break_even,
    plan,
    stretches,
)
from .routing_skew import CONCENTRATION, CONCENTRATION_SOURCE

SKIPS = ("…", "...", "..")
QUANTILES = ("p50", "p90", "p99")


@dataclass(frozen=True)
class Report:
    """Plans of all sizes that have one, and what follows from them."""

    setting: Setting
    plans: tuple[Plan, ...]
    impossible: dict[int, str]  # nodes → why not
    comparison: Comparison | None  # None: the model has no experts, or no node could share them
    stretches: tuple[Stretch, ...]
    growth: (
        int | None
    )  # by how much the experts must grow in number until EP pays at the largest size; None: not found


def parse_nodes(words: Sequence[str]) -> list[int]:
    """Numbers of nodes; "…" (or "..") between two doubles the first until the second is reached: 1
    … 6 is 1 2 4 6.

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


def make_report(setting: Setting, nodes: Sequence[int], wishes: Wishes = ANYTHING) -> Report:
    """Plans every size.

    Raises:
        ValueError: none of them has a layout; the message is that of the largest.
    """
    plans, impossible = [], {}
    for count in nodes:
        try:
            plans.append(plan(setting, count, wishes))
        except ValueError as error:
            impossible[count] = str(error)
    if not plans:
        raise ValueError(impossible[max(impossible)])
    found = stretches(plans, setting.hardware.ranks_per_node) if wishes.ep is None else []
    never = found and not any(stretch.ep_pays for stretch in found)
    growth = experts_at_break_even(setting, plans[-1].nodes) if never else None
    return Report(setting, tuple(plans), impossible, _comparison(plans), tuple(found), growth)


def _comparison(plans: Sequence[Plan]) -> Comparison | None:
    """Over the ranks of the best layout with experts spread, at the largest size that has one."""
    best = _largest_spread(plans)
    return (
        None
        if best is None
        else compare(best.setting, ep=best.choice.ep, dispatcher=best.choice.dispatcher)
    )


def host_words(report: Report) -> list[str]:
    """A warning where launching the operations one by one takes longer than what they do."""
    best = report.plans[-1].fitting[0]
    launching = host_s(best.setting, best.choice.recompute)
    if launching <= best.prediction.time.total:
        return []
    return [
        f"the host: to launch {best.setting.workload.launches:,} operations per pass one by one takes {_ms(launching)} a step, "
        f"more than the {_ms(best.prediction.time.total)} predicted; compile the model, or give a rank more tokens"
    ]


def _largest_spread(plans: Sequence[Plan]) -> Planned | None:
    found = (planned.best(with_ep=True) for planned in reversed(plans))
    return next((best for best in found if best is not None), None)


# The table ----------------------------------------------------------------------------------------------------------


def show(report: Report, *, top: int) -> Group:
    """One line per layout, the best `top` of every size and the best of the other kind; below it
    what they mean.
    """
    headings = (
        "GPUs",
        "layout",
        "ep",
        "shard",
        "dispatcher",
        "recompute",
        "GB",
        "ms",
        "c+x+w %",
        "tokens/s",
        "MFU",
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in headings:
        left = heading in ("shard", "dispatcher", "recompute")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for planned in report.plans:
        for row, entry in enumerate(_shown(planned, top)):
            style = "bold" if row == 0 else "" if entry.prediction.fits else "dim"
            table.add_row(*map(Text, _cells(entry)), style=style)
    shown = [entry for planned in report.plans for entry in _shown(planned, top)]
    words = [Text(line, style=style) for line, style in _words(report, shown)]
    return Group(table, Text(""), *words)


def _shown(planned: Plan, top: int) -> list[Planned]:
    """The best, and of the kind that is not among them the best."""
    best = list(planned.fitting[:top])
    for with_ep in (True, False):
        other = planned.best(with_ep=with_ep)
        if other is not None and other not in best:
            best.append(other)
    return best


def _cells(entry: Planned) -> tuple[str, ...]:
    choice, found = entry.choice, entry.prediction
    world = choice.world_size
    return (
        f"{world:,}" if not entry.unused_ranks else f"{world:,}/{world + entry.unused_ranks:,}",
        f"{choice.dp_replicate}×{choice.dp_shard}",
        f"{choice.ep}{'~' if entry.changes else ''}",
        choice.sharding,
        choice.dispatcher,
        choice.recompute,
        f"{found.memory.total / 1e9:.1f}",
        f"{1e3 * found.time.total:.1f}",
        _shares(found),
        _large(found.tokens_per_s),
        f"{100 * found.mfu:.1f}%",
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


# The words ----------------------------------------------------------------------------------------------------------


def _words(report: Report, shown: Sequence[Planned]) -> list[tuple[str, str]]:
    lines = [(line, "") for line in (*verdict(report), *skew_words(report))]
    lines += [
        (f"{count} {'node' if count == 1 else 'nodes'}: {why}", "yellow")
        for count, why in report.impossible.items()
    ]
    lines += [(line, "yellow") for line in host_words(report)]
    return [*lines, ("", ""), *((line, "dim") for line in _legend(report, shown))]


def verdict(report: Report) -> list[str]:
    """Moving tokens or moving weights, and from which size expert parallelism pays."""
    if report.comparison is None:
        if not report.setting.workload.uses:
            return ["tokens or weights: the model has no experts; only weights can move"]
        return ["tokens or weights: no layout spreads the experts over several ranks"]
    found, repeats = report.comparison, report.setting.workload.repeats
    once = (
        f"; gathered anew for each of {repeats} repeats: {_bytes(found.weights_bytes_per_use)}"
        if repeats > 1
        else ""
    )
    return [
        f"tokens or weights: among {found.ep} ranks, moving tokens sends {_bytes(found.tokens_bytes)} per rank and step "
        f"({_ms(found.tokens_s)}), moving the experts' weights {_bytes(found.weights_bytes)} "
        f"({_ms(found.weights_s)}{once})",
        f"below {_large(found.break_even_tokens)} tokens per rank and step tokens are less to "
        "move, above it weights; "
        f"planned: {report.setting.tokens:,}",
        f"expert parallelism {_where_it_pays(report)}",
    ]


def _where_it_pays(report: Report) -> str:
    if not report.stretches:
        return (
            "cannot be compared: only layouts without it, or only ones with it, were planned or fit"
        )
    paying = [stretch for stretch in report.stretches if stretch.ep_pays]
    if not paying:
        first, last = report.stretches[0].first_ranks, report.stretches[-1].last_ranks
        sizes = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        grown = (
            f"; at {last:,} it would with {report.growth} times as many experts"
            if report.growth
            else ""
        )
        return f"pays at none of the sizes planned ({sizes} GPUs){grown}"
    spans = [
        f"{stretch.first_ranks:,} GPUs"
        if stretch.first_ranks == stretch.last_ranks
        else f"{stretch.first_ranks:,} to {stretch.last_ranks:,} GPUs"
        for stretch in paying
    ]
    if paying[-1] is report.stretches[-1] and len(paying) == 1:
        return f"pays from {paying[0].first_ranks:,} GPUs on, as far as planned"
    return f"pays at {', '.join(spans)}"


def skew_words(report: Report) -> list[str]:
    """The hottest rank of the best layout with experts spread, and what it costs."""
    best = _largest_spread(report.plans)
    if best is None:
        return []
    factors = hottest_factors(best).items()
    named = "; ".join(
        f"{kind} {' / '.join(f'{factor:.2f}' for factor in at.values())}" for kind, at in factors
    )
    times = " / ".join(_ms(seconds) for seconds in step_quantiles(best).values())
    return [
        f"hottest of {best.choice.ep} ranks over their mean, {' / '.join(QUANTILES)}: {named} ({report.setting.skew.source})",
        f"a step of the best layout with ep {best.choice.ep} on {best.choice.world_size:,} GPUs: "
        f"{times}",
    ]


def hottest_factors(planned: Planned) -> dict[str, dict[str, float]]:
    """Of every bank, at every quantile."""
    setting, ep = planned.setting, planned.choice.ep
    return {
        bank.kind: {name: setting.skew.factor(bank, ep).at(name) for name in QUANTILES}
        for bank, _ in setting.workload.uses
    }


def step_quantiles(planned: Planned) -> dict[str, float]:
    """Seconds of a step at the quantiles of the hottest rank's factor."""
    return {
        name: predict(planned.setting, planned.choice, quantile=name).time.total
        for name in QUANTILES
    }


def _legend(report: Report, shown: Sequence[Planned]) -> list[str]:
    lines = [
        "layout: dp_replicate×dp_shard; shard: fsdp shards weights over dp_shard, none keeps dense ones whole",
        "GB: of the fullest rank; c+x+w %: of the step for computation, exchanges of rows, gathers "
        "and sums of weights",
        f"{report.setting.tokens:,} tokens per rank and step, {report.setting.workload.precision}; "
        "MFU without recomputation",
    ]
    if any(entry.unused_ranks for entry in shown):
        lines.append("GPUs a/b: b − a ranks stay unused, because the rest divides better")
    changes = {change for entry in shown for change in entry.changes}
    if changes:
        banks = {bank.kind: bank.num_experts for bank, _ in report.setting.workload.uses}
        kinds = sorted({kind for kind, _ in changes})
        asked = "; ".join(
            f"{kind}{' (per head)' if kind != 'feed_forward' else ''} {banks[kind]} → "
            f"{', '.join(str(count) for other, count in sorted(changes) if other == kind)}"
            for kind in kinds
        )
        lines.append(
            "~: ep must divide every bank of experts, so this is planned with more of them: "
            f"{asked}"
        )
    lines.append(
        "--sources says where every figure comes from; speeds are predictions, not measurements"
    )
    return lines


def _bytes(number: float) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def show_detail(planned: Planned) -> Group:
    """Where a layout's memory and time go, and every kind of collective of a step."""
    choice, found = planned.choice, planned.prediction
    memory = ", ".join(
        f"{name} {_bytes(size)}" for name, size in asdict(found.memory).items() if size
    )
    time = ", ".join(
        f"{name} {_ms(seconds)}" for name, seconds in asdict(found.time).items() if seconds
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in (
        "collective",
        "operation",
        "ranks",
        "links",
        "calls",
        "each",
        "each takes",
        "all",
    ):
        left = heading in ("collective", "operation", "links")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for call in found.collectives:
        links = "between nodes" if call.crosses_nodes else "inside"
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
    title = f"dp_replicate {choice.dp_replicate} × dp_shard {choice.dp_shard}, ep {choice.ep}, {choice.world_size:,} GPUs"
    return Group(
        Text(""), Text(title, style="bold"), Text(f"memory: {memory}"), Text(f"step: {time}"), table
    )


def show_sources(setting: Setting) -> Table:
    """Every figure of the machine and of the routing, and where it comes from."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("figure", "value", "source"):
        table.add_column(heading, no_wrap=heading != "source")
    for key, source in sorted(setting.hardware.sources.items()):
        table.add_row(key, f"{getattr(setting.hardware, key):.4g}", Text(source))
    origin = CONCENTRATION_SOURCE if setting.skew.concentration == CONCENTRATION else "as asked for"
    table.add_row("routing skew", "", Text(f"{setting.skew.source}: {origin}"))
    table.add_row(
        "bytes kept per token",
        f"{setting.workload.saved_bytes:.4g}",
        Text("counted on the meta device, autograd's own"),
    )
    if setting.table is not None:
        table.add_row(
            "collectives",
            "",
            Text(f"{setting.table.source}, where groups of that size were measured"),
        )
    return table


# JSON ---------------------------------------------------------------------------------------------------------------


def plain(report: Report) -> dict[str, Any]:
    """Everything as JSON knows it."""
    setting, best = report.setting, _largest_spread(report.plans)
    return {
        "hardware": {
            key: getattr(setting.hardware, key) for key in ("name", *setting.hardware.sources)
        },
        "sources": {**setting.hardware.sources, "routing skew": setting.skew.source},
        "tokens_per_rank": setting.tokens,
        "precision": setting.workload.precision,
        "plans": [
            _plain_plan(planned, setting.hardware.ranks_per_node) for planned in report.plans
        ],
        "impossible": {str(count): why for count, why in report.impossible.items()},
        "tokens_or_weights": None if report.comparison is None else asdict(report.comparison),
        "hottest_rank": None
        if best is None
        else {"factors": hottest_factors(best), "step_seconds": step_quantiles(best)},
        "expert_parallelism": [asdict(stretch) for stretch in report.stretches],
        "experts_grow_until_it_pays": report.growth,
    }


def _plain_plan(planned: Plan, ranks_per_node: int) -> dict[str, Any]:
    layouts = []
    for entry in planned.ranked:
        found = entry.prediction
        calls = [
            {**asdict(call), "bytes_per_step": call.num_bytes, "seconds_per_step": call.seconds}
            for call in found.collectives
        ]
        layouts.append(
            {
                **asdict(entry.choice),
                "world_size": entry.choice.world_size,
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
    return {"nodes": planned.nodes, "ranks": planned.nodes * ranks_per_node, "layouts": layouts}


# The picture --------------------------------------------------------------------------------------------------------

_INK, _TOKENS, _WEIGHTS, _CROSSING = "#22313f", "#d1495b", "#2e6f95", "#8d6a9f"


def draw(report: Report, path: Path, *, title: str) -> Path:
    """Step time and MFU against the number of GPUs, with and without expert parallelism, and where
    one overtakes the other.
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
        lambda planned: 1e3 * planned.prediction.time.total,
    )
    _draw_band(panels[0], report)
    _draw_lines(panels[1], report, "MFU in %", lambda planned: 100 * planned.prediction.mfu)
    for panel in panels:
        panel.set_ylim(bottom=0)
        _draw_crossings(panel, report)
    panels[0].legend(frameon=False, fontsize=10.5, loc="best")
    hardware, tokens = report.setting.hardware.name, report.setting.tokens
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


def _draw_lines(panel: Any, report: Report, label: str, value: Any) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(color="#e4e8ec", linewidth=0.8)
    panel.set_axisbelow(True)
    for with_ep, color, name in (
        (False, _WEIGHTS, "without EP: weights move"),
        (True, _TOKENS, "with EP: tokens move"),
    ):
        points = [
            (planned.nodes * report.setting.hardware.ranks_per_node, value(best))
            for planned in report.plans
            if (best := planned.best(with_ep=with_ep)) is not None
        ]
        if points:
            panel.plot(
                *zip(*points, strict=True), "o-", color=color, linewidth=2, markersize=5, label=name
            )
    ranks = [planned.nodes * report.setting.hardware.ranks_per_node for planned in report.plans]
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


def _draw_band(panel: Any, report: Report) -> None:
    """Between the median and the 99th percentile of the hottest rank's factor."""
    found = [(planned.nodes, planned.best(with_ep=True)) for planned in report.plans]
    bands = [(nodes, step_quantiles(best)) for nodes, best in found if best is not None]
    if not bands:
        return
    ranks = [nodes * report.setting.hardware.ranks_per_node for nodes, _ in bands]
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


def _draw_crossings(panel: Any, report: Report) -> None:
    spans = report.stretches
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
