"""A rank's ear for rounds: a thread that waits for orders and breaks off what the rank waits in.

When a rank dies the others' collectives fail, or wait for one another for ever. Those that fail
wait here for what the supervision decides: a round, in which all meet anew with a replacement, or
none, and then the rank raises what it would have raised. The thread looks for orders
twenty times a second (one look at a file in memory, 5 µs), and breaks off the rank's collectives
before it passes an order on, so whoever waits inside a collective comes out of it.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from ...distributed.process.connections import break_off
from ...distributed.process.diagnosis import CollectiveError, is_of_a_collective
from ..config.errors import no_restart_mends
from ..record.heartbeat import FOLDER
from .orders import (
    IN_PLACE,
    ROUND_NUMBER,
    RoundOrder,
    read_order,
    withdraw_readiness,
    write_readiness,
)

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_HOLD_S = 30.0  # for an order, by a rank whose collective has failed


class Rounds:
    """The rounds of one generation, as one rank knows them."""

    def __init__(self, folder: Path | None, rank: int = 0, number: int = 0) -> None:
        """Begins to listen; without a folder there are no rounds.

        Args:
            folder: of the heartbeats of this node's ranks.
            rank: of this process.
            number: the round in which this process has come; 0: it was there from the start.
        """
        self.number = number
        self.is_active = folder is not None
        self._folder, self._rank = folder or Path(), rank
        self._heard = threading.Event()
        self._ended = threading.Event()
        self._order: RoundOrder | None = None
        if self.is_active:
            threading.Thread(target=self._listen, name="rounds", daemon=True).start()

    @property
    def came_with(self) -> RoundOrder:
        """The order by which this process has come."""
        order = read_order(self._folder)
        assert order is not None, "a replacement is ordered"
        return order

    def say_ready(self, why_not: str = "") -> None:
        """Says that this rank can take part in rounds from now on; or why it never can."""
        if not self.is_active:
            return
        write_readiness(self._folder, self._rank, why_not)
        if why_not:
            self.is_active = False
            self._ended.set()

    def end(self) -> None:
        """Says that this rank takes part in no more rounds: the run is at its end."""
        if self.is_active:
            withdraw_readiness(self._folder, self._rank)
        self.is_active = False
        self._ended.set()

    def order_after(self, error: Exception) -> RoundOrder | None:
        """Returns the order that follows a failure of this rank; None: it has to raise the error.

        Waits for the order if the failure looks like the death of another rank.
        """
        if not self.is_active or no_restart_mends(error):
            return None
        if not self._heard.is_set():
            if not tells_of_a_lost_rank(error):
                return None
            logger.warning("a collective failed, and what follows is waited for: %s", error)
        if not self._heard.wait(_HOLD_S) or self._order is None or self._order.refused:
            return None
        order, self._order = self._order, None
        self.number = order.number
        self._heard.clear()
        return order

    def _listen(self) -> None:
        while not self._ended.wait(_LOOK_S):
            order = read_order(self._folder)
            if order is None or order.number <= self.number or self._heard.is_set():
                continue
            began_s = time.monotonic()
            broken = 0 if order.refused else break_off()
            self._order = order
            self._heard.set()
            logger.info(
                "round %d is ordered (%s): %d connections broken off in %.3f s",
                order.number,
                order.refused or f"ranks {list(order.lost)} are replaced",
                broken,
                time.monotonic() - began_s,
            )


def open_rounds(environment: Mapping[str, str] = os.environ) -> Rounds:
    """Returns the rounds of this process's generation; there are none where no agent orders any."""
    if environment.get(IN_PLACE) != "1" or FOLDER not in environment:
        return Rounds(None)
    number = int(environment.get(ROUND_NUMBER, "0"))
    return Rounds(Path(environment[FOLDER]), int(environment["RANK"]), number)


def tells_of_a_lost_rank(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, is of a collective or of the store."""
    step: BaseException | None = error
    while step is not None:
        lost = isinstance(step, (dist.DistError, CollectiveError))
        if lost or is_of_a_collective(str(step)):
            return True
        step = step.__cause__
    return False
