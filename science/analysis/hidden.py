"""How many of the feed-forward's hidden units pass their ReLU, at every depth step.

A unit passes for a token where what it computes before the ReLU is above 0. Of experts those count
that the token goes to; gate weights change nothing about a sign. The share is that of (token, unit)
pairs: 0.5 is what chance gives, 0.05 a sparse code inside of the experts, 0 a dead layer.

The kernels keep no hidden rows, so the tap multiplies the experts' first matrices once more: about a
third of the feed-forward's own work.

Legend: U rows of a layer, D their width, N routes, T tokens, L depth steps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moebius.model.experts import ExpertMLPs
from moebius.model.layers import DenseMLP
from moebius.model.moe import SparseLayer
from moebius.model.routing import Routes
from moebius.model.transformer import Transformer
from moebius.train.record.route_tap import depths_of

PARTS = ("experts", "shared", "dense")


@dataclass(frozen=True)
class HiddenPass:
    """Holds how many units passed in one call of a feed-forward."""

    depth: int  # from 1
    part: str  # one of PARTS
    passed_N: Tensor  # int64: units above 0, of a row
    row_N: Tensor  # int64: the row
    num_rows: int
    width: int  # units of a row
    is_of_tokens: bool  # rows are tokens or parts of them; else mixtures of all


@contextmanager
def tap_hidden(model: Transformer) -> Iterator[list[HiddenPass]]:
    """Counts in every feed-forward with a ReLU while the context lasts; hooks that only look."""
    found: list[HiddenPass] = []
    hooks = []
    for name, module in model.named_modules():
        if not isinstance(module, ExpertMLPs | DenseMLP) or module.activation != "relu":
            continue
        depths = _endless(depths_of(model, name))
        if isinstance(module, DenseMLP):
            part = "shared" if name.endswith(".shared") else "dense"
            hooks.append(module.up.register_forward_hook(_dense_recorder(found, part, depths)))
        else:
            layer = model.get_submodule(name.rpartition(".")[0])
            assert isinstance(layer, SparseLayer)
            hooks.append(layer.register_forward_hook(_expert_recorder(found, module, depths)))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _endless(depths: list[int]) -> Iterator[int]:
    while True:
        yield from depths


def _dense_recorder(found: list[HiddenPass], part: str, depths: Iterator[int]) -> Any:
    def record(_module: Any, _inputs: tuple[Any, ...], output: Tensor) -> None:
        passed_T = (output > 0).sum(-1).flatten()
        row_T = torch.arange(len(passed_T), device=passed_T.device)
        found.append(
            HiddenPass(
                next(depths), part, passed_T, row_T, len(passed_T), output.shape[-1], True
            )
        )  # fmt: skip

    return record


def _expert_recorder(found: list[HiddenPass], experts: ExpertMLPs, depths: Iterator[int]) -> Any:
    def record(_layer: SparseLayer, inputs: tuple[Any, ...], _output: Tensor) -> None:
        rows_UD, routes = inputs[0], inputs[1]
        found.append(
            HiddenPass(
                depth=next(depths),
                part="experts",
                passed_N=_passed(experts, rows_UD.detach(), routes),
                row_N=routes.source_N,
                num_rows=len(rows_UD),
                width=experts.w_up.shape[2],
                is_of_tokens=not (routes.per_expert and routes.per_source),
            )
        )

    return record


@torch.no_grad()
def _passed(experts: ExpertMLPs, rows_UD: Tensor, routes: Routes) -> Tensor:
    """Returns how many units of its expert pass for every route, (N,)."""
    passed_N = torch.zeros_like(routes.expert_N)
    for expert in routes.expert_N.unique().tolist():
        of_expert = (routes.expert_N == expert).nonzero()[:, 0]
        rows_RD = rows_UD[routes.source_N[of_expert]].to(experts.dtype)
        hidden_RF = rows_RD @ experts.w_up[expert].to(experts.dtype)
        if experts.b_up is not None:
            hidden_RF = hidden_RF + experts.b_up[expert].to(experts.dtype)
        passed_N[of_expert] = (hidden_RF > 0).sum(1)
    return passed_N


class HiddenCounter:
    """Adds up, for every depth step, the units that passed and those that there were."""

    def __init__(self, num_depths: int) -> None:
        self.passed_LP = np.zeros((num_depths, len(PARTS)), dtype=np.int64)
        self.units_LP = np.zeros((num_depths, len(PARTS)), dtype=np.int64)

    def add(self, passes: list[HiddenPass], counted_T: Tensor) -> None:
        """Adds one pass of a model; of rows that are tokens those that count."""
        for one in passes:
            passed_N = one.passed_N
            if one.is_of_tokens:
                passed_N = passed_N[counted_T[one.row_N // (one.num_rows // len(counted_T))]]
            place = one.depth - 1, PARTS.index(one.part)
            self.passed_LP[place] += int(passed_N.sum())
            self.units_LP[place] += len(passed_N) * one.width

    @property
    def rate_LP(self) -> np.ndarray:
        """Returns the share that passed; not a number where there was nothing."""
        with np.errstate(invalid="ignore"):
            return self.passed_LP / self.units_LP
