"""Takes over the generation of a supervisor that was killed.

Nodes and ranks do not die with a supervisor, and training continues without one. If every node of the last
generation is there and still runs it, the new supervisor continues to watch it, and no step is lost.
Otherwise a new generation follows as after any failure.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from ..job import (
    METRICS,
    PAUSE,
    Journal,
    Launch,
    State,
    current_submission,
    last_train_line,
    read_generation,
)
from ..liveness import HEARTBEAT
from ..nodes.provider import NodeHandle, NodeLost
from ..report.json_lines import JsonLinesTail
from .generation import GenerationWatch

_RUNS = (State.STARTING, State.RUNNING, State.STOPPING, State.RESIZING)
_NEWEST_BYTES = 4 << 20  # of the metrics: more than ranks write while a supervisor restarts
_MARGIN_S = 0.5  # the predecessor may not have read the lines of its last moments


class Predecessor:
    """Describes this job's killed supervisor, if any, before the new one's first heartbeat."""

    def __init__(self, launch: Launch) -> None:
        self._run_dir = run_dir = Path(launch.run_dir)
        entries = current_submission(Journal(run_dir).entries())
        is_ours = bool(entries) and entries[0].details.get("id") == launch.id
        self.entries = entries if is_ours else []  # of a journal that was damaged or exchanged
        self.heard_at = _last_beat(run_dir)

    @property
    def existed(self) -> bool:
        """Returns whether an earlier supervisor moved the job beyond SUBMITTED."""
        return bool(self.entries) and self.entries[-1].state is not State.SUBMITTED

    @property
    def had_finished(self) -> bool:
        """Returns whether it had journaled the end of the job."""
        return bool(self.entries) and self.entries[-1].state.is_final

    def generation_goes_on(self, nodes: Sequence[NodeHandle]) -> bool:
        """Returns whether these are all nodes of the last generation, and still run it."""
        started = [entry for entry in self.entries if entry.state is State.STARTING]
        if self.entries[-1].state not in _RUNS or not started:
            return False
        generation = read_generation(self._run_dir)
        if started[-1].generation != generation:
            return False
        if started[-1].details.get("num_nodes") != len(nodes):
            return False
        return all(_runs(node, generation, rank) for rank, node in enumerate(nodes))

    def hand_over(self, watch: GenerationWatch) -> None:
        """Restores the predecessor's knowledge in a new watch that has started nothing."""
        own = {entry.state for entry in self.entries if entry.generation == watch.generation}
        watch.stopping = State.STOPPING in own
        watch.pausing = (self._run_dir / PAUSE).exists()
        watch.metrics = _metrics_since(self._run_dir / METRICS, self.heard_at - _MARGIN_S)
        newest = last_train_line(self._run_dir)
        if State.RUNNING in own and newest is not None:
            watch.step, watch.is_up = newest["step"], True


def _last_beat(run_dir: Path) -> float:
    try:
        return (run_dir / HEARTBEAT).stat().st_mtime
    except FileNotFoundError:
        return time.time()


def _runs(node: NodeHandle, generation: int, node_rank: int) -> bool:
    try:
        return node.describe().get("runs") == [generation, node_rank]
    except NodeLost:
        return False


def _metrics_since(path: Path, since: float) -> JsonLinesTail:
    tail = JsonLinesTail.near_the_end(path, num_bytes=_NEWEST_BYTES)
    offset = tail.offset
    for line in tail.stream():
        written_s = line.get("time")
        if isinstance(written_s, int | float) and written_s >= since:
            break
        offset = tail.offset
    return JsonLinesTail(path, offset=offset)
