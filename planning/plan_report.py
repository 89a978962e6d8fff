"""Reports ranked layouts as plain values for JSON, and renders them as a table."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from .planner import Constraints, rank_plans
from .prediction import Prediction, Scenario
from .routing_skew import FULL

_WORDS = ("shard", "dispatcher", "recompute")
_PLAIN = ("fits", "tokens_per_s", "mfu", "eager_host_s")
_LEGEND = (
    "layout: dp_replicate×dp_shard; shard: fsdp shards weights over dp_shard, none keeps dense ones whole",
    "GB: on the fullest rank; c+x+w %: share of the step for computation, row exchanges, and weights",
    "MFU in %, without recomputation",
    "all figures are predictions, of a host like the one measured beside an H200; no captured step "
    "has been measured; --json lists the sources",
)


def plan_report(
    scenario: Scenario, nodes: Sequence[int], constraints: Constraints
) -> dict[str, Any]:
    """Plans every number of nodes, and returns bytes, seconds and tokens per second.

    Raises:
        ValueError: no size has a layout; the message is the largest size's.
    """
    hardware, skew, work = scenario.hardware, scenario.skew, scenario.workload
    plans, impossible, hottest = [], {}, {}
    for count in nodes:
        try:
            ranked = rank_plans(scenario, count, constraints)
        except ValueError as error:
            impossible[str(count)] = str(error)
            continue
        ranks = count * hardware.ranks_per_node
        plans.append({"nodes": count, "ranks": ranks, "layouts": list(map(_plain_plan, ranked))})
        for ep in [plan.candidate.ep for plan in ranked if plan.fits and plan.candidate.ep > 1][:1]:
            hottest = {
                bank.kind: {"median": skew.factor(bank, ep), "p99": skew.factor(bank, ep, FULL)}
                for bank, _ in work.uses
            }
    if not plans:
        raise ValueError(impossible[str(max(nodes))])
    return {
        "hardware": {key: getattr(hardware, key) for key in ("name", *hardware.sources)},
        "sources": {**hardware.sources, "routing skew": skew.source},
        "tokens_per_rank": scenario.tokens,
        "micro_batches": scenario.micro_batches,
        "precision": work.precision,
        "muon": work.muon and asdict(work.muon) | {"expert_weights": work.expert_parameters()},
        "plans": plans,
        "impossible": impossible,
        "hottest_rank": hottest,  # over the mean, in the largest size's best plan with ep > 1
    }


def _plain_plan(plan: Prediction) -> dict[str, Any]:
    return {
        **asdict(plan.candidate),
        "world_size": plan.candidate.world_size,
        **{key: getattr(plan, key) for key in _PLAIN},
        "memory_bytes": {**asdict(plan.memory), "total": plan.memory.total},
        "seconds": {**asdict(plan.time), "total": plan.time.total},
        "collectives": [
            {**asdict(call), "bytes_per_step": call.num_bytes, "seconds_per_step": call.seconds}
            for call in plan.collectives
        ],
    }


# The table ----------------------------------------------------------------------------------------


def render_plans(report: dict[str, Any], *, top: int) -> Group:
    """Renders the `top` plans of every size and the best with and without EP, in 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for size in report["plans"]:
        for number, row in enumerate(map(_row, _shown(size["layouts"], top))):
            for heading in row if not table.columns else ():  # folded where narrow, never cut
                justify = "left" if heading in _WORDS else "right"
                table.add_column(heading, justify=justify, overflow="fold")
            table.add_row(*row.values(), style="" if number else "bold")
    shown = [(size, one) for size in report["plans"] for one in _shown(size["layouts"], top)]
    notes = (*_LEGEND, f"{_tokens(report)} tokens per rank and step, {report['precision']}")
    return Group(
        table,
        Text(""),
        Text("the rows as keys", style="dim"),
        *(Text(_keys(*row)) for row in shown),
        Text(""),
        *map(Text, (*_skew(report), *_muon(report))),
        *(Text(line, style="yellow") for line in (*_impossible(report), _binds(report))),
        Text(""),
        *(Text(line, style="dim") for line in notes),
    )


def _shown(layouts: list[dict[str, Any]], top: int) -> list[dict[str, Any]]:
    fitting = [layout for layout in layouts if layout["fits"]]
    spread = [layout for layout in fitting if layout["ep"] > 1]
    alone = [layout for layout in fitting if layout["ep"] == 1]
    best = fitting[:top]
    return best + [layout for layout in spread[:1] + alone[:1] if layout not in best]


def _row(layout: dict[str, Any]) -> dict[str, str]:
    time = layout["seconds"]
    parts = (time["compute"], time["exchange"], time["gather"] + time["gradients"])
    return {
        "GPUs": f"{layout['world_size']}",
        "layout": f"{layout['dp_replicate']}×{layout['dp_shard']}",
        "ep": f"{layout['ep']}",
        "shard": layout["sharding"],
        "dispatcher": layout["dispatcher"],
        "recompute": layout["recompute"],
        "GB": f"{layout['memory_bytes']['total'] / 1e9:.1f}",
        "ms": f"{1e3 * time['total']:.1f}",
        "c+x+w %": "+".join(f"{100 * part / time['total']:.0f}" for part in parts),
        "tok/s": _large(layout["tokens_per_s"]),
        "MFU": f"{100 * layout['mfu']:.1f}",
    }


def _keys(size: dict[str, Any], layout: dict[str, Any]) -> str:
    """Returns the overrides that train in a layout."""
    per_node = size["ranks"] // size["nodes"]
    keys = [f"job.num_nodes={size['nodes']}", f"job.ranks_per_node={per_node}"]
    mesh = ("dp_replicate", "dp_shard", "ep", "sharding", "dispatcher")
    keys += [f"mesh.{key}={layout[key]}" for key in mesh]
    return " ".join([*keys, f"train.recompute={layout['recompute']}"])


def _large(number: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= factor:
            return f"{number / factor:.4g}{unit}"
    return f"{number:.0f}"


def _tokens(report: dict[str, Any]) -> str:
    count, tokens = report["micro_batches"], f"{report['tokens_per_rank']:,}"
    return f"{count} micro-batches of {tokens}" if count > 1 else tokens


def _skew(report: dict[str, Any]) -> Iterator[str]:
    factors = [
        f"{kind} {factor['median']:.2f} / {factor['p99']:.2f}"
        for kind, factor in report["hottest_rank"].items()
    ]
    if factors:
        source = report["sources"]["routing skew"]
        yield f"hottest rank over the mean, median / p99: {'; '.join(factors)} ({source})"


def _muon(report: dict[str, Any]) -> Iterator[str]:
    if found := report["muon"]:
        flops = found["flops"] + found["expert_flops"]
        weights = found["weights"] + found["expert_weights"]
        yield (
            f"Muon: one moment for {weights / 1e6:,.0f}M weights; their updates take "
            f"{flops / 1e12:.3g} TFLOP and {4 * weights / 1e9:.3g} GB per step (of matrices that FSDP "
            "cuts twice that, of its whole experts none), which more nodes do not lessen"
        )


def _impossible(report: dict[str, Any]) -> Iterator[str]:
    for count, why in report["impossible"].items():
        yield f"{count} {'node' if count == '1' else 'nodes'}: {why}"


def _binds(report: dict[str, Any]) -> str:
    """Returns whether the host or the GPU binds the best layout of the largest size."""
    best = report["plans"][-1]["layouts"][0]
    time, host_s = best["seconds"], best["eager_host_s"]
    host = f"launching a step's operations takes {1e3 * host_s:.0f} ms"
    if time["host"]:
        gpu = 1e3 * (time["total"] - time["host"] - time["straggler"])
        return (
            f"bound by the host: {host}, the GPU's work {gpu:.0f} ms; give each rank more tokens, or "
            "let plain replicas be captured (train.cuda_graph)"
        )
    captured = " if a run's start line says that its passes are captured" * (host_s > time["total"])
    return f"bound by the GPU{captured}: {host} where they are not captured"
