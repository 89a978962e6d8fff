"""Fits L = E + A·(N_once + r^φ·N_rec)^(−α) to validation losses, with a bootstrap interval for φ.

An arm has two layers that a token passes once and a core of 4/r layers, applied r times; φ = 1 says
that a loop is worth as much as layers of its own, φ = 0 that it adds nothing (arXiv 2604.21106).
For given φ and α the law is linear in E and A, so the best fit on a grid of (φ, α) is the point
whose power correlates most with the arms' mean losses: no start values, no local minimum.

The bootstrap draws residuals around the arms' means, without what a seed adds to all arms, and
scales them for the degrees of freedom that the means take. It leaves out the law's own misfit,
which is returned beside it.

Legend: A arms, S seeds, D bootstrap draws, P points of the grid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PHIS = np.linspace(-1.0, 2.0, 301)
ALPHAS = np.geomspace(0.05, 2.0, 120)
_CHUNK = 100  # draws at a time: 30 MB of correlations
Numbers = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class LoopFit:
    """Holds the law's parameters and how sure φ is."""

    phi: float
    alpha: float
    scale: float  # A, for numbers of parameters N
    floor: float  # E, nats per token
    interval: tuple[float, float]  # of φ, 95 %; an end of PHIS means "or beyond"
    draws: np.ndarray  # φ of every bootstrap draw, (D,)
    misfit: float  # largest difference of an arm's mean to the law, nats
    noise: float  # standard error of an arm's mean, nats


def effective(layers_A: Numbers, loops_A: Numbers, phi: float) -> np.ndarray:
    """Returns N_once + r^φ·N_rec of arms whose layers have these parameters, (A,)."""
    loops = np.asarray(loops_A, float)
    return np.asarray(layers_A) * (2 + 4 * loops ** (phi - 1))


def fit(
    layers_A: Numbers,
    loops_A: Numbers,
    losses_AS: np.ndarray,
    *,
    draws: int = 2000,
    seed: int = 0,
) -> LoopFit:
    """Fits the law to losses, in nats per token, of the same seeds in every arm.

    Raises:
        ValueError: there are fewer than five arms or two seeds.
    """
    num_arms, num_seeds = losses_AS.shape
    if num_arms < 5 or num_seeds < 2:
        raise ValueError(f"{num_arms} arms with {num_seeds} seeds: the fit needs 5 with 2 each")
    powers_PA = np.concatenate(
        [effective(layers_A, loops_A, phi) ** -ALPHAS[:, None] for phi in PHIS]
    )
    centred_PA = powers_PA - powers_PA.mean(1, keepdims=True)
    centred_PA /= np.linalg.norm(centred_PA, axis=1, keepdims=True)

    mean_A = losses_AS.mean(1)
    point = int((centred_PA @ mean_A).argmax())
    phi, alpha = float(PHIS[point // len(ALPHAS)]), float(ALPHAS[point % len(ALPHAS)])
    scale, floor = (float(each) for each in np.polyfit(powers_PA[point], mean_A, 1))
    law_A = floor + scale * powers_PA[point]

    residuals_AS = losses_AS - mean_A[:, None] - losses_AS.mean(0) + losses_AS.mean()
    residuals_AS *= math.sqrt(losses_AS.size / ((num_arms - 1) * (num_seeds - 1)))
    random = np.random.default_rng(seed)
    drawn_DA = random.choice(residuals_AS.ravel(), (draws, num_arms, num_seeds)).mean(2)
    phis_D = np.concatenate(
        [
            PHIS[(chunk @ centred_PA.T).argmax(1) // len(ALPHAS)]
            for chunk in np.array_split(law_A + drawn_DA, max(1, draws // _CHUNK))
        ]
    )
    low, high = np.quantile(phis_D, [0.025, 0.975])
    misfit, noise = np.abs(mean_A - law_A).max(), residuals_AS.std() / math.sqrt(num_seeds)
    interval = (float(low), float(high))
    return LoopFit(phi, alpha, scale, floor, interval, phis_D, float(misfit), float(noise))
