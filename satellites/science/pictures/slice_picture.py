"""Draws the experts of single vocabulary items by depth step."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..analysis.analyse import Analysis, BankAnalysis
from ..analysis.banks import FEED_FORWARD
from ..analysis.usage import preference_order
from . import drawing
from .picture import (
    Picture,
    Table,
    depth_label,
    depth_rows,
    row_labels,
    stacked,
    why_nothing_is_chosen,
    why_nothing_repeats,
)

QUANTILE = 0.95  # the paper's, of an item's slices


def item_slices(analysis: Analysis) -> Picture:
    """Draws heat maps of the depth steps at which an item's experts serve it."""
    banks = analysis.of_kind(FEED_FORWARD)
    return Picture(
        name="item_slices",
        title="Experts of single tokens",
        absent=why_nothing_is_chosen(analysis) or why_nothing_repeats(analysis) or _none(analysis),
        table=lambda: stacked(
            [_rows(analysis, each, place) for each in banks for place in _places(analysis)]
        ),
        draw=lambda: _draw(analysis, banks),
    )


def _none(analysis: Analysis) -> str:
    return "" if analysis.items else "No item was to be looked at."


def _places(analysis: Analysis) -> range:
    return range(len(analysis.items))


def _rows(analysis: Analysis, each: BankAnalysis, place: int) -> Table:
    assert each.slices is not None
    repeats, experts = each.bank.num_repeats, each.bank.num_experts
    item = analysis.items[place]
    size = repeats * experts
    return {
        "token_id": np.full(size, item.token_id),
        "token": np.full(size, item.text),
        "occurrences": np.full(size, analysis.item_counts_V[item.token_id]),
        "member": np.full(size, each.bank.member),
        "depth": np.repeat(each.bank.depths, experts),
        "expert": np.tile(np.arange(experts), repeats),
        "routes": each.slices.counts_KRE[place].reshape(-1),
        "share_of_expert": each.slices.preference_RE(place).reshape(-1),
    }


def _draw(analysis: Analysis, banks: Sequence[BankAnalysis]) -> Any:
    rows = depth_rows(banks)
    figure = drawing.new_figure(0.5 + len(analysis.items) * (0.6 + 0.13 * max(len(rows), 5)))
    panels = figure.subplots(len(analysis.items), 1, sharex=True, squeeze=False)[:, 0]
    image = None
    for place, panel in enumerate(panels):
        image = drawing.heat(panel, np.concatenate(_sorted_slices(banks, place)), low=0.0, high=1.0)
        drawing.row_names(panel, row_labels(rows))
        drawing.part_groups(panel, [each.bank.member for each, _ in rows])
        item = analysis.items[place]
        count = analysis.item_counts_V[item.token_id]
        drawing.label(panel, y=depth_label(rows) if len(rows) >= 10 else "depth step")
        drawing.title(panel, f"{_shown(item.text)}, {count:,} times")
    drawing.column_names(panels[-1], range(1, banks[0].bank.num_experts + 1), room=12)
    drawing.label(panels[-1], x="experts, sorted for every token and layer", y="depth step")
    drawing.colour_bar(figure, image, list(panels), "share of the expert's work for this token")
    return figure


def _sorted_slices(banks: Sequence[BankAnalysis], place: int) -> list[np.ndarray]:
    """Returns an item's slice of every bank, experts sorted from early depth steps to late ones."""
    found = []
    for each in banks:
        assert each.slices is not None
        preference_RE = each.slices.preference_RE(place)
        found.append(preference_RE[:, preference_order(preference_RE, quantile=QUANTILE)])
    return found


def _shown(text: str) -> str:
    """Returns the item in quotes, with visible blanks and line breaks."""
    text = text.replace("\n", "↵").replace("\t", "→").replace("$", r"\$")
    return f"“{text}”"
