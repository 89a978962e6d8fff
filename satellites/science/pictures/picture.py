"""Defines a picture: its figures as a table, its drawing, or why there is none.

Some questions have no answer for some models: a dense model has no expert usage. A sentence then
says so, and nothing is drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..analysis.analyse import Analysis, BankAnalysis
from ..analysis.banks import FEED_FORWARD, member_name

Table = dict[str, np.ndarray]

KIND_NAMES = {
    FEED_FORWARD: "feed-forward",
    "value": "V of attention",
    "output": "O of attention",
    "attention": "attention (Q and O)",
}


@dataclass(frozen=True)
class Picture:
    """Holds one picture of an analysis."""

    name: str  # of its files
    title: str
    absent: str = ""  # why there is no picture; "" where there is one
    table: Callable[[], Table] = dict
    draw: Callable[[], Any] | None = None  # returns a matplotlib figure


def why_nothing_is_chosen(analysis: Analysis) -> str:
    """Returns why tokens choose no feed-forward experts; "" if they do."""
    banks = analysis.of_kind(FEED_FORWARD)
    if not banks:
        return "The feed-forward of this model is dense: no router chooses experts there."
    experts = analysis.config.model.experts
    kind = experts.router.kind if experts is not None else ""
    if any(each.bank.chosen_by == "nobody" for each in banks):
        return (
            f"This model mixes (router.kind={kind!r}): every expert reads mixtures of all tokens of a "
            "group, so no token has experts of its own that could be counted."
        )
    number = banks[0].bank.num_experts
    if number == 1:
        return "The feed-forward has one expert: there is nothing to choose."
    if all(each.takes_all for each in banks):
        return f"Every token goes through all {number} experts: nothing is chosen."
    return ""


def why_usage_is_fixed(analysis: Analysis) -> str:
    """Returns why the feed-forward's usage is uninformative; "" if it is not."""
    reason = why_nothing_is_chosen(analysis)
    if not reason and all(
        each.bank.chosen_by == "experts" for each in analysis.of_kind(FEED_FORWARD)
    ):
        return (
            "In this model experts choose their tokens, equally many at every depth step: the usage "
            "of all experts is the same by construction."
        )
    return reason


def why_nothing_repeats(analysis: Analysis) -> str:
    """Returns why repeats of a layer cannot be compared; "" if they can."""
    if analysis.config.model.num_repeats > 1:
        return ""
    return (
        f"No layer of this model is applied twice (layers_per_group = num_layers = "
        f"{analysis.config.model.num_layers}): its experts belong to one depth step each, and there are no "
        "two depth steps whose experts could be compared."
    )


def bank_name(each: BankAnalysis) -> str:
    """Returns a panel's name: the kind, the layer's letter and its depth steps."""
    bank = each.bank
    steps = ", ".join(map(str, bank.depths[:3])) + (", …" if len(bank.depths) > 3 else "")
    plural = "s" if len(bank.depths) > 1 else ""
    return f"layer {member_name(bank.member)} (depth step{plural} {steps})"


def depth_rows(banks: Sequence[BankAnalysis]) -> list[tuple[BankAnalysis, int]]:
    """Returns (bank, repeat) of all rows of a picture with one row per depth step, by layer."""
    return [(each, repeat) for each in banks for repeat in range(each.bank.num_repeats)]


def row_labels(rows: Sequence[tuple[BankAnalysis, int]]) -> list[str]:
    """Returns the names of such rows: the depth step, and the layer's letter if it recurs."""
    return [
        f"{each.bank.depths[repeat]} {member_name(each.bank.member)}"
        if each.bank.num_repeats > 1
        else str(each.bank.depths[repeat])
        for each, repeat in rows
    ]


def depth_label(rows: Sequence[tuple[BankAnalysis, int]]) -> str:
    """Returns the axis label of such rows."""
    return "depth step and layer" if any(r > 0 for _, r in rows) else "depth step"


def stacked(tables: Sequence[Table]) -> Table:
    """Concatenates tables with the same columns."""
    if not tables:
        return {}
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def pair_table(each: BankAnalysis, **matrices_RR: np.ndarray) -> Table:
    """Returns matrices over two repeats of a bank as rows (depth_a, depth_b, …)."""
    depths = np.asarray(each.bank.depths)
    size = len(depths) ** 2
    columns: Table = {
        "kind": np.full(size, each.bank.kind),
        "member": np.full(size, each.bank.member),
        "depth_a": np.repeat(depths, len(depths)),
        "depth_b": np.tile(depths, len(depths)),
    }
    return columns | {name: matrix.reshape(-1) for name, matrix in matrices_RR.items()}
