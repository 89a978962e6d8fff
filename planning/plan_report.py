"""Renders ranked layouts as a table with explanations, and as JSON for scripts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .cost_model import host_s, predict
from .planner import (
    UNCONSTRAINED,
    Constraints,
    LayoutPlan,
    RankedPlans,
    ep_pays,
    rank_plans,
)
from .prediction import Scenario
from .routing_skew import QUANTILES

_COLUMNS = {  # folded in a narrow terminal, never cut
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
_LEGEND = (
    "layout: dp_replicate×dp_shard; shard: fsdp shards weights over dp_shard, none keeps dense ones whole",
    "GB: on the fullest rank; c+x+w %: share of the step for computation, row exchanges, and weights",
    "MFU in %, without recomputation",
    "all figures are predictions; --json lists their sources",
)


@dataclass(frozen=True)
class PlanReport:
    """Holds the plans of every feasible size and what follows from them."""

    scenario: Scenario
    sizes: tuple[RankedPlans, ...]
    impossible: dict[int, str]  # nodes → why not
    ep_pays: dict[int, bool]  # by GPUs, where plans with and without it can be compared

    @property
    def best_with_ep(self) -> LayoutPlan | None:
        """Returns the best plan with expert parallelism at the largest size that has one."""
        found = (ranked.best(with_ep=True) for ranked in reversed(self.sizes))
        return next((best for best in found if best is not None), None)


def make_report(
    scenario: Scenario, nodes: Sequence[int], constraints: Constraints = UNCONSTRAINED
) -> PlanReport:
    """Plans every number of nodes.

    Raises:
        ValueError: no size has a layout; the message is the largest size's.
    """
    sizes, impossible = [], {}
    for count in nodes:
        try:
            sizes.append(rank_plans(scenario, count, constraints))
        except ValueError as error:
            impossible[count] = str(error)
    if not sizes:
        raise ValueError(impossible[max(impossible)])
    pays = {
        ranked.nodes * scenario.hardware.ranks_per_node: found
        for ranked in (sizes if constraints.ep is None else ())
        if (found := ep_pays(ranked)) is not None
    }
    return PlanReport(scenario, tuple(sizes), impossible, pays)


# The table ----------------------------------------------------------------------------------------


def render_plans(report: PlanReport, *, top: int) -> Group:
    """Renders the `top` plans of every size and the best with and without EP, in 80 columns."""
    table = _table(_COLUMNS)
    shown: list[LayoutPlan] = []
    for ranked in report.sizes:
        for row, plan in enumerate(_shown(ranked, top)):
            style = "bold" if row == 0 else "" if plan.prediction.fits else "dim"
            table.add_row(*map(Text, _cells(plan)), style=style)
            shown.append(plan)
    lines = [*_experts(report), *_skew(report)]
    warnings = [*_impossible(report), *_host_waits(report)]
    return Group(
        table,
        Text(""),
        *map(Text, lines),
        *(Text(line, style="yellow") for line in warnings),
        Text(""),
        *(Text(line, style="dim") for line in (*_LEGEND, *_notes(report.scenario, shown))),
    )


def _table(columns: Mapping[str, str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for heading, justify in columns.items():
        table.add_column(heading, justify=cast(Any, justify), overflow="fold")
    return table


def _shown(ranked: RankedPlans, top: int) -> list[LayoutPlan]:
    best = list(ranked.fitting[:top])
    for with_ep in (True, False):
        other = ranked.best(with_ep=with_ep)
        if other is not None and other not in best:
            best.append(other)
    return best


def _cells(plan: LayoutPlan) -> Iterator[str]:
    candidate, found, time = plan.candidate, plan.prediction, plan.prediction.time
    yield f"{candidate.world_size}"
    yield f"{candidate.dp_replicate}×{candidate.dp_shard}"
    yield f"{candidate.ep}{'~' if plan.changes else ''}"
    yield from (candidate.sharding, candidate.dispatcher, candidate.recompute)
    yield f"{found.memory.total / 1e9:.1f}"
    yield _ms(time.total)
    parts = (time.compute, time.exchange, time.gather + time.gradients)
    yield "+".join(f"{100 * part / time.total:.0f}" for part in parts)
    yield _large(found.tokens_per_s)
    yield f"{100 * found.mfu:.1f}"


def _large(number: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= factor:
            return f"{number / factor:.4g}{unit}"
    return f"{number:.0f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


# Below the table ----------------------------------------------------------------------------------


def _experts(report: PlanReport) -> Iterator[str]:
    """Yields from which size expert parallelism pays, or why it is no question."""
    if report.best_with_ep is None:
        has_experts = bool(report.scenario.workload.uses)
        yield (
            "no layout spreads the experts over several ranks"
            if has_experts
            else "the model has no experts, so only weights can move"
        )
        return
    yield f"expert parallelism {_where_ep_pays(report.ep_pays)}"


def _where_ep_pays(pays: Mapping[int, bool]) -> str:
    if not pays:
        return "cannot be compared: every plan uses it, or none does"
    paying = [f"{ranks:,}" for ranks, is_faster in pays.items() if is_faster]
    return f"pays at {', '.join(paying) or 'none'} of {', '.join(f'{n:,}' for n in pays)} GPUs"


def _skew(report: PlanReport) -> Iterator[str]:
    """Yields the load of the hottest rank in the best plan with EP, and what it costs."""
    best = report.best_with_ep
    if best is None:
        return
    factors = "; ".join(
        f"{kind} {' / '.join(f'{factor:.2f}' for factor in at.values())}"
        for kind, at in hottest_factors(best).items()
    )
    times = " / ".join(_ms(seconds) for seconds in step_quantiles(best).values())
    candidate = best.candidate
    yield (
        f"hottest of {candidate.ep} ranks over their mean, {' / '.join(QUANTILES)}: {factors} "
        f"({report.scenario.skew.source})"
    )
    yield (
        f"a step of the best layout with ep {candidate.ep} on {candidate.world_size:,} GPUs: "
        f"{times} ms"
    )


def hottest_factors(plan: LayoutPlan) -> dict[str, dict[str, float]]:
    """Returns the hottest rank's load over the mean, by bank and quantile."""
    skew, ep = plan.scenario.skew, plan.candidate.ep
    return {bank.kind: skew.factor(bank, ep) for bank, _ in plan.scenario.workload.uses}


def step_quantiles(plan: LayoutPlan) -> dict[str, float]:
    """Returns the seconds of a step at each quantile of the hottest rank's load."""
    return {
        name: predict(plan.scenario, plan.candidate, quantile=name).time.total for name in QUANTILES
    }


def _impossible(report: PlanReport) -> Iterator[str]:
    for count, why in report.impossible.items():
        yield f"{count} {'node' if count == 1 else 'nodes'}: {why}"


def _host_waits(report: PlanReport) -> Iterator[str]:
    best = report.sizes[-1].fitting[0]
    waiting = best.prediction.time.host
    if waiting:
        launching = host_s(best.scenario, best.candidate)
        yield (
            f"host-bound: launching a step's operations takes {_ms(launching)} ms, {_ms(waiting)} ms "
            "more than the device needs; compile the model, or give each rank more tokens"
        )


def _notes(scenario: Scenario, shown: Sequence[LayoutPlan]) -> Iterator[str]:
    batches = f"{scenario.micro_batches} micro-batches of " if scenario.micro_batches > 1 else ""
    yield (f"{batches}{scenario.tokens:,} tokens per rank and step, {scenario.workload.precision}")
    changes = sorted({change for plan in shown for change in plan.changes})
    if changes:
        counts = ", ".join(f"{kind} {count}" for kind, count in changes)
        yield f"~: planned with more experts so that ep divides every bank (experts per head): {counts}"


# JSON ---------------------------------------------------------------------------------------------


def plans_as_json(report: PlanReport) -> dict[str, Any]:
    """Returns the report as plain values for JSON: bytes, seconds, tokens per second."""
    scenario, best = report.scenario, report.best_with_ep
    hardware = scenario.hardware
    sources = {**hardware.sources, "routing skew": scenario.skew.source}
    return {
        "hardware": {key: getattr(hardware, key) for key in ("name", *hardware.sources)},
        "sources": sources,
        "tokens_per_rank": scenario.tokens,
        "micro_batches": scenario.micro_batches,
        "precision": scenario.workload.precision,
        "plans": [_plain_plans(ranked, hardware.ranks_per_node) for ranked in report.sizes],
        "impossible": {str(count): why for count, why in report.impossible.items()},
        "hottest_rank": best
        and {"factors": hottest_factors(best), "step_seconds": step_quantiles(best)},
        "expert_parallelism_pays": report.ep_pays,
    }


def _plain_plans(ranked: RankedPlans, ranks_per_node: int) -> dict[str, Any]:
    layouts = [_plain_plan(plan) for plan in ranked.plans]
    return {"nodes": ranked.nodes, "ranks": ranked.nodes * ranks_per_node, "layouts": layouts}


def _plain_plan(plan: LayoutPlan) -> dict[str, Any]:
    found = plan.prediction
    return {
        **asdict(plan.candidate),
        "world_size": plan.candidate.world_size,
        "rounded_up": dict(plan.changes),
        "fits": found.fits,
        "memory_bytes": {**asdict(found.memory), "total": found.memory.total},
        "seconds": {**asdict(found.time), "total": found.time.total},
        "tokens_per_s": found.tokens_per_s,
        "mfu": found.mfu,
        "collectives": [
            {**asdict(call), "bytes_per_step": call.num_bytes, "seconds_per_step": call.seconds}
            for call in found.collectives
        ],
    }
