"""An average of the weights, kept in float32 beside the moments in the optimizer's state.

    ema    A ← A + max(1 − d, 1 / (n + 1)) (W − A)       n updates in A before, decay d
    last   A ← A + 1 / (n + 1) (W − A)
           B ← B + 1 / (k + 1) (W − B)                   before, once k is half of the window:  A ← B, n ← k;  B ← 0, k ← 0

The first update makes A equal to W. For its first 1 / (1 − d) updates, `ema` is the mean of all. With a window of 2 h
updates, `last` is the uniform mean of the last h + 1 to 2 h, for one more copy, B, instead of 2 h. Skipped updates do not
count.

A is the entry `weight_average` of every parameter's state and B `recent_average`, so checkpoints, other layouts, FSDP shards
and moved experts carry them like a moment. Every operation on elements rounds once, so the bits do not depend on the layout.
Buffers that a router learns without a gradient (a selection bias) have no average: they balance the load of the
present routing, and are taken as they are, as torch's `AveragedModel` does.

Cost: 4 bytes per weight (`last`: 8), one pass over both per update, and a copy of the weights during an evaluation.
"""

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from .local_shard import local_tensor

logger = logging.getLogger(__name__)

AVERAGE, RECENT = "weight_average", "recent_average"
_AT_ONCE = 16  # tensors of a GPU whose differences are in memory together


@dataclass
class WeightAverage:
    """Averages a run's weights after each update; the kind None does nothing."""

    optimizer: torch.optim.Optimizer  # its state holds the average
    parameters: Sequence[Parameter]  # this rank's shards
    kind: Literal["ema", "last"] | None = None
    span: float = 0.0  # of ema the decay per update, of last the window in updates
    counts: dict[str, int] = field(default_factory=dict)  # updates in each average, by its entry

    @torch.no_grad()
    def update(self) -> None:
        """Averages the weights of the update that was just made."""
        if self.kind is None:
            return
        if not self.counts:
            self._allocate({AVERAGE: 0, RECENT: 0} if self.kind == "last" else {AVERAGE: 0})
        if self.kind == "last" and self.counts[RECENT] >= self.span // 2:
            _copy(self._entries(AVERAGE), self._entries(RECENT))
            torch._foreach_zero_(self._entries(RECENT))  # pyright: ignore[reportPrivateImportUsage]
            self.counts = {AVERAGE: self.counts[RECENT], RECENT: 0}
        least = 1 - self.span if self.kind == "ema" else 0.0
        for key, count in self.counts.items():
            self._approach(key, max(least, 1 / (count + 1)))
            self.counts[key] += 1

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Puts the average where the weights are, and at the end the weights' own bits back."""
        weights = self._weights()
        kept = [weight.clone() for weight in weights]
        try:
            _copy(weights, self._entries(AVERAGE))
            yield
        finally:
            _copy(weights, kept)

    def as_dict(self) -> dict[str, Any]:
        """Returns the kind and the counts for a checkpoint's meta; empty before the first update."""
        return {"average": {"kind": self.kind, "counts": dict(self.counts)}} if self.counts else {}

    def restore(self, meta: Mapping[str, Any]) -> bool:
        """Takes a checkpoint's counts, and makes room for its average; returns whether it is of this kind."""
        saved = meta.get("average", {})
        if self.kind == saved.get("kind"):
            self._allocate(dict(saved.get("counts", {})))
            return True
        if self.kind is not None and meta["progress"]["updates"] and dist.get_rank() == 0:
            step = meta["progress"]["step"]
            logger.warning("step %d has no average of this kind: one begins here", step)
        return False

    def _allocate(self, counts: dict[str, int]) -> None:
        """Adds averages of zeros to the optimizer's state, which must have its own entries by then."""
        self.counts = counts
        for parameter, key in itertools.product(self.parameters, counts):
            zeros = torch.zeros_like(parameter, dtype=torch.float32)
            self.optimizer.state[parameter][key] = zeros

    def _approach(self, key: str, share: float) -> None:
        """Moves an average towards the weights by a share of the difference."""
        averages, weights = self._entries(key), self._weights()
        # a CPU is three times as fast with the differences of one tensor, which its cache holds
        at_once = 1 if weights[0].device.type == "cpu" else _AT_ONCE
        for begin in range(0, len(weights), at_once):
            some = averages[begin : begin + at_once]
            moves = torch._foreach_sub(weights[begin : begin + at_once], some)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_mul_(moves, share)  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(some, moves)  # pyright: ignore[reportPrivateImportUsage]

    def _weights(self) -> list[Tensor]:
        return [local_tensor(parameter.detach()) for parameter in self.parameters]

    def _entries(self, key: str) -> list[Tensor]:
        return [local_tensor(self.optimizer.state[each][key]) for each in self.parameters]


@torch.no_grad()
def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    torch._foreach_copy_(to, values)  # pyright: ignore[reportPrivateImportUsage]
