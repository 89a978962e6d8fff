"""Fits L = E + A·(N_once + r^φ·N_rec)^(−α) to validation losses, with a bootstrap interval for φ.

φ says how much a loop adds: 1 as much as layers of its own, 0 nothing (arXiv 2604.21106). For given
φ and α the law is linear in E and A, so the best fit on a grid of (φ, α) is the point whose power
correlates most with the losses: no start values, no local minimum. All arms have the same seeds, so
a least-squares fit to the runs is one to the arms' means.

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

    def law(self, effective_A: np.ndarray) -> np.ndarray:
        """Returns the losses of models with these effective numbers of parameters."""
        return self.floor + self.scale * effective_A**-self.alpha


def effective(once: np.ndarray, recurrent: np.ndarray, loops: np.ndarray, phi: float) -> np.ndarray:
    """Returns N_once + r^φ·N_rec."""
    return once + loops**phi * recurrent


def fit(
    once_A: Sequence[float],
    recurrent_A: Sequence[float],
    loops_A: Sequence[int],
    losses_AS: np.ndarray,
    *,
    draws: int = 2000,
    seed: int = 0,
) -> LoopFit:
    """Fits the law.

    Args:
        once_A: parameters that every token passes once, without embeddings.
        recurrent_A: parameters of the distinct layers that are looped.
        loops_A: how often.
        losses_AS: validation losses in nats per token; the same seeds in every arm.
        draws: of the bootstrap.
        seed: of its random numbers.

    Raises:
        ValueError: there are fewer than five arms or two seeds.
    """
    num_arms, num_seeds = losses_AS.shape
    if num_arms < 5 or num_seeds < 2:
        raise ValueError(f"{num_arms} arms with {num_seeds} seeds: the fit needs 5 with 2 each")
    once, recurrent, loops = (np.asarray(x, float) for x in (once_A, recurrent_A, loops_A))
    powers_PA = np.concatenate(
        [effective(once, recurrent, loops, phi) ** -ALPHAS[:, None] for phi in PHIS]
    )
    centred_PA = powers_PA - powers_PA.mean(1, keepdims=True)
    centred_PA /= np.linalg.norm(centred_PA, axis=1, keepdims=True)

    mean_A = losses_AS.mean(1)
    point = int((centred_PA @ mean_A).argmax())
    phi, alpha = float(PHIS[point // len(ALPHAS)]), float(ALPHAS[point % len(ALPHAS)])
    scale = float(np.polyfit(powers_PA[point], mean_A, 1)[0])
    floor = float(mean_A.mean() - scale * powers_PA[point].mean())
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
    return LoopFit(
        *(phi, alpha, scale, floor, (float(low), float(high)), phis_D),
        misfit=float(np.abs(mean_A - law_A).max()),
        noise=float(residuals_AS.std() / math.sqrt(num_seeds)),
    )
