"""Measures that judge claims: figures of routings and loss curves, from tensors and numbers.

Legend: T rows, D their width, E experts, K experts chosen per row, N classes.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Curve = Sequence[tuple[int, float]]  # (step, value), by rising step


def steps_to_reach(curve: Curve, target: float) -> float:
    """Returns the first step at which the linearly interpolated curve is at or below `target`;
    infinite if never.
    """
    step, value = curve[0]
    if value <= target:
        return float(step)
    for next_step, next_value in curve[1:]:
        if next_value <= target:
            return step + (value - target) / (value - next_value) * (next_step - step)
        step, value = next_step, next_value
    return math.inf


def representation_collapse(x_TD: Tensor, class_T: Tensor) -> float:
    """Returns RC = Tr(Σ_W · pinv(Σ_B)) of X-MoE (arXiv 2204.09179, §3.4); NaN for fewer than two
    classes.

    RC is small if the rows of one expert lie together, apart from the others'. Σ_W is the
    covariance of rows about their class's mean, averaged over rows; Σ_B that of the class means
    about their mean, averaged over classes with rows. In the paper all classes are equally large.
    Here a rare expert counts as one class, so that its mean does not vanish beside those of busy
    ones.
    """
    x_TD = x_TD.double()
    _, index_T, count_N = class_T.unique(return_inverse=True, return_counts=True)
    if len(count_N) < 2:
        return math.nan
    sums_ND = torch.zeros(len(count_N), x_TD.shape[1], dtype=x_TD.dtype, device=x_TD.device)
    means_ND = sums_ND.index_add_(0, index_T, x_TD) / count_N[:, None]
    within_TD = x_TD - means_ND[index_T]
    between_ND = means_ND - means_ND.mean(0)
    within_DD = within_TD.T @ within_TD / len(x_TD)
    between_DD = between_ND.T @ between_ND / len(count_N)
    return torch.trace(within_DD @ torch.linalg.pinv(between_DD, hermitian=True)).item()


def activated_fraction(experts_TK: Tensor, *, window_rows: int, num_experts: int) -> float:
    """Returns the share of experts that serve at least one row, averaged over windows of
    consecutive rows.

    Args:
        experts_TK: int64; whole windows, so that none spans two sequences.
    """
    windows_WN = experts_TK.reshape(-1, window_rows * experts_TK.shape[1])
    used_WE = torch.zeros(len(windows_WN), num_experts, device=experts_TK.device).scatter_(
        1, windows_WN, 1.0
    )
    return used_WE.mean(dtype=torch.float64).item()


def random_activated_fraction(top_k: int, num_experts: int, window_rows: int) -> float:
    """Returns the expected `activated_fraction` if every row draws K different experts at random.

    It is 1 − (1 − K/E)^rows.
    """
    return 1 - (1 - top_k / num_experts) ** window_rows


def effective_experts(load_E: Tensor) -> float:
    """Returns exp of the load's entropy: E if even, 1 if one expert serves all."""
    return torch.special.entr(load_E.double() / load_E.sum()).sum().exp().item()


def log_slope(curve: Curve) -> float:
    """Returns the least-squares slope of ln(value) per thousand steps; NaN for fewer than two
    points.
    """
    if len(curve) < 2:
        return math.nan
    steps = torch.tensor([step / 1000 for step, _ in curve], dtype=torch.float64)
    logs = torch.tensor([value for _, value in curve], dtype=torch.float64).log()
    steps = steps - steps.mean()
    return ((steps * logs).sum() / steps.square().sum()).item()


def thinned(curve: Curve, most: int = 100) -> list[tuple[int, float]]:
    """Returns at most that many points, evenly spaced, including the last."""
    if len(curve) <= most:
        return list(curve)
    return [curve[round(index * (len(curve) - 1) / (most - 1))] for index in range(most)]
