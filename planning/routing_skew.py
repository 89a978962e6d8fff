"""Models uneven routing as a distribution of the hottest rank's load over the mean.

Loads are either recorded in a run's metrics.jsonl (per expert, logged step and depth step) or
drawn: the shares of a row's experts then follow a symmetric Dirichlet distribution with
`concentration` per expert, whose coefficient of variation is about 1/√concentration. Ranks hold
contiguous blocks, so more experts per rank even out more.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .workload import Bank, blocks_of_heads

DRAWS = 2000
# The least of the concentrations measured in the second half of the recipe smoke (160 steps, 4
# ranks, CPU): 14 for the feed-forward's routers, 6.7 and 5.0 for V's and O's.
CONCENTRATION = 5.0
_METRICS = {"feed_forward": "expert_load", "attention": "attention_expert_load"}


QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
BALANCED = dict.fromkeys(QUANTILES, 1.0)


@dataclass(frozen=True)
class RoutingSkew:
    """Models how uneven the ranks' loads are: recorded, drawn from a Dirichlet distribution, or
    balanced.
    """

    concentration: float | None = None
    # Kind of router → (observations, experts).
    recorded: dict[str, np.ndarray] = field(default_factory=dict, compare=False)
    source: str = "balanced"
    _known: dict[tuple, dict[str, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def factor(self, bank: Bank, num_ranks: int) -> dict[str, float]:
        """Returns quantiles of the hottest rank's load over the mean, for contiguous blocks."""
        if num_ranks == 1 or bank.balanced or (self.concentration is None and not self.recorded):
            return BALANCED
        key = (bank.router, bank.heads, bank.num_experts, num_ranks)
        if key not in self._known:
            loads_of = self._recorded_loads if self.recorded else self._draw
            self._known[key] = _quantiles(loads_of(bank, num_ranks))
        return self._known[key]

    def check(self, banks: list[Bank]) -> None:
        """Checks that the recorded loads belong to these banks.

        Raises:
            ValueError: a bank's loads are missing, or of another number of experts.
        """
        for bank in banks:
            if self.recorded and not bank.balanced:
                found = self.recorded.get(bank.router)
                if found is None:
                    raise ValueError(
                        f"{self.source}: no loads of the {bank.router} experts were recorded"
                    )
                if found.shape[1] != bank.total_experts:
                    raise ValueError(
                        f"{self.source}: {found.shape[1]} {bank.router} experts were recorded, but "
                        f"the model has {bank.total_experts}; take a run of this model, or a "
                        "Dirichlet concentration"
                    )

    def _recorded_loads(self, bank: Bank, num_ranks: int) -> np.ndarray:
        """Returns recorded loads by rank, (observations, ranks)."""
        loads = self.recorded[bank.router].reshape(
            -1, bank.heads, self.recorded[bank.router].shape[1] // bank.heads
        )
        idle = bank.num_experts - loads.shape[2]  # experts that only a rounded-up bank has
        loads = np.pad(loads, ((0, 0), (0, 0), (0, max(0, idle)))).reshape(len(loads), -1)
        edges = np.linspace(0, loads.shape[1], num_ranks + 1).round().astype(int)
        return np.add.reduceat(loads, edges[:-1], axis=1)

    def _draw(self, bank: Bank, num_ranks: int) -> np.ndarray:
        """Returns drawn loads by rank, (draws, ranks).

        A block of m Dirichlet components has the share of one component with m-fold weight.
        """
        draws, loads = np.random.default_rng(0), np.zeros((DRAWS, num_ranks))
        for head in range(bank.heads):
            sizes = np.array(
                [blocks_of_heads(bank, num_ranks, rank)[head] for rank in range(num_ranks)]
            )
            held = np.flatnonzero(sizes)
            loads[:, held] += draws.dirichlet(self.concentration * sizes[held], DRAWS) / bank.heads
        return loads


def _quantiles(load_NP: np.ndarray) -> dict[str, float]:
    hottest = load_NP.max(1) / load_NP.mean(1)
    return {name: float(np.quantile(hottest, share)) for name, share in QUANTILES.items()}


def dirichlet_skew(concentration: float) -> RoutingSkew:
    """Returns loads that follow a Dirichlet distribution.

    Args:
        concentration: per expert; a large value is even, 1 is very uneven.

    Raises:
        ValueError: the concentration is not positive.
    """
    if not 0 < concentration < float("inf"):
        raise ValueError(
            f"a Dirichlet concentration must be above 0, got {concentration:g}; 100 is even, 1 is "
            "very uneven"
        )
    return RoutingSkew(
        concentration, source=f"Dirichlet loads of concentration {concentration:g} per expert"
    )


def recorded_skew(run: Path) -> RoutingSkew:
    """Reads the loads that a run logged, from its folder or its metrics.jsonl.

    Raises:
        ValueError: the file cannot be read or holds no loads.
    """
    path = run / "metrics.jsonl" if run.is_dir() else run
    try:
        lines = [
            json.loads(line)
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); name a run folder or its metrics.jsonl"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON lines: {error}") from None
    found: dict[str, list[list[float]]] = {}
    for line in lines:
        for router in ("feed_forward", "value", "output", "attention"):
            loads = line.get(_METRICS.get(router, f"{router}_expert_load"), [])
            found.setdefault(router, []).extend(load for load in loads if sum(load) > 0)
    recorded = {router: np.array(loads) for router, loads in found.items() if loads}
    if not recorded:
        raise ValueError(
            f"{path}: has no expert loads; a run of a model with experts writes them at every "
            "logged step"
        )
    observations = len(next(iter(recorded.values())))
    return RoutingSkew(recorded=recorded, source=f"{observations} loads recorded in {path}")
