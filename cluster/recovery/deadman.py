"""What a node does when its supervisor falls silent: it ends its ranks.

A supervisor that is gone, or cut off from the node, will start the job elsewhere; ranks that went on
here would hold devices that nobody knows of. Their checkpoints are refused in any case, by the
generation's number.

The silence is counted in ticks of this process, not by a clock: a process that stood still itself
(SIGSTOP, a machine that sleeps) has heard nothing because it could not listen.
"""

import threading
from collections.abc import Callable

TICK_S = 1.0


class Deadman:
    """Calls `act` once, in a thread, when nothing was heard for `limit_s`."""

    def __init__(self, limit_s: float, act: Callable[[], None], *, tick_s: float = TICK_S):
        self._limit_s, self._act, self._tick_s = limit_s, act, tick_s
        self._silent_s = 0.0
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="deadman", daemon=True).start()

    def hear(self) -> None:
        """Notes a sign of life."""
        self._silent_s = 0.0

    def end(self) -> None:
        """Ends the watching."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._tick_s):
            self._silent_s += self._tick_s
            if self._silent_s >= self._limit_s:
                return self._act()
