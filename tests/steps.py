"""The steps that the loaders of all ranks read."""

from typing import Any

import numpy as np

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.read.loader import Batch, Loader

Step = list[Batch]
"""The batch of each rank."""


def steps_of(
    data: DataConfig,
    count: int,
    *,
    num_ranks: int = 1,
    global_batch: int = 8,
    micro_batch: int = 1,
    **options: Any,
) -> list[Step]:
    """Returns the first `count` steps of new loaders."""
    sizes = {"global_batch": global_batch, "micro_batch": micro_batch, "num_ranks": num_ranks}
    loaders = [Loader(data, **sizes, rank=rank, **options) for rank in range(num_ranks)]
    try:
        return [[next(loader) for loader in loaders] for _ in range(count)]
    finally:
        for loader in loaders:
            loader.close()


def flat(step: Step, name: str = "tokens") -> list:
    """Returns the global batch in order, by rank and micro-batch."""
    parts = [getattr(batch, name) for batch in step]
    return np.concatenate([part.reshape(-1, part.shape[2]) for part in parts]).tolist()


def digest(step: Step) -> int:
    """Returns the sum of the ranks' digests."""
    return sum(batch.digest for batch in step) % 2**31


def seen(steps: list[Step]) -> list[tuple[list, int, int]]:
    """Returns samples, digest and first sample of each step."""
    return [(flat(step), digest(step), step[0].first_sample) for step in steps]
