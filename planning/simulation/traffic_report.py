"""Reports simulations of the same calls as plain values for JSON, and renders them as tables.

Traffic is of forward passes, both ways, without what stays on its rank; the backward pass sends the
same again. Loads do not depend on the dispatcher and are reported once.
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...distributed.dispatch.base import nodes_of
from .calls import CallSource, Simulation
from .dispatch import SimulatedCall

_LEGEND = (
    "rows, MB inside nodes and between them: forward pass, both ways; backward sends the same again",
    "hottest rank, expert: load over the mean, average and maximum",
)


def traffic_report(source: CallSource, simulations: Sequence[Simulation]) -> dict[str, Any]:
    """Returns the whole report. Matrices are [from rank][to rank]; the diagonal holds what stays."""
    first = simulations[0]
    dispatchers = [_plain_simulation(each) for each in simulations]
    return {
        "title": source.title,
        "tokens": source.tokens,
        "ep": first.cluster.ep,
        "ranks_per_node": first.cluster.ranks_per_node,
        "violations": [
            f"{each['dispatcher']}: {violation}"
            for each in dispatchers
            for violation in each["violations"]
        ],
        "experts": [
            _load([call for call in first.calls if call.id.kind == kind])
            for kind in dict.fromkeys(call.id.kind for call in first.calls)
        ],
        "dispatchers": dispatchers,
    }


def _load(calls: Sequence[SimulatedCall]) -> dict[str, Any]:
    """Describes the load of one kind of experts: the hottest over the mean, by call."""
    ranks = [hottest(call.load_P) for call in calls]
    experts = [hottest(call.load_E) for call in calls]
    return {
        "kind": calls[0].id.kind,
        "calls": len(calls),
        "routes": sum(int(call.load_E.sum()) for call in calls),
        "hottest_rank": {"mean": fmean(ranks), "most": max(ranks)},
        "hottest_expert": {"mean": fmean(experts), "most": max(experts)},
    }


def _plain_simulation(simulation: Simulation) -> dict[str, Any]:
    calls = [_plain_call(call, simulation.cluster.ranks_per_node) for call in simulation.calls]
    sums = ("rows", "bytes_intra_node", "bytes_inter_node")
    return {
        "dispatcher": simulation.cluster.simulated_dispatcher,
        "violations": [fault for call in simulation.calls for fault in call.violations],
        **{name: sum(call[name] for call in calls) for name in sums},
        "rows_by_pair": np.sum([call.rows_PP for call in simulation.calls], axis=0).tolist(),
        "bytes_by_pair": np.sum([call.bytes_PP for call in simulation.calls], axis=0).tolist(),
        "calls": calls,
    }


def _plain_call(call: SimulatedCall, ranks_per_node: int) -> dict[str, Any]:
    intra, inter = across_nodes(call.bytes_PP, ranks_per_node)
    return {
        **vars(call.id),
        "kind": call.id.kind,
        "load_E": call.load_E.tolist(),
        "load_P": call.load_P.tolist(),
        "rows": sum(across_nodes(call.rows_PP, ranks_per_node)),
        "bytes_intra_node": intra,
        "bytes_inter_node": inter,
        "misrouted": call.misrouted,
        "difference": call.difference,
    }


def hottest(load: np.ndarray) -> float:
    """Returns the largest load over the mean; 1 if all are zero."""
    return float(load.max() / load.mean()) if load.any() else 1.0


def across_nodes(matrix_PP: np.ndarray, ranks_per_node: int) -> tuple[int, int]:
    """Sums what is sent inside nodes, without the diagonal, and between nodes."""
    nodes = np.array(nodes_of(range(len(matrix_PP)), ranks_per_node))
    inter = int(matrix_PP[nodes[:, None] != nodes].sum())
    return int(matrix_PP.sum() - np.trace(matrix_PP)) - inter, inter


# Tables -------------------------------------------------------------------------------------------


def render_simulation(report: dict[str, Any]) -> Group:
    """Renders the report for a terminal of 80 columns."""
    place = f"{report['ep']} ranks, {report['ranks_per_node']} per node"
    traffic = _table("dispatcher", "rows", "MB inside", "MB between")
    for each in report["dispatchers"]:
        sent = (each["bytes_intra_node"], each["bytes_inter_node"])
        megabytes = (f"{number / 1e6:,.3g}" for number in sent)
        traffic.add_row(each["dispatcher"], f"{each['rows']:,}", *megabytes)
    loads = _table("experts", "calls", "routes", "hottest rank", "most", "expert", "most")
    for load in report["experts"]:
        factors = (*load["hottest_rank"].values(), *load["hottest_expert"].values())
        counts = (f"{load['calls']}", f"{load['routes']:,}")
        loads.add_row(load["kind"], *counts, *(f"{factor:.2f}" for factor in factors))
    return Group(
        Text(f"{report['title']}: {place}", style="bold"),
        Text(f"{report['tokens']}\n"),
        _verdict(report),
        Text(""),
        traffic,
        Text(""),
        loads,
        Text(""),
        *(Text(line, style="dim") for line in _LEGEND),
    )


def _verdict(report: dict[str, Any]) -> Text:
    if violations := report["violations"]:
        lines = [f"✗ {violation}" for violation in violations[:5]]
        return Text("\n".join([f"{len(violations)} violations:", *lines]), style="bold red")
    routes, calls = (sum(load[name] for load in report["experts"]) for name in ("routes", "calls"))
    most = max(call["difference"] for each in report["dispatchers"] for call in each["calls"])
    return Text(
        f"✓ each of {routes:,} routes in {calls} exchanges arrived once, at its expert\n"
        f"✓ the outputs are one rank's, up to rounding ({most:.0e} of the largest)",
        style="green",
    )


def _table(name: str, *figures: str) -> Table:
    table = Table(name, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
