"""A node's part in recovery in place: it passes orders on to its agent and ranks, and says whom the
agent holds them for.
"""

import json
from pathlib import Path
from typing import Any

from ...train.in_place.orders import RoundOrder, read_order, write_order

LOST = "lost.json"  # in the folder of the heartbeats, written by the agent (warm/replacing.py)


class RoundsNode:
    """What an agent's `Node` does for rounds."""

    _rounds_folder = Path()

    def begin_rounds(self, folder: Path) -> None:
        """Takes the folder of the ranks' heartbeats in a generation."""
        self._rounds_folder = folder

    def order_round(self, order: RoundOrder) -> None:
        """Orders the ranks of this node to meet the others anew; or tells them that none will."""
        write_order(self._rounds_folder, order)

    def held(self) -> list[dict[str, Any]] | None:
        """Returns the failures for which the agent holds its other ranks; None: there are none.

        Those that a round has dealt with are left out.
        """
        try:
            lost = json.loads((self._rounds_folder / LOST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        order = read_order(self._rounds_folder)
        done = 0 if order is None or order.refused else order.number
        return None if lost["after_round"] < done else lost["failures"]
