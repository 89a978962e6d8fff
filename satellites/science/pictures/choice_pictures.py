"""Pictures of chosen experts: by item, from repeat to repeat, and together."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..analysis.analyse import Analysis, BankAnalysis
from ..analysis.banks import FEED_FORWARD, member_name
from ..analysis.usage import preference_order
from . import drawing
from .picture import (
    Picture,
    Table,
    depth_label,
    depth_rows,
    pair_table,
    row_labels,
    stacked,
    why_nothing_is_chosen,
    why_nothing_repeats,
    why_usage_is_fixed,
)

PAPER_ITEMS = 1000  # where the paper cuts its curves
FREQUENT_ITEMS = 6000  # of the heat map


# ---- unique experts per item


def unique_experts(analysis: Analysis) -> Picture:
    """Draws the number of different experts per vocabulary item."""
    banks = analysis.of_kind(FEED_FORWARD)
    return Picture(
        name="unique_experts",
        title="Unique experts per token and depth step",
        absent=why_nothing_is_chosen(analysis),
        table=lambda: stacked([_item_rows(analysis, each, r) for each, r in depth_rows(banks)]),
        draw=lambda: _draw_unique(analysis, banks),
    )


def _item_rows(analysis: Analysis, each: BankAnalysis, repeat: int) -> Table:
    assert each.items is not None
    seen = analysis.item_counts_V.nonzero()[0]
    return {
        "member": np.full(len(seen), each.bank.member),
        "depth": np.full(len(seen), each.bank.depths[repeat]),
        "token_id": seen,
        "occurrences": analysis.item_counts_V[seen],
        "experts": each.items.unique_RV[repeat, seen],
        "experts_at_any_depth": each.items.anywhere_V[seen],
    }


def _draw_unique(analysis: Analysis, banks: Sequence[BankAnalysis]) -> Any:
    import matplotlib

    depths = sorted(
        ((each.bank.depths[repeat], each, repeat) for each, repeat in depth_rows(banks)),
        key=lambda found: found[0],
    )
    shown = depths[:: _stride(len(depths), analysis.config.model.layers_per_group)]
    figure = drawing.new_figure(3.7)
    panel = figure.subplots()
    seen = analysis.item_counts_V > 0
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.88, max(len(shown), 2)))
    for (depth, each, repeat), colour, marker in zip(
        shown, colours, drawing.MARKERS * 2, strict=False
    ):
        assert each.items is not None
        found = np.sort(each.items.unique_RV[repeat, seen])
        panel.plot(
            np.arange(1, len(found) + 1),
            found,
            color=colour,
            linewidth=1.6,
            marker=marker,
            markersize=4.5,
            markevery=max(1, len(found) // 8),
            label=f"depth step {depth}",
        )
    panel.set_xlim(1, max(2, seen.sum()))
    panel.set_ylim(bottom=0)
    if seen.sum() > PAPER_ITEMS:
        panel.axvline(PAPER_ITEMS, color=drawing.FAINT, linewidth=1, linestyle=":")
        panel.annotate(
            "the paper's figure ends here", (PAPER_ITEMS, 0), (4, 6), textcoords="offset points",
            fontsize=8, color=drawing.FAINT,
        )  # fmt: skip
    drawing.whole_numbers(panel.yaxis)
    drawing.finish_lines(panel)
    drawing.label(
        panel,
        x="vocabulary items, sorted for every depth step",
        y=f"different experts (of {banks[0].bank.num_experts})",
    )
    drawing.title(panel, "Unique experts per token, feed-forward")
    panel.legend(fontsize=8.5, frameon=False)
    return figure


def _stride(num_depths: int, group: int) -> int:
    """Returns the stride of the drawn depth steps: at most five or six, of one layer if possible."""
    stride = max(1, -(-num_depths // 5))
    return stride if stride == 1 else -(-stride // group) * group


def frequent_items(analysis: Analysis) -> Picture:
    """Draws a heat map of the share of an item's experts that each depth step uses."""
    banks = analysis.of_kind(FEED_FORWARD)
    return Picture(
        name="frequent_items",
        title="Experts per depth step of the most frequent tokens",
        absent=why_nothing_is_chosen(analysis) or why_nothing_repeats(analysis),
        table=lambda: _frequent_table(analysis, banks),
        draw=lambda: _draw_frequent(analysis, banks),
    )


def _frequent(analysis: Analysis) -> np.ndarray:
    order = np.argsort(-analysis.item_counts_V, kind="stable")[:FREQUENT_ITEMS]
    return order[analysis.item_counts_V[order] > 0]


def _item_shares(each: BankAnalysis, items: np.ndarray) -> np.ndarray:
    assert each.items is not None
    anywhere = each.items.anywhere_V[items]
    with np.errstate(invalid="ignore"):
        return np.where(anywhere > 0, each.items.unique_RV[:, items] / anywhere, np.nan)


def _frequent_table(analysis: Analysis, banks: Sequence[BankAnalysis]) -> Table:
    items = _frequent(analysis)
    return stacked(
        [
            {
                "member": np.full(len(items), each.bank.member),
                "depth": np.full(len(items), each.bank.depths[repeat]),
                "place": np.arange(len(items)),
                "token_id": items,
                "share": _item_shares(each, items)[repeat],
            }
            for each, repeat in depth_rows(banks)
        ]
    )


def _draw_frequent(analysis: Analysis, banks: Sequence[BankAnalysis]) -> Any:
    items = _frequent(analysis)
    rows = depth_rows(banks)
    shares = np.concatenate([_item_shares(each, items) for each in banks])
    figure = drawing.new_figure(1.5 + 0.17 * max(len(rows), 4))
    panel = figure.subplots()
    image = drawing.heat(panel, shares, low=0.0, high=1.0)
    drawing.row_names(panel, row_labels(rows))
    drawing.part_groups(panel, [each.bank.member for each, _ in rows])
    drawing.label(panel, x="vocabulary items, the most frequent first", y=depth_label(rows))
    drawing.colour_bar(figure, image, panel, "share of the item's experts")
    drawing.title(panel, "Experts per depth step of frequent tokens")
    return figure


# ---- similarity of choices, overlap of usage


def similarity(analysis: Analysis) -> Picture:
    """Draws the similarity between the choices at two depth steps."""
    banks = analysis.of_kind(FEED_FORWARD)
    return Picture(
        name="similarity",
        title="Similarity of expert choice between depth steps",
        absent=why_nothing_is_chosen(analysis) or why_nothing_repeats(analysis),
        table=lambda: stacked(
            [
                pair_table(
                    each,
                    jaccard=each.similarity.jaccard_RR,
                    shared=each.similarity.shared_RR,
                    tokens=each.similarity.pairs_RR,
                )
                for each in analysis.banks
                if each.bank.chosen_by != "nobody"
            ]
        ),
        draw=lambda: _draw_squares(
            banks, lambda each: each.similarity.jaccard_RR, "Similarity of choice", "Jaccard, 0 … 1"
        ),
    )


def repeat_overlap(analysis: Analysis) -> Picture:
    """Draws the overlap between the usage of two depth steps."""
    banks = analysis.of_kind(FEED_FORWARD)
    return Picture(
        name="repeat_overlap",
        title="Overlap of expert usage between repeats",
        absent=why_usage_is_fixed(analysis) or why_nothing_repeats(analysis),
        table=lambda: stacked(
            [
                pair_table(each, overlap=each.usage.overlap_RR)
                for each in analysis.banks
                if each.bank.chosen_by == "tokens"
            ]
        ),
        draw=lambda: _draw_squares(
            banks, lambda each: each.usage.overlap_RR, "Overlap of usage", "overlap, 0 … 1"
        ),
    )


def _draw_squares(
    banks: Sequence[BankAnalysis],
    values: Callable[[BankAnalysis], np.ndarray],
    name: str,
    unit: str,
) -> Any:
    shown = banks[: drawing.MAX_PANELS]
    columns = min(len(shown), 2)
    lines = -(-len(shown) // columns)
    figure = drawing.new_figure(0.5 + lines * (2.55 if columns == 2 else 3.6))
    panels = figure.subplots(lines, columns, squeeze=False).reshape(-1)
    matrices = [_without_diagonal(values(each)) for each in shown]
    high = drawing.high_end(matrices, 1.0)
    image = None
    for panel, each, matrix in zip(panels, shown, matrices, strict=False):
        image = drawing.heat(panel, matrix, low=0.0, high=high, square=True)
        drawing.row_names(panel, each.bank.depths)
        drawing.column_names(panel, each.bank.depths, room=9)
        drawing.label(panel, x="depth step", y="depth step")
        drawing.title(panel, f"{name}, layer {member_name(each.bank.member)}")
        _write_numbers(panel, matrix, high)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    drawing.colour_bar(figure, image, list(panels), unit, shrink=0.85)
    return figure


def _without_diagonal(matrix: np.ndarray) -> np.ndarray:
    return np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)


def _write_numbers(panel: Any, matrix: np.ndarray, high: float) -> None:
    """Writes the value into every cell if there is room."""
    if len(matrix) > 9:
        return
    for row, column in np.ndindex(matrix.shape):
        value = matrix[row, column]
        if np.isfinite(value):
            colour = "white" if value < 0.6 * high else "black"
            text = f"{value:.2f}".removeprefix("0")
            panel.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)


# ---- co-occurrence


def co_occurrence(analysis: Analysis) -> Picture:
    """Draws which experts serve the same token at the same depth step."""
    banks = analysis.of_kind(FEED_FORWARD)
    absent = why_nothing_is_chosen(analysis)
    if not absent and not any(_has_pairs(each) for each in banks):
        absent = "Every token has one expert at a time: no two serve it together."
    return Picture(
        name="co_occurrence",
        title="Experts that work together",
        absent=absent,
        table=lambda: stacked([_together_rows(each) for each in banks]),
        draw=lambda: _draw_together(banks),
    )


def _has_pairs(each: BankAnalysis) -> bool:
    together_EE = each.similarity.together_EE
    return bool(together_EE.sum() > np.trace(together_EE))


def _together_rows(each: BankAnalysis) -> Table:
    experts, together_EE = each.bank.num_experts, each.similarity.together_EE
    return {
        "member": np.full(experts**2, each.bank.member),
        "expert_a": np.repeat(np.arange(experts), experts),
        "expert_b": np.tile(np.arange(experts), experts),
        "tokens": together_EE.reshape(-1),
    }


def _conditional(each: BankAnalysis) -> np.ndarray:
    """Returns the share of a row's tokens that the column also serves, in the picture's order."""
    together_EE = each.similarity.together_EE
    alone_E = np.diagonal(together_EE)
    order = np.argsort(-alone_E, kind="stable")
    if each.bank.num_repeats > 1:
        order = preference_order(each.usage.preference_RE)
    with np.errstate(invalid="ignore"):
        share_EE = np.where(alone_E[:, None] > 0, together_EE / alone_E[:, None], np.nan)
    return _without_diagonal(share_EE)[np.ix_(order, order)]


def _draw_together(banks: Sequence[BankAnalysis]) -> Any:
    shown = banks[: drawing.MAX_PANELS]
    columns = min(len(shown), 2)
    lines = -(-len(shown) // columns)
    figure = drawing.new_figure(0.5 + lines * (2.55 if columns == 2 else 4.0))
    panels = figure.subplots(lines, columns, squeeze=False).reshape(-1)
    matrices = [_conditional(each) for each in shown]
    high = drawing.high_end(matrices, 0.995)
    image = None
    for panel, each, matrix in zip(panels, shown, matrices, strict=False):
        image = drawing.heat(panel, matrix, low=0.0, high=high, square=True)
        drawing.column_names(panel, range(1, len(matrix) + 1), room=6)
        step = max(1, -(-len(matrix) // 6))
        panel.set_yticks(range(0, len(matrix), step), range(1, len(matrix) + 1, step))
        drawing.label(panel, x="other expert", y="expert")
        drawing.title(panel, f"Together, layer {member_name(each.bank.member)}")
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    drawing.colour_bar(figure, image, list(panels), "share of the expert's tokens", shrink=0.85)
    return figure
