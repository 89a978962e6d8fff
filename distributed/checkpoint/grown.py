"""Reads a model before as one that has grown: a table of regions, and what each of them copies."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Take:
    """Maps a region of a grown tensor to a block of a tensor of the model before.

    Its values are factor · block + plus + eye · I + std · N(0, 1).
    """

    name: str  # of the grown tensor, without "model."
    start: tuple[int, ...]  # of the region
    sizes: tuple[int, ...]
    source: str = ""  # of the model before; "": nothing is read
    at: tuple[int, ...] = ()  # start of the block, per dim of the source
    axes: tuple[int, ...] = ()  # grown dim of every dim of the source
    factor: float = 1.0
    plus: float = 0.0
    eye: float = 0.0  # of the region's identity
    std: float = 0.0
    seed: int = 0  # of the noise, which also depends on the name and the place inside the region
