"""Draws the kit's parameter values: the same on every machine, by name."""

import zlib

import numpy as np
from numpy.typing import NDArray

from ..contract import Shard

Shape = tuple[int, ...]


def draw(name: str, shape: Shape, router: str | None) -> NDArray[np.float64]:
    """Returns the kit's values for a parameter of the reference."""
    numbers = np.random.default_rng(zlib.crc32(name.encode()))
    if name == router:
        values = 0.02 * numbers.standard_normal(shape)
        values[:, : shape[0] + 1] = np.eye(shape[0], shape[0] + 1)
        return values
    if len(shape) < 2:
        return numbers.uniform(0.5, 1.5, shape)
    return numbers.standard_normal(shape) / np.sqrt(max(shape[-2:]))


def take(values: NDArray[np.float64], shard: Shard | None) -> NDArray[np.float64]:
    """Returns the part of a full array described by a shard."""
    if shard is None or shard.dim is None:
        return values
    return values.take(range(shard.start, shard.stop), axis=shard.dim)
