"""A node's part of the watch: it reads where its ranks are and what they use, and asks them when they
hang.
"""

from collections.abc import Sequence
from pathlib import Path

from ..recovery.doors import Door, knock
from ..watch.evidence import Evidence, gather
from ..watch.heartbeats import RankState, WatchedRanks
from ..watch.resources import ResourceLog


class WatchingNode:
    """What an agent's `Node` can tell of its ranks."""

    _watched: WatchedRanks | None = None
    _resources: ResourceLog | None = None
    _stall_dir = Path()

    def heartbeats(self) -> list[RankState]:
        """Returns where the ranks are; one that has not begun to train has no state yet."""
        assert self._watched is not None, "start comes first"
        states = self._watched.look()
        if self._resources is not None:
            self._resources.write_if_due(states)
        return states

    def gather_evidence(self) -> list[Evidence]:
        """Asks ranks that hang where they are, and writes what they say to logs/g001/stall."""
        assert self._watched is not None, "start comes first"
        return gather(self._watched.folder, self._watched.beats(), self._stall_dir)

    def unreached(self, doors: Sequence[Door]) -> list[int]:
        """Returns which of the other nodes' doors cannot be reached from here."""
        return knock(doors)

    def begin_watch(self, folder: Path, ranks: range, log_dir: Path) -> None:
        """Prepares the folder of the ranks' pages for a generation.

        Args:
            folder: where they will be.
            ranks: of this node.
            log_dir: of this node in the generation.
        """
        self._watched = WatchedRanks(folder, ranks)
        self._watched.open()
        self._resources = ResourceLog(log_dir)
        self._stall_dir = log_dir.parent / "stall"

    def end_watch(self) -> None:
        """Removes the pages."""
        if self._watched is not None:
            self._watched.close()
