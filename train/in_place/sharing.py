"""Where the state of every rank lies besides on the rank itself, and of which step all of it can be
had. Pure functions.

What every rank stores alike (weights and moments that are not experts) any rank has. A rank's
experts the ranks in the same place of the other EP groups have too. Where there is no other EP
group each rank sends its experts, at every snapshot, to its *buddy*: the rank that many ranks
further which makes it one of another node, if there are several.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sharing:
    """Which ranks have whose state."""

    world_size: int
    ep: int  # ranks that share one copy of the experts; they are neighbours
    ranks_per_node: int

    @property
    def needs_buddies(self) -> bool:
        """Whether a rank's experts are on no other rank."""
        return self.ep > 1 and self.ep == self.world_size

    def buddy_of(self, rank: int) -> int:
        """Returns who keeps a copy of a rank's experts."""
        return (rank + self._distance) % self.world_size

    def ward_of(self, rank: int) -> int:
        """Returns whose experts a rank keeps."""
        return (rank - self._distance) % self.world_size

    @property
    def _distance(self) -> int:
        return self.ranks_per_node if self.world_size > self.ranks_per_node else 1

    def holders_of(self, rank: int) -> list[int]:
        """Returns the other ranks that have a rank's experts, as their own or in their keeping."""
        if self.needs_buddies:
            return [self.buddy_of(rank)]
        return [other for other in range(rank % self.ep, self.world_size, self.ep) if other != rank]


@dataclass(frozen=True)
class RestorePlan:
    """Says to which step all ranks go back, and who sends what to those that have no memory."""

    step: int
    whole_from: int  # who sends what every rank stores alike
    experts_from: Mapping[int, int]  # by lost rank, who sends its experts


def plan_restore(
    steps: Mapping[int, Collection[int]], lost: Collection[int], sharing: Sharing
) -> RestorePlan | None:
    """Returns the way back to the newest step of which every part exists; None: there is none.

    Args:
        steps: by rank, of which steps it has a snapshot.
        lost: the ranks whose memory is gone.
        sharing: who has whose state.
    """
    living = [rank for rank in range(sharing.world_size) if rank not in lost]
    if not living:
        return None
    common = set.intersection(*(set(steps.get(rank, ())) for rank in living))
    holders = {
        rank: next((other for other in sharing.holders_of(rank) if other in living), None)
        for rank in sorted(lost)
    }
    found = {rank: holder for rank, holder in holders.items() if holder is not None}
    if not common or len(found) < len(holders):
        return None
    return RestorePlan(max(common), living[0], found)
