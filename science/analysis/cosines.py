"""How alike the rows of the feed-forward's matrices are: their mean pairwise cosine.

A row of W1 is what a hidden unit reads, a row of W2 what it writes, a row of W_r what a router's
expert answers to. The mean over all pairs of n rows needs no pair: with rows of length 1 that add up
to S it is (|S|² − n) / (n² − n). Pairs of the same expert and of different ones are told apart.
Rows of zeros have no direction and are left out.

Legend: E experts, F rows of an expert, D width of a row.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moebius.model.layers import DenseMLP
from moebius.model.moe import SparseFeedForward
from moebius.model.routers.cosine import CosineRouter
from moebius.model.routers.sut import SutRouter
from moebius.model.transformer import Transformer

MATRICES = ("W1", "W2", "W_r")


@dataclass(frozen=True)
class RowCosine:
    """Holds the mean cosine of pairs of rows of one matrix; not a number where there are none."""

    member: int  # of the group
    matrix: str  # one of MATRICES
    experts: int
    rows: int
    width: int
    same_expert: float
    different_experts: float
    all_pairs: float


@torch.no_grad()
def row_cosines(model: Transformer) -> list[RowCosine]:
    """Returns the mean cosines of every feed-forward's matrices."""
    found = []
    for member, layer in enumerate(model.group):
        for matrix, rows_EFD in _matrices(layer.feed_forward):
            found.append(_row_cosine(member, matrix, rows_EFD))
    return found


def _matrices(feed_forward: Any) -> list[tuple[str, Tensor]]:
    """Returns the matrices with their rows by expert, (E, F, D)."""
    if isinstance(feed_forward, DenseMLP):
        return [("W1", feed_forward.up.weight[None]), ("W2", feed_forward.down.weight.T[None])]
    assert isinstance(feed_forward, SparseFeedForward)
    experts: Any = feed_forward.sparse.experts
    found = [("W1", experts.w_up.transpose(1, 2)), ("W2", experts.w_down)]
    rows_ED = _router_rows(feed_forward.router)
    return [*found, ("W_r", rows_ED[:, None])]


def _router_rows(router: Any) -> Tensor:
    """Returns what an expert's score is a product with."""
    if isinstance(router, CosineRouter):
        return router.expert_embedding
    return router.output.weight if isinstance(router, SutRouter) else router.weight


def _row_cosine(member: int, matrix: str, rows_EFD: Tensor) -> RowCosine:
    rows_EFD = rows_EFD.double()
    length_EF = rows_EFD.norm(dim=2)
    unit_EFD = rows_EFD / torch.where(length_EF > 0, length_EF, 1.0)[:, :, None]
    count_E = (length_EF > 0).sum(1).double()
    sum_ED = unit_EFD.sum(1)
    count = float(count_E.sum())
    all_sum, all_pairs = float(sum_ED.sum(0).square().sum()) - count, count * (count - 1)
    same_sum = float(sum_ED.square().sum()) - count
    same_pairs = float((count_E * (count_E - 1)).sum())
    experts, rows, width = rows_EFD.shape
    return RowCosine(
        member,
        matrix,
        experts,
        experts * rows,
        width,
        same_expert=_mean(same_sum, same_pairs),
        different_experts=_mean(all_sum - same_sum, all_pairs - same_pairs),
        all_pairs=_mean(all_sum, all_pairs),
    )


def _mean(total: float, pairs: float) -> float:
    return total / pairs if pairs else float(np.nan)
