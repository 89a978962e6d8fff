"""Renders a simulation as tables and as JSON.

Traffic is of forward passes, both ways, without what stays on its rank; the backward pass sends the
same again. Loads do not depend on the dispatcher and are shown once.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...distributed.layout import Layout
from .dispatch import SimulatedCall, Simulation, across_nodes, between

_MOST_VIOLATIONS = 5
_LEGEND = (
    "rows, MB: forward pass, both ways; the backward pass sends the same again",
    "share: relative to a dispatcher that sends one row per route",
    "inside, between: MB inside nodes and between them; pair: the busiest two ranks",
    "hottest rank, expert: load over the mean, average and maximum; idle: experts without a route",
)


@dataclass(frozen=True)
class SimulationReport:
    """Holds the same calls simulated with one or several dispatchers."""

    title: str
    tokens: str  # their number and source, as text
    simulations: tuple[Simulation, ...]

    @property
    def calls(self) -> tuple[SimulatedCall, ...]:
        """Returns the first dispatcher's calls; their loads hold for every dispatcher."""
        return self.simulations[0].calls

    @property
    def layout(self) -> Layout:
        """Returns the layout of the simulated ranks."""
        return self.simulations[0].cluster.layout

    @property
    def violations(self) -> list[str]:
        """Lists the broken promises by dispatcher."""
        return [
            f"{each.dispatcher}: {violation}"
            for each in self.simulations
            for violation in each.violations
        ]


def loads_by_kind(calls: Sequence[SimulatedCall]) -> list[dict[str, Any]]:
    """Sums the loads of every kind of experts over the calls.

    The hottest rank's and expert's loads are relative to the mean: average and maximum over the
    calls.
    """
    found = []
    for kind in dict.fromkeys(call.id.kind for call in calls):
        own = [call for call in calls if call.id.kind == kind]
        load_P = np.sum([call.load_P for call in own], axis=0)
        ranks = [call.hottest_rank for call in own]
        experts = [call.hottest_expert for call in own]
        load = {
            "kind": kind,
            "calls": len(own),
            "routes": int(load_P.sum()),
            "load_per_rank": load_P.tolist(),
            "hottest_rank": {"mean": float(np.mean(ranks)), "most": max(ranks)},
            "hottest_expert": {"mean": float(np.mean(experts)), "most": max(experts)},
            "idle_experts": float(np.mean([(call.load_E == 0).sum() for call in own])),
        }
        found.append(load)
    return found


def render_simulation(report: SimulationReport) -> Group:
    """Renders the report for a terminal of 80 columns."""
    return Group(
        Text(f"{report.title}: {_place(report)}", style="bold"),
        Text(report.tokens),
        Text(""),
        _verdict(report),
        Text(""),
        _traffic_table(report.simulations),
        Text(""),
        _load_table(report.calls),
        Text(""),
        *(Text(line, style="dim") for line in _LEGEND),
    )


def _place(report: SimulationReport) -> str:
    layout = report.layout
    per_node = report.simulations[0].cluster.ranks_per_node or layout.world_size
    groups, nodes = layout.expert_replicas, layout.world_size // per_node
    sharing = f"{groups} ep groups of {layout.ep}" if groups > 1 else "one ep group"
    where = f"{nodes} nodes of {per_node}" if nodes > 1 else "one node"
    return f"{layout.world_size} ranks, {sharing}, {where}"


def _verdict(report: SimulationReport) -> Text:
    if violations := report.violations:
        more = len(violations) - _MOST_VIOLATIONS
        lines = [f"✗ {violation}" for violation in violations[:_MOST_VIOLATIONS]]
        lines += [f"✗ and {more} more"] if more > 0 else []
        return Text("\n".join(lines), style="bold red")
    routes = sum(int(call.load_P.sum()) for call in report.calls)
    return Text(
        f"✓ each of {routes:,} routes in {len(report.calls)} exchanges arrived once, at its expert\n"
        f"✓ the outputs are one rank's: {'; '.join(map(_agreement, report.simulations))}",
        style="green",
    )


def _agreement(simulation: Simulation) -> str:
    most = max((call.difference for call in simulation.calls), default=0.0)
    same = f"up to rounding ({most:.0e} of the largest)" if most else "bit for bit"
    return f"{simulation.dispatcher} {same}"


def _traffic_table(simulations: Sequence[Simulation]) -> Table:
    table = _table("dispatcher", "rows", "share", "inside", "between", "pair", "MB")
    for each in simulations:
        per_node = each.cluster.ranks_per_node
        rows, one_per_route = between(each.rows_PP), between(each.one_per_route_PP)
        intra, inter = across_nodes(each.bytes_PP, per_node)
        table.add_row(
            each.dispatcher,
            f"{rows:,}",
            f"{rows / one_per_route:.0%}" if one_per_route else "–",
            millions(intra),
            millions(inter),
            *_busiest_pair(each.bytes_PP),
        )
    return table


def _busiest_pair(matrix: np.ndarray) -> tuple[str, str]:
    others = matrix * ~np.eye(len(matrix), dtype=bool)
    source, target = divmod(int(others.argmax()), len(others))
    most = int(others[source, target])
    return (f"{source}→{target}", millions(most)) if most else ("–", "–")


def _load_table(calls: Sequence[SimulatedCall]) -> Table:
    table = _table("experts", "calls", "routes", "hottest rank", "most", "expert", "most", "idle")
    for load in loads_by_kind(calls):
        hottest = (*load["hottest_rank"].values(), *load["hottest_expert"].values())
        table.add_row(
            load["kind"],
            str(load["calls"]),
            f"{load['routes']:,}",
            *(f"{factor:.2f}" for factor in hottest),
            f"{load['idle_experts']:.1f}",
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for place, heading in enumerate(headings):
        is_name = place == 0 or heading == "pair"
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=True)
    return table


def millions(number: float) -> str:
    """Formats bytes or parameters in millions."""
    return f"{number / 1e6:,.3g}" if number < 1e9 else f"{number / 1e6:,.0f}"


def simulation_as_json(report: SimulationReport) -> dict[str, Any]:
    """Returns the whole report as plain values for JSON.

    Matrices are [from rank][to rank]; the diagonal holds what stays on its rank.
    """
    layout = report.layout
    return {
        "title": report.title,
        "tokens": report.tokens,
        "world_size": layout.world_size,
        "ep": layout.ep,
        "ep_groups": layout.expert_replicas,
        "ranks_per_node": report.simulations[0].cluster.ranks_per_node,
        "violations": report.violations,
        "experts": loads_by_kind(report.calls),
        "dispatchers": [_plain_simulation(each) for each in report.simulations],
    }


def _plain_simulation(simulation: Simulation) -> dict[str, Any]:
    intra, inter = across_nodes(simulation.bytes_PP, simulation.cluster.ranks_per_node)
    return {
        "dispatcher": simulation.dispatcher,
        "violations": simulation.violations,
        "rows": between(simulation.rows_PP),
        "rows_one_per_route": between(simulation.one_per_route_PP),
        "bytes_intra_node": intra,
        "bytes_inter_node": inter,
        "rows_by_pair": simulation.rows_PP.tolist(),
        "bytes_by_pair": simulation.bytes_PP.tolist(),
        "rows_one_per_route_by_pair": simulation.one_per_route_PP.tolist(),
        "calls": [_plain_call(call) for call in simulation.calls],
    }


def _plain_call(call: SimulatedCall) -> dict[str, Any]:
    values = asdict(call) | asdict(call.id) | {"kind": call.id.kind}
    del values["id"]
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }
