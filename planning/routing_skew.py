"""Models uneven routing as the hottest rank's load over the mean.

The loads are those that a run recorded in its metrics.jsonl, per expert, logged step and depth
step; without a run, every expert gets equally many rows. Ranks hold contiguous blocks, so more
experts per rank even out more.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..data_pipeline.words import run_and_step
from ..distributed.layout import expert_blocks
from .workload import Bank

MEDIAN, FULL = 0.5, 0.99  # quantiles of the load: for time, and for memory


@dataclass(frozen=True, eq=False)
class RoutingSkew:
    """Knows how uneven the ranks' loads are: as recorded, or balanced."""

    recorded: Mapping[str, np.ndarray] = field(default_factory=dict)  # (observations, experts)
    source: str = "balanced"

    def factor(self, bank: Bank, num_ranks: int, quantile: float = MEDIAN) -> float:
        """Returns a quantile of the hottest rank's load over the mean, for contiguous blocks."""
        if bank.balanced or not self.recorded:
            return bank.fullest(num_ranks) * num_ranks / bank.total_experts
        return _quantile(self, bank.router, num_ranks, quantile)

    def check(self, banks: list[Bank]) -> None:
        """Checks that the recorded loads belong to these banks.

        Raises:
            ValueError: a bank's loads are missing, or of another number of experts.
        """
        for bank in banks if self.recorded else ():
            if bank.balanced:
                continue
            if bank.router not in self.recorded:
                raise ValueError(
                    f"{self.source}: no loads of the {bank.router} experts were recorded"
                )
            found = self.recorded[bank.router].shape[1]
            if found != bank.total_experts:
                raise ValueError(
                    f"{self.source}: {found} {bank.router} experts were recorded, but the model has "
                    f"{bank.total_experts}; take a run of this model"
                )


@lru_cache(maxsize=4096)
def _quantile(skew: RoutingSkew, router: str, num_ranks: int, quantile: float) -> float:
    load_NE = skew.recorded[router]
    starts = [block.start for block in expert_blocks(load_NE.shape[1], num_ranks)]
    load_NP = np.add.reduceat(load_NE, starts, axis=1)
    return float(np.quantile(load_NP.max(1) / load_NP.mean(1), quantile))


def recorded_skew(run: Path) -> RoutingSkew:
    """Reads the loads that a run logged, from its folder or its metrics.jsonl.

    Raises:
        ValueError: the file cannot be read or holds no loads.
    """
    run, _ = run_and_step(run)
    path = run / "metrics.jsonl" if run.is_dir() else run
    try:
        text = path.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); name a run folder or its metrics.jsonl"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON lines: {error}") from None
    found: dict[str, list[list[float]]] = {}
    for line in lines:
        for router in ("feed_forward", "value", "output", "attention"):
            key = "expert_load" if router == "feed_forward" else f"{router}_expert_load"
            loads = line.get(key, [])
            found.setdefault(router, []).extend(load for load in loads if sum(load) > 0)
    recorded = {router: np.array(loads) for router, loads in found.items() if loads}
    if not recorded:
        raise ValueError(
            f"{path}: has no expert loads; a run of a model with experts writes them at every "
            "logged step"
        )
    observations = len(next(iter(recorded.values())))
    return RoutingSkew(recorded, f"{observations} loads recorded in {path}")
