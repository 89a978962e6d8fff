"""Adds a loss from one file: the text is read out after every depth step, not only after the last.

    cd examples && python add_a_loss.py        # two runs on 2 ranks, and add_a_loss.png

`train.losses` names the function with its weight. The model calls it with the states after all depth
steps. Every depth step of such a model can answer by itself.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor

import moebius
from moebius.model.execution.depth_losses import DepthStates


def read_early(depths: DepthStates, power: float = 1.0) -> Tensor:
    """Returns the weighted mean of the cross-entropies of all depth steps but the last, (B,).

    A step's weight is its number to a power: `add_a_loss:read_early?power=2` favours late steps.
    """
    early = depths.states_L[:-1]
    weights = [float(step) ** power for step in range(1, len(early) + 1)]
    losses = [
        weight * depths.cross_entropy(state_BSD)
        for weight, state_BSD in zip(weights, early, strict=True)
    ]
    return torch.stack(losses).sum(0) / sum(weights)


@torch.no_grad()
def loss_by_depth(run: str) -> list[float]:
    """Reads validation text out after every depth step of a trained run: nats per byte."""
    trained = moebius.load(run)
    norm = trained.model.final_norm or torch.nn.Identity()
    rows = next(trained.rows(max_rows=32))
    found = []
    for state_BSD in trained.trace(rows).hidden_LBSD[1:]:
        logits_BSV = trained.model.head(norm(state_BSD))
        found.append(F.cross_entropy(logits_BSV.mT, rows.targets_BS).item())
    return found


def main() -> None:
    """Trains without and with the loss, and draws what every depth step has learned."""
    by_depth = list[float]()
    figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
    runs = {"plain": "{}", "read_early": '{"add_a_loss:read_early" = 0.5}'}
    for name, losses in runs.items():
        moebius.fit(moebius.recipe("small.toml", f"train.losses={losses}"), f"runs/{name}")
        by_depth = loss_by_depth(f"runs/{name}")
        print(name, *(f"{loss:.2f}" for loss in by_depth))
        axis.plot(range(1, len(by_depth) + 1), by_depth, marker="o", label=name)
    axis.set(xlabel="read out after depth step", ylabel="validation loss, nats per byte")
    axis.set_xticks(range(1, len(by_depth) + 1))
    axis.legend()
    figure.savefig("add_a_loss.png", dpi=120)


if __name__ == "__main__":
    main()
