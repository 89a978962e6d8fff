"""Measures how evenly runs use their feed-forward experts at the end of training, by arm and seed.

    python -m moebius_science.load_evenness runs/compare/balancing/*/seed-*

It averages `expert_load` over a run's last three recorded steps and reports three figures: the
perplexity of the load ÷ experts (1: even), averaged over depth steps; the load of the hottest
expert at any depth step, relative to the mean; and the share of experts with less than a tenth of
the mean.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import moebius

_LINES = 3
_IDLE = 0.1  # of an equal share


@dataclass(frozen=True)
class Evenness:
    """Holds the figures of one run."""

    perplexity: float  # ÷ experts
    hottest: float  # ÷ an equal share
    idle: float  # share of the experts


def evenness_of(load_DE: np.ndarray) -> Evenness:
    """Computes evenness from the load of every depth step's experts."""
    share_DE = load_DE / load_DE.sum(1, keepdims=True)
    num_experts = share_DE.shape[1]
    logarithms = np.log(share_DE, where=share_DE > 0, out=np.zeros_like(share_DE))
    perplexity_D = np.exp(-(share_DE * logarithms).sum(1))
    return Evenness(
        float(perplexity_D.mean() / num_experts),
        float(share_DE.max() * num_experts),
        float((share_DE < _IDLE / num_experts).mean()),
    )


def last_load(folder: Path) -> np.ndarray:
    """Returns the mean load of a run's last lines, (depth steps, experts).

    Raises:
        ValueError: the folder is not a run trained with experts.
    """
    records = moebius.history(folder).records()
    loads = [record["expert_load"] for record in records if record.get("expert_load")]
    if not loads:
        raise ValueError(f"{folder}: has no records of expert load: no run with experts")
    return np.array(loads[-_LINES:]).mean(0)


def main() -> None:
    """Prints a line for every run."""
    parser = argparse.ArgumentParser(
        description="How evenly runs use their feed-forward experts at the end."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    for run in parser.parse_args().runs:
        try:
            found = evenness_of(last_load(run))
        except ValueError as error:
            parser.error(str(error))
        print(
            f"{run.parent.name}/{run.name}: perplexity {found.perplexity:.3f}, "
            f"hottest {found.hottest:.1f}, idle {found.idle:.4f}"
        )


if __name__ == "__main__":
    main()
