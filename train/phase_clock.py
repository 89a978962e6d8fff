"""How long each phase of a start takes: of a rank (train/loop.py), of a generation (cluster/)."""

import time


class PhaseClock:
    """Counts the seconds from one mark to the next."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last_s = time.monotonic()

    def restart(self) -> None:
        """Forgets all phases and begins anew."""
        self.seconds = {}
        self._last_s = time.monotonic()

    def mark(self, phase: str) -> None:
        """Says that a phase has ended; what belongs to one of the same name is added to it."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last_s
        self._last_s = now

    def rounded(self) -> dict[str, float]:
        """Returns the phases in milliseconds' precision, in the order of their first mark."""
        return {phase: round(seconds, 3) for phase, seconds in self.seconds.items()}
