"""A stand-in for the kernels of `add_norm` on any device, with the backward pass in float64.

It has the kernels' interface, so that everything around them can be tested without a GPU.
"""

import sys

import pytest
import torch
from torch import Tensor

from moebius.kernels.fused import norm
from moebius.model import block


def add_norm(
    x_TD: Tensor,
    y_TD: Tensor | None,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    eps: float,
    outputs: tuple[Tensor | None, ...],
    statistics: tuple[Tensor, Tensor],
) -> None:
    total, normed, low_normed, low_total = outputs
    s_TD = x_TD if y_TD is None else x_TD + y_TD
    if total is not None:
        total.copy_(s_TD)
    wide_TD = s_TD.double()
    mean_T = wide_TD.mean(1)
    inverse_T = (wide_TD.var(1, correction=0) + eps).rsqrt()
    n_TD = (wide_TD - mean_T[:, None]) * inverse_T[:, None]
    n_TD = n_TD if weight_D is None else n_TD * weight_D
    n_TD = (n_TD if bias_D is None else n_TD + bias_D).float()
    for out, value in ((normed, n_TD), (low_normed, n_TD), (low_total, s_TD)):
        if out is not None:
            out.copy_(value)
    for out, value in zip(statistics, (mean_T, inverse_T), strict=True):
        out.copy_(value)


def add_norm_backward(
    s_TD: Tensor,
    weight_D: Tensor | None,
    statistics: tuple[Tensor, Tensor],
    gradients: tuple[Tensor | None, ...],
    outputs: tuple[Tensor, Tensor | None],
    parameters: tuple[Tensor | None, Tensor | None],
    *,
    second_is_normed: bool,
) -> None:
    of_total, of_normed, first, second = (
        torch.zeros_like(s_TD, dtype=torch.float64) if grad is None else grad.double()
        for grad in gradients
    )
    g_TD = of_normed + first + (second if second_is_normed else 0)
    rest_TD = of_total + (0 if second_is_normed else second)
    mean_T, inverse_T = (each.double()[:, None] for each in statistics)
    unit_TD = (s_TD.double() - mean_T) * inverse_T
    for out, rows in zip(parameters, (g_TD * unit_TD, g_TD), strict=True):
        if out is not None:
            out.copy_(rows.sum(0))
    g_TD = g_TD if weight_D is None else g_TD * weight_D
    along_T = (g_TD * unit_TD).mean(1, keepdim=True)
    d_TD = (g_TD - g_TD.mean(1, keepdim=True) - unit_TD * along_T) * inverse_T + rest_TD
    for out in outputs:
        if out is not None:
            out.copy_(d_TD.float())


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Lets all norms of layers be fused, as on a GPU, by this file's kernels.

    Returns a list that grows by the shape of the rows with every call.
    """
    calls: list[torch.Size] = []

    def runs_fused(backend: str, x: Tensor, *given: object) -> bool:
        calls.append(x.shape)
        return True

    monkeypatch.setattr(norm, "kernels", lambda name: sys.modules[__name__])
    monkeypatch.setattr(block, "runs_fused", runs_fused)
    monkeypatch.setattr(norm, "runs_fused", lambda *given: True)
    return calls
