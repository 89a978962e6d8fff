"""Writes traces of chosen steps by torch's profiler, as files that ui.perfetto.dev opens.

A trace begins when its step asks for a batch, and ends before the step's hooks. A traced step takes
several times as long as others; the steps between cost nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TRACES = "profile"  # in the run folder: step000020-rank0.json.gz


@dataclass
class StepTraces:
    """Traces one rank's steps of `train.profile`."""

    steps_of: Mapping[int, Sequence[int]]  # by rank
    folder: Path
    rank: int
    _running: Any = field(default=None, repr=False)

    def begin(self, step: int) -> None:
        """Starts the trace of a chosen step."""
        if step not in self.steps_of.get(self.rank, ()) or self._running is not None:
            return
        from torch.profiler import profile  # 0.1 s

        self._running = profile(profile_memory=True)
        self._running.start()

    def end(self, step: int) -> None:
        """Ends and writes the trace, if there is one."""
        if self._running is None:
            return
        self._running.stop()
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"step{step:06}-rank{self.rank}.json.gz"
        self._running.export_chrome_trace(str(path))
        self._running = None
