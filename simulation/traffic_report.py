"""`moebius simulate` for people: what was checked, what travelled, who was busy; words, JSON and a
picture of the traffic.

Traffic is of forward passes, there and back, without what stays on its rank; the backward pass
sends as much again. Loads do not depend on the dispatcher, so they are shown once.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..distributed.dispatch.table import is_exact
from ..distributed.layout import Layout, spell_ranks
from .dispatch import (
    SimulatedCall,
    Simulation,
    across_nodes,
    between,
    between_nodes,
)
from .shapes import RankShapes, ShapeRequest

_BARS, _SHADES = "▁▂▃▄▅▆▇█", " ░▒▓█"
_MOST_BARS = 128  # ranks whose load is drawn
_MOST_SHADES = 32  # ranks that fit into a matrix of characters
_BARS_OF_A_LINE = 48
_MOST_STEPS = 9  # factors in a line; all of this fits a terminal of 80 columns


@dataclass(frozen=True)
class SimulationReport:
    """What the same calls did with one or several dispatchers."""

    title: str
    tokens: str  # where they come from and how many
    simulations: tuple[Simulation, ...]

    @property
    def first(self) -> Simulation:
        """Returns the first dispatcher's simulation; loads are the same in all."""
        return self.simulations[0]

    @property
    def layout(self) -> Layout:
        """Returns the layout of the simulated ranks."""
        return self.first.cluster.layout

    @property
    def violations(self) -> list[str]:
        """Lists what should have held and did not, by dispatcher."""
        return [
            f"{each.dispatcher}: {violation}"
            for each in self.simulations
            for violation in each.violations
        ]


@dataclass(frozen=True)
class KindLoad:
    """What the routers of one kind did over all calls."""

    kind: str
    calls: int
    routes: int
    load_P: np.ndarray
    hottest_rank: tuple[float, float]  # mean over the calls, and the most
    hottest_expert: tuple[float, float]
    idle_experts: float  # of a call, on average


def kinds_of(calls: Sequence[SimulatedCall]) -> list[KindLoad]:
    """Sums the loads of every kind of experts over the calls."""
    found = []
    for kind, own in by_kind(calls).items():
        ranks = [call.hottest_rank for call in own]
        experts = [call.hottest_expert for call in own]
        load_P = np.sum([call.load_P for call in own], axis=0)
        idle = float(np.mean([(call.load_E == 0).sum() for call in own]))
        found.append(
            KindLoad(
                kind,
                calls=len(own),
                routes=int(load_P.sum()),
                load_P=load_P,
                hottest_rank=(float(np.mean(ranks)), max(ranks)),
                hottest_expert=(float(np.mean(experts)), max(experts)),
                idle_experts=idle,
            )
        )
    return found


def over_time(calls: Sequence[SimulatedCall]) -> tuple[str, dict[int, list[SimulatedCall]]]:
    """Groups the calls by optimizer step, or where there is one step only, by depth step.

    Returns the axis (step or depth) and the calls by their number on it.
    """
    axis = "step" if len({call.id.step for call in calls}) > 1 else "depth"
    moments: dict[int, list[SimulatedCall]] = {}
    for call in sorted(calls, key=lambda call: getattr(call.id, axis)):
        moments.setdefault(getattr(call.id, axis), []).append(call)
    return axis, moments


def factors_by(calls: Sequence[SimulatedCall], axis: str) -> dict[int, float]:
    """Returns the hottest rank's load over the mean at every step or depth step.

    Where several calls were made there it is their mean.
    """
    found: dict[int, list[float]] = {}
    for call in calls:
        found.setdefault(getattr(call.id, axis), []).append(call.hottest_rank)
    return {number: float(np.mean(found[number])) for number in sorted(found)}


def by_kind(calls: Sequence[SimulatedCall]) -> dict[str, list[SimulatedCall]]:
    """Groups the calls by kind, in the order in which a layer asks them."""
    found: dict[str, list[SimulatedCall]] = {}
    for call in calls:
        found.setdefault(call.id.kind, []).append(call)
    return found


# The words ----------------------------------------------------------------------------------------


def render_simulation(report: SimulationReport) -> Group:
    """Renders the report for a terminal of 80 columns."""
    parts: list[Any] = [
        Text(f"{report.title}: {_place(report)}", style="bold"),
        Text(report.tokens),
        Text(""),
    ]
    parts += [_verdict(report), Text(""), _traffic_table(report), Text(""), _load_table(report)]
    parts += [Text(line) for line in (*_bar_lines(report), *_time_lines(report))]
    if report.layout.world_size <= _MOST_SHADES:
        parts += [Text(""), *(Text(line) for line in _matrix_lines(report.simulations[-1]))]
    return Group(*parts, *(Text(line, style="dim") for line in _legend(report)))


def _place(report: SimulationReport) -> str:
    layout = report.layout
    per_node = report.first.cluster.ranks_per_node or layout.world_size
    groups = layout.num_expert_replicas
    nodes = -(-layout.world_size // per_node)
    sharing = f"{groups} ep groups of {layout.ep}" if groups > 1 else "one ep group"
    where = f"{nodes} nodes of {per_node}" if nodes > 1 else "one node"
    return f"{layout.world_size} ranks, {sharing}, {where}"


def _verdict(report: SimulationReport) -> Text:
    if report.violations:
        more = len(report.violations) - 5
        lines = [f"✗ {violation}" for violation in report.violations[:5]]
        if more > 0:
            lines.append(f"✗ and {more} more")
        return Text("\n".join(lines), style="bold red")
    calls = report.first.calls
    routes = sum(int(call.load_P.sum()) for call in calls)
    return Text(
        f"✓ each of {routes:,} routes in {len(calls)} exchanges arrived once, at its expert\n"
        f"✓ the outputs are one rank's: {'; '.join(map(_agreement, report.simulations))}",
        style="green",
    )


def _agreement(simulation: Simulation) -> str:
    most = max((call.difference for call in simulation.calls), default=0.0)
    same = f"up to rounding ({most:.0e} of the largest)" if most else "bit for bit"
    return f"{simulation.dispatcher} {same}"


def _traffic_table(report: SimulationReport) -> Table:
    table = _table("dispatcher", "rows", "share", "inside", "between", "pair", "MB", "nodes", "MB")
    for each in report.simulations:
        per_node = each.cluster.ranks_per_node
        rows, one_per_route = between(each.rows_PP), between(each.one_per_route_PP)
        intra, inter = across_nodes(each.bytes_PP, per_node)
        table.add_row(
            each.dispatcher,
            f"{rows:,}",
            f"{rows / one_per_route:.0%}" if one_per_route else "–",
            _mb(intra),
            _mb(inter),
            *_pair(each.bytes_PP),
            *_pair(between_nodes(each.bytes_PP, per_node)),
        )
    return table


def _pair(matrix: np.ndarray) -> tuple[str, str]:
    source, target, most = busiest_pair(matrix)
    return (f"{source}→{target}", _mb(most)) if most else ("–", "–")


def busiest_pair(matrix: np.ndarray) -> tuple[int, int, int]:
    """Returns (from, to, how much) of the two different places with the most between them."""
    others = matrix * ~np.eye(len(matrix), dtype=bool)
    source, target = divmod(int(others.argmax()), len(others))
    return source, target, int(others[source, target])


def _load_table(report: SimulationReport) -> Table:
    table = _table("experts", "calls", "routes", "hottest rank", "most", "expert", "most", "idle")
    for kind in kinds_of(report.first.calls):
        factors = (*kind.hottest_rank, *kind.hottest_expert)
        table.add_row(
            kind.kind,
            str(kind.calls),
            f"{kind.routes:,}",
            *(f"{value:.2f}" for value in factors),
            f"{kind.idle_experts:.1f}",
        )
    return table


def _bar_lines(report: SimulationReport) -> list[str]:
    if report.layout.world_size > _MOST_BARS:
        return []
    lines = ["", "load by rank"]
    for kind in kinds_of(report.first.calls):
        bars = _bars(kind.load_P)
        pieces = [
            bars[first : first + _BARS_OF_A_LINE] for first in range(0, len(bars), _BARS_OF_A_LINE)
        ]
        lines += [
            f"  {name:<20}{piece}" for name, piece in zip_longest([kind.kind], pieces, fillvalue="")
        ]
    return lines


def _bars(load_P: np.ndarray) -> str:
    """Returns one character per rank, from nothing to the hottest."""
    most = max(int(load_P.max()), 1)
    return "".join(_BARS[round((len(_BARS) - 1) * load / most)] for load in load_P)


def _time_lines(report: SimulationReport) -> list[str]:
    axis, moments = over_time(report.first.calls)
    if len(moments) < 2:
        return []
    numbers = list(moments)
    shown = np.unique(
        np.linspace(0, len(numbers) - 1, min(len(numbers), _MOST_STEPS)).round().astype(int)
    )
    lines = ["", f"hottest rank by {axis:<6}" + "".join(f" {numbers[index]:>5}" for index in shown)]
    for kind, own in by_kind(report.first.calls).items():
        factors = factors_by(own, axis)
        line = f"  {kind:<20}"
        for index in shown:
            factor = factors.get(numbers[index])
            line += "     –" if factor is None else f" {factor:>5.2f}"
        lines.append(line)
    return lines


def _matrix_lines(simulation: Simulation) -> list[str]:
    """Draws the matrix in characters: every line a sender, every column a receiver."""
    matrix = simulation.bytes_PP * ~np.eye(len(simulation.bytes_PP), dtype=bool)
    most = max(int(matrix.max()), 1)
    level = np.maximum(np.round((len(_SHADES) - 1) * matrix / most), matrix > 0).astype(int)
    lines = ["".join(_SHADES[value] * 2 for value in row) for row in level]
    title = (
        f"bytes from rank (down) to rank (across), {simulation.dispatcher}; darkest: {_mb(most)} MB"
    )
    return [title, *(f"{rank:>4} {line}" for rank, line in enumerate(lines))]


def _legend(report: SimulationReport) -> list[str]:
    return [
        "",
        "rows, MB: forward pass, there and back, all that ranks hand to the network; the backward "
        "sends as much again",
        "share: of what a dispatcher would send that has a row for every route, there and back",
        "inside, between: MB inside nodes and between them; pair, nodes: the busiest two",
        "hottest rank, expert: load over the mean, on average over the calls, and at most; idle: "
        "experts without a route",
    ]


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for place, heading in enumerate(headings):
        left = place == 0 or heading in ("pair", "nodes")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    return table


def _mb(number: float) -> str:
    """Returns a number (bytes or parameters) in millions."""
    return f"{number / 1e6:,.3g}" if number < 1e9 else f"{number / 1e6:,.0f}"


# JSON ---------------------------------------------------------------------------------------------


def simulation_as_json(report: SimulationReport) -> dict[str, Any]:
    """Returns the whole report as plain values for JSON.

    Matrices are [from rank][to rank] and have what stays on its rank on the diagonal.
    """
    layout, cluster = report.layout, report.first.cluster
    return {
        "title": report.title,
        "tokens": report.tokens,
        "world_size": layout.world_size,
        "ep": layout.ep,
        "ep_groups": layout.num_expert_replicas,
        "ranks_per_node": cluster.ranks_per_node,
        "violations": report.violations,
        "experts": [
            {
                "kind": kind.kind,
                "calls": kind.calls,
                "routes": kind.routes,
                "load_per_rank": kind.load_P.tolist(),
                "hottest_rank": dict(zip(("mean", "most"), kind.hottest_rank, strict=True)),
                "hottest_expert": dict(zip(("mean", "most"), kind.hottest_expert, strict=True)),
                "idle_experts": kind.idle_experts,
            }
            for kind in kinds_of(report.first.calls)
        ],
        "dispatchers": [_plain_simulation(each) for each in report.simulations],
    }


def _plain_simulation(simulation: Simulation) -> dict[str, Any]:
    intra, inter = across_nodes(simulation.bytes_PP, simulation.cluster.ranks_per_node)
    return {
        "dispatcher": simulation.dispatcher,
        "overlap_chunks": simulation.cluster.overlap_chunks,
        "exact": is_exact(simulation.dispatcher),
        "violations": simulation.violations,
        "rows": between(simulation.rows_PP),
        "rows_one_per_route": between(simulation.one_per_route_PP),
        "bytes_intra_node": intra,
        "bytes_inter_node": inter,
        "bytes_by_nodes": between_nodes(
            simulation.bytes_PP, simulation.cluster.ranks_per_node
        ).tolist(),
        "rows_by_pair": simulation.rows_PP.tolist(),
        "bytes_by_pair": simulation.bytes_PP.tolist(),
        "rows_one_per_route_by_pair": simulation.one_per_route_PP.tolist(),
        "calls": [_plain_call(call) for call in simulation.calls],
    }


def _plain_call(call: SimulatedCall) -> dict[str, Any]:
    return {
        "step": call.id.step,
        "micro_batch": call.id.micro_batch,
        "depth": call.id.depth,
        "layer": call.id.layer,
        "kind": call.id.kind,
        "load_per_expert": call.load_E.tolist(),
        "load_per_rank": call.load_P.tolist(),
        "hottest_rank": call.hottest_rank,
        "hottest_expert": call.hottest_expert,
        "rows": call.rows,
        "rows_one_per_route": call.rows_one_per_route,
        "bytes_intra_node": call.bytes_intra_node,
        "bytes_inter_node": call.bytes_inter_node,
        "misrouted": call.misrouted,
        "difference": call.difference,
    }


# The picture --------------------------------------------------------------------------------------

_INK, _LINES = "#22313f", ("#d1495b", "#2e6f95", "#8d6a9f", "#66a182")


def draw_simulation(report: SimulationReport, path: Path) -> Path:
    """Draws bytes from rank to rank, and loads over steps (or depth steps). Returns the path.

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(12, 5.6), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state
    panels = figure.subplot_mosaic("AB;AC", width_ratios=(1.05, 1))
    _draw_matrix(figure, panels["A"], report.simulations[-1])
    _draw_loads(figure, panels["B"], report)
    _draw_factors(panels["C"], report)
    figure.suptitle(
        f"{report.title}: {_place(report)}",
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
        color=_INK,
    )
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--png {path}: cannot be written ({error})") from None
    return path


def _draw_matrix(figure: Any, panel: Any, simulation: Simulation) -> None:
    matrix = simulation.bytes_PP / 1e6 * ~np.eye(len(simulation.bytes_PP), dtype=bool)
    image = panel.imshow(matrix, cmap="magma_r", vmin=0, interpolation="nearest")
    per_node, ranks = simulation.cluster.ranks_per_node or len(matrix), len(matrix)
    for edge in np.arange(per_node, ranks, per_node) - 0.5:
        panel.axhline(edge, color="#7a8793", linewidth=0.7)
        panel.axvline(edge, color="#7a8793", linewidth=0.7)
    panel.set_xlabel("to rank")
    panel.set_ylabel("from rank")
    panel.set_title(
        f"MB between ranks, {simulation.dispatcher}; lines: nodes", fontsize=11, color=_INK
    )
    figure.colorbar(image, ax=panel, fraction=0.046, pad=0.02)


def _draw_loads(figure: Any, panel: Any, report: SimulationReport) -> None:
    axis, moments = over_time(report.first.calls)
    loads = np.stack(
        [np.sum([call.load_P for call in own], axis=0) for own in moments.values()], axis=1
    )
    relative = loads / np.maximum(loads.mean(0), 1e-30)
    image = panel.imshow(
        relative, aspect="auto", cmap="RdBu_r", norm=_around_one(relative), interpolation="nearest"
    )
    _name_moments(panel, axis, list(moments))
    panel.set_ylabel("rank")
    panel.set_title("load over the mean, all experts", fontsize=11, color=_INK)
    figure.colorbar(image, ax=panel, pad=0.02)


def _around_one(relative: np.ndarray) -> Any:
    from matplotlib.colors import TwoSlopeNorm

    reach = max(float(np.abs(relative - 1).max()), 0.05)
    return TwoSlopeNorm(1.0, 1 - reach, 1 + reach)


def _draw_factors(panel: Any, report: SimulationReport) -> None:
    axis, moments = over_time(report.first.calls)
    places = {number: place for place, number in enumerate(moments)}
    for color, (kind, own) in zip(_LINES, by_kind(report.first.calls).items(), strict=False):
        factors = factors_by(own, axis)
        at = [places[number] for number in factors]
        panel.plot(
            at, list(factors.values()), "o-", color=color, linewidth=1.8, markersize=4, label=kind
        )
    panel.axhline(1.0, color="#b8c0c8", linewidth=1)
    panel.set_xlim(-0.5, len(places) - 0.5)
    _name_moments(panel, axis, list(moments))
    panel.set_title("hottest rank's load over the mean", fontsize=11, color=_INK)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=9)


def _name_moments(panel: Any, axis: str, numbers: list[int]) -> None:
    shown = np.unique(np.linspace(0, len(numbers) - 1, min(len(numbers), 10)).round().astype(int))
    panel.set_xticks(shown, [str(numbers[index]) for index in shown])
    panel.set_xlabel("depth step" if axis == "depth" else axis)


# Shapes only --------------------------------------------------------------------------------------


def render_shapes(title: str, request: ShapeRequest, shapes: Sequence[RankShapes]) -> Group:
    """Renders one line per rank, and which experts it holds."""
    table = _table(
        "rank",
        "replica",
        "shard",
        "efsdp",
        "ep",
        "dense",
        "experts",
        "weights",
        "state",
        "kept",
        "GB",
    )
    for found in shapes:
        place, sizes = found.place, found.bytes
        state = sizes["weights"] + sizes["gradients"] + sizes["moments"] + sizes.get("copies", 0)
        table.add_row(
            f"{found.rank:,}",
            *(str(getattr(place, axis)) for axis in ("dp_replicate", "dp_shard", "efsdp", "ep")),
            *map(
                _mb,
                (
                    found.dense_parameters,
                    found.expert_parameters,
                    sizes["weights"],
                    state,
                    sizes["kept"],
                ),
            ),
            f"{found.total_bytes / 1e9:.2f}",
        )
    heading = f"{title}: {request.layout}, sharding {request.sharding}, {request.precision}"
    checked = (
        "✓ groups as in the tables, every expert once per ep group, shapes of every tensor and of "
        "a forward pass"
    )
    banks = [Text(f"  rank {found.rank:,}: {_describe_banks(found)}") for found in shapes]
    words = (
        "replica, shard: the rank's place on dp_replicate and dp_shard; dense, experts: millions "
        "of parameters held;",
        "in MB: weights; state: with gradients, AdamW's moments and copies in low precision;",
        f"kept: for the backward pass of {request.micro_batch} × {request.seq_len} tokens, "
        "balanced load, no recomputation",
    )
    return Group(
        Text(heading, style="bold"),
        Text(checked, style="green"),
        Text(""),
        table,
        Text(""),
        *banks,
        Text(""),
        *(Text(line, style="dim") for line in words),
    )


def _describe_banks(found: RankShapes) -> str:
    """Describes the rank's banks, those of the same size once."""
    words = dict.fromkeys(
        f"{bank.layer.rpartition('.')[2].replace('sparse', 'feed_forward')} experts "
        f"{spell_ranks(list(bank.experts))} of {bank.whole[0]}, {'×'.join(map(str, bank.shape))}"
        for bank in found.banks
    )
    return "; ".join(words)


def shapes_as_json(request: ShapeRequest, shapes: Iterable[RankShapes]) -> dict[str, Any]:
    """Returns every rank's shapes as plain values for JSON."""
    return {
        "layout": str(request.layout),
        "sharding": request.sharding,
        "precision": request.precision,
        "ranks": [
            {
                "rank": found.rank,
                "place": vars(found.place),
                "group_sizes": found.group_sizes,
                "dense_parameters": found.dense_parameters,
                "expert_parameters": found.expert_parameters,
                "bytes": {**found.bytes, "total": found.total_bytes},
                "banks": [
                    {
                        "layer": bank.layer,
                        "experts": list(bank.experts),
                        "shape": list(bank.shape),
                        "whole": list(bank.whole),
                    }
                    for bank in found.banks
                ],
            }
            for found in shapes
        ],
    }
