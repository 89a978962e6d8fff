"""Which nodes measure the link between them at the same time, and what the times say: pure functions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

RESULT = "exchange.json"  # what rank 0 of the self-test leaves in its folder
SLOW = 2.0  # so many times the median of its class is worth a name
# Below this a difference is the operating system's, not the link's.
NOISE_S = 20e-6


class Fitted(Protocol):
    """Declares what is fitted to times: t = α + β · bytes."""

    @property
    def alpha_s(self) -> float: ...
    @property
    def beta_s_per_byte(self) -> float: ...


# Of (bytes, seconds): planning/measured.py has it, which stands on another floor.
Fit = Callable[[Sequence[tuple[float, float]]], Fitted]


@dataclass(frozen=True)
class Times:
    """Holds the one-way times of one message size: the quartiles of some exchanges."""

    num_bytes: int
    low_s: float
    median_s: float
    high_s: float


@dataclass(frozen=True)
class Link:
    """Holds what was measured between two nodes, or between two processes of one."""

    first: int
    second: int
    times: tuple[Times, ...]

    def points(self) -> list[tuple[float, float]]:
        """Returns the medians, to be fitted."""
        return [(each.num_bytes, each.median_s) for each in self.times]


@dataclass(frozen=True)
class LinkClass:
    """Holds what is usual among links of one kind, and which are not."""

    alpha_s: float
    beta_s_per_byte: float
    spread: float  # widest interquartile range of a link, as a share of its median
    slow: tuple[tuple[Link, str], ...]  # with how much worse it is


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Returns every pair of nodes once, in rounds in which no node has two partners.

    The circle method: the last node stays, the others move on by one each round.
    """
    seats: list[int | None] = [*range(num_nodes)]
    if num_nodes % 2:
        seats.append(None)
    half, found = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def summarise(links: Sequence[Link], fit: Fit) -> LinkClass:
    """Returns what is usual among links, and names those that are SLOW times worse."""
    fits = [fit(link.points()) for link in links]
    usual = {
        size: median(
            times.median_s for link in links for times in link.times if times.num_bytes == size
        )
        for size in {times.num_bytes for link in links for times in link.times}
    }
    return LinkClass(
        alpha_s=median(each.alpha_s for each in fits),
        beta_s_per_byte=median(each.beta_s_per_byte for each in fits),
        spread=max((t.high_s - t.low_s) / t.median_s for link in links for t in link.times),
        slow=tuple((link, how) for link in links if (how := _how_slow(link, usual))),
    )


def _how_slow(link: Link, usual: Mapping[int, float]) -> str:
    """Returns by how much a link is worse than its like, at the size where that is most; "" if not."""

    def factor_of(times: Times) -> tuple[float, int]:
        return round(times.median_s / usual[times.num_bytes], 1), times.num_bytes

    worst = max(link.times, key=factor_of)  # the largest, of equals
    factor = worst.median_s / usual[worst.num_bytes]
    if factor <= SLOW or worst.median_s - usual[worst.num_bytes] < NOISE_S:
        return ""
    return f"{worst.median_s * 1e3:.3g} ms for {worst.num_bytes:,} bytes, {factor:.1f} × the median"
