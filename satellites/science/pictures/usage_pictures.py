"""Pictures of expert usage: load, layer preference, balance, attention's heads."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..analysis.analyse import Analysis, BankAnalysis
from ..analysis.banks import FEED_FORWARD
from ..analysis.usage import preference_order
from . import drawing
from .picture import (
    KIND_NAMES,
    Picture,
    Table,
    bank_name,
    depth_label,
    depth_rows,
    row_labels,
    stacked,
    why_nothing_repeats,
    why_usage_is_fixed,
)

ATTENTION_KINDS = ("value", "output", "attention")


def usage_table(banks: Sequence[BankAnalysis]) -> Table:
    """Returns one row per depth step and expert of the given banks."""
    return stacked([_usage_rows(each, repeat) for each, repeat in depth_rows(banks)])


def _usage_rows(each: BankAnalysis, repeat: int) -> Table:
    bank, usage = each.bank, each.usage
    number = bank.num_experts
    per_head = number // bank.num_heads
    return {
        "kind": np.full(number, bank.kind),
        "member": np.full(number, bank.member),
        "depth": np.full(number, bank.depths[repeat]),
        "head": np.arange(number) // per_head,
        "expert": np.arange(number) % per_head,
        "routes": usage.counts_RE[repeat],
        "share_of_head": usage.head_share_RHA[repeat].reshape(-1),
        "share_of_expert": usage.preference_RE[repeat],
    }


# ---- expert usage per depth step


def expert_usage(analysis: Analysis) -> Picture:
    """Draws every expert's load at every depth step."""
    banks = analysis.of_kind(FEED_FORWARD)
    return Picture(
        name="expert_usage",
        title="Expert usage per depth step",
        absent=why_usage_is_fixed(analysis),
        table=lambda: usage_table(banks),
        draw=lambda: _draw_usage(banks),
    )


def _draw_usage(banks: Sequence[BankAnalysis]) -> Any:
    rows = depth_rows(banks)
    orders = {id(each): np.argsort(-each.usage.counts_RE.sum(0), kind="stable") for each in banks}
    loads = np.stack(
        [
            each.usage.share_RE[repeat][orders[id(each)]] * each.bank.num_experts
            for each, repeat in rows
        ]
    )
    figure = drawing.new_figure(1.5 + 0.17 * max(len(rows), 4))
    panel = figure.subplots()
    image = drawing.heat(panel, loads, low=0.0, high=drawing.high_end([loads], 0.995, 1.5))
    drawing.row_names(panel, row_labels(rows))
    drawing.column_names(panel, range(1, loads.shape[1] + 1), room=12)
    drawing.part_groups(panel, [each.bank.member for each, _ in rows])
    drawing.label(panel, x="experts, the most used of each layer first", y=depth_label(rows))
    drawing.colour_bar(figure, image, panel, "load (1: all alike)")
    drawing.title(panel, "Expert usage per depth step, feed-forward")
    return figure


# ---- layer preference


def layer_preference(analysis: Analysis) -> Picture:
    """Draws the depth steps at which every expert is used."""
    banks = analysis.of_kind(FEED_FORWARD)
    return Picture(
        name="layer_preference",
        title="Layer preference of the experts",
        absent=why_usage_is_fixed(analysis) or why_nothing_repeats(analysis),
        table=lambda: stacked([_preference_rows(each) for each in banks]),
        draw=lambda: _draw_preference(banks),
    )


def _preference_rows(each: BankAnalysis) -> Table:
    preference_RE = each.usage.preference_RE
    place_E = np.empty(each.bank.num_experts, dtype=np.int64)
    place_E[preference_order(preference_RE)] = np.arange(each.bank.num_experts)
    repeats, experts = preference_RE.shape
    return {
        "member": np.full(repeats * experts, each.bank.member),
        "depth": np.repeat(each.bank.depths, experts),
        "expert": np.tile(np.arange(experts), repeats),
        "place": np.tile(place_E, repeats),
        "share_of_expert": preference_RE.reshape(-1),
    }


def _draw_preference(banks: Sequence[BankAnalysis]) -> Any:
    shown = banks[: drawing.MAX_PANELS]
    rows = sum(max(each.bank.num_repeats, 3) for each in shown)
    figure = drawing.new_figure(0.6 + 0.75 * len(shown) + 0.17 * rows)
    panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    high = drawing.high_end([each.usage.preference_RE for each in shown], 0.998)
    image = None
    for panel, each in zip(panels, shown, strict=True):
        preference_RE = each.usage.preference_RE
        image = drawing.heat(
            panel, preference_RE[:, preference_order(preference_RE)], low=0.0, high=high
        )
        drawing.row_names(panel, each.bank.depths)
        drawing.column_names(panel, range(1, each.bank.num_experts + 1), room=12)
        drawing.label(panel, y="depth step")
        drawing.title(panel, f"Layer preference, feed-forward, {bank_name(each)}")
    panels[-1].set_xlabel("experts, by the depth steps they prefer", fontsize=9)
    drawing.colour_bar(figure, image, list(panels), "share of the expert's work")
    return figure


# ---- balance


def chooses(each: BankAnalysis) -> bool:
    """Tells whether tokens choose among the bank's experts."""
    return (
        each.bank.chosen_by == "tokens"
        and each.bank.num_experts > each.bank.num_heads
        and not each.takes_all
    )


def balance(analysis: Analysis) -> Picture:
    """Draws monitors over depth: perplexity, dead experts, gates, overlap of repeats."""
    banks = [each for each in analysis.banks if chooses(each)]
    absent = ""
    if not banks:
        absent = why_usage_is_fixed(analysis) + " Attention has no experts that are chosen either."
    return Picture(
        name="balance",
        title="Balance, dead experts, gates and stability over depth",
        absent=absent,
        table=lambda: stacked([_balance_rows(each) for each in banks]),
        draw=lambda: _draw_balance(banks, analysis.config.model.num_layers),
    )


def _balance_rows(each: BankAnalysis) -> Table:
    bank, usage, repeats = each.bank, each.usage, each.bank.num_repeats
    return {
        "kind": np.full(repeats, bank.kind),
        "member": np.full(repeats, bank.member),
        "depth": np.asarray(bank.depths),
        "tokens": usage.tokens_R,
        "routes": usage.counts_RE.sum(1),
        "usage_perplexity": usage.perplexity_R,
        "dead_share": usage.dead_R,
        "gate_min": np.where(usage.tokens_R > 0, usage.gate_min_R, np.nan),
        "gate_mean": usage.gate_mean_R,
        "gate_max": np.where(usage.tokens_R > 0, usage.gate_max_R, np.nan),
        "kept_share": each.similarity.consecutive_R,
    }


def _draw_balance(banks: Sequence[BankAnalysis], num_depths: int) -> Any:
    figure = drawing.new_figure(5.0)
    panels = figure.subplots(2, 2, sharex=True)
    kinds = list(dict.fromkeys(each.bank.kind for each in banks))
    parts = (
        (panels[0, 0], "usage_perplexity", 1.0, "Usage perplexity", "relative, 1: all alike"),
        (panels[0, 1], "dead_share", 100.0, "Dead experts", "% of the experts"),
        (panels[1, 0], "gate_mean", 1.0, "Gate weight", "mean, band: range"),
        (panels[1, 1], "kept_share", 100.0, "Kept experts", "% of those before"),
    )
    for number, kind in enumerate(kinds):
        table = stacked([_balance_rows(each) for each in banks if each.bank.kind == kind])
        order = np.argsort(table["depth"])
        depths = table["depth"][order]
        for panel, column, scale, _, _ in parts:
            drawing.line(panel, depths, scale * table[column][order], number, KIND_NAMES[kind])
        panels[1, 0].fill_between(
            depths,
            table["gate_min"][order],
            table["gate_max"][order],
            color=drawing.PALETTE[number],
            alpha=0.13,
            linewidth=0,
        )
    for panel, _, _, name, unit in parts:
        drawing.finish_lines(panel)
        drawing.title(panel, name)
        drawing.label(panel, y=unit)
        panel.set_ylim(bottom=0)
    for panel in panels[1]:
        drawing.label(panel, x="depth step", y=panel.get_ylabel())
        panel.set_xlim(0.5, num_depths + 0.5)
        drawing.whole_numbers(panel.xaxis)
    panels[0, 0].set_ylim(0, 1.05)
    panels[0, 1].set_ylim(0, max(5.0, panels[0, 1].get_ylim()[1]))
    panels[1, 1].set_ylim(0, 105)
    if not np.isfinite([value for line in panels[1, 1].lines for value in line.get_ydata()]).any():
        panels[1, 1].text(
            0.5, 0.5, "no layer is repeated", transform=panels[1, 1].transAxes, ha="center",
            fontsize=9, color=drawing.FAINT,
        )  # fmt: skip
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3, fontsize=8.5, frameon=False)
    return figure


# ---- attention's experts per head


def attention_heads(analysis: Analysis) -> Picture:
    """Draws every head's use of its experts."""
    banks = [each for each in analysis.banks if each.bank.kind in ATTENTION_KINDS]
    absent = ""
    if not banks:
        absent = "The attention of this model has no experts."
    elif not any(map(chooses, banks)):
        absent = "Attention's tokens go through all experts of their heads: nothing is chosen."
    return Picture(
        name="attention_heads",
        title="Attention experts per head",
        absent=absent,
        table=lambda: usage_table(banks),
        draw=lambda: _draw_heads(banks),
    )


def _draw_heads(banks: Sequence[BankAnalysis]) -> Any:
    kinds = list(dict.fromkeys(each.bank.kind for each in banks))
    rows = {kind: depth_rows([each for each in banks if each.bank.kind == kind]) for kind in kinds}
    loads = {kind: np.stack([_head_loads(*row) for row in rows[kind]]) for kind in kinds}
    high = drawing.high_end(list(loads.values()), 0.995, 1.5)
    figure = drawing.new_figure(0.6 + sum(0.75 + 0.17 * max(len(rows[kind]), 4) for kind in kinds))
    panels = figure.subplots(len(kinds), 1, squeeze=False)[:, 0]
    image = None
    for panel, kind in zip(panels, kinds, strict=True):
        image = drawing.heat(panel, loads[kind], low=0.0, high=high)
        drawing.row_names(panel, row_labels(rows[kind]))
        drawing.part_groups(panel, [each.bank.member for each, _ in rows[kind]])
        bank = rows[kind][0][0].bank
        _name_heads(panel, bank.num_heads, bank.num_experts // bank.num_heads)
        columns = "experts of each layer" + (", by head" if bank.num_heads > 1 else "")
        drawing.label(panel, x=columns, y=depth_label(rows[kind]))
        drawing.title(panel, f"Attention experts, {KIND_NAMES[kind]}")
    drawing.colour_bar(figure, image, list(panels), "use (1: all alike)")
    return figure


def _head_loads(each: BankAnalysis, repeat: int) -> np.ndarray:
    """Returns the use of a bank's experts at one repeat, head by head; 1 is even."""
    shares_HA = each.usage.head_share_RHA[repeat]
    return shares_HA.reshape(-1) * shares_HA.shape[1]


def _name_heads(panel: Any, num_heads: int, experts: int) -> None:
    """Separates the heads by white lines and names them below their columns."""
    for head in range(1, num_heads):
        panel.axvline(head * experts - 0.5, color="white", linewidth=2.5)
    if num_heads == 1:
        drawing.column_names(panel, range(1, experts + 1))
        return
    step = max(1, -(-num_heads // 8))
    heads = range(0, num_heads, step)
    panel.set_xticks(
        [(head + 0.5) * experts - 0.5 for head in heads], [f"head {head + 1}" for head in heads]
    )
