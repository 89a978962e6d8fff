"""What a rank does when others have died: it leaves the broken groups, meets the others and the
replacements anew, and takes back the state.

    survivor      leave ─> join ─> build (groups anew; waits for the replacement's model) ─┐
    replacement            join ─> build (process groups, model) ──────────────────────────┤
                          all: agree on the newest step that every part exists of ─> load ─┘─> steps

What a survivor has built stays: model, optimizer, loader. Every object that holds a group gets the
new one (`rejoin` in train/run.py). Bit for bit: the state of the agreed step comes back from memory,
batches that were read since are given out again, and there is no random state.
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from ...data_pipeline.read.loader import Loader
from ...distributed.process.process import start_process, stop_process
from ..metrics.log import MetricsLog
from ..phase_clock import PhaseClock
from ..record.heartbeat import Phase
from ..run import Run, rejoin, resume
from .orders import RoundOrder
from .rounds import Rounds
from .sharing import Sharing
from .snapshots import Snapshots

logger = logging.getLogger(__name__)
_FROM_MEMORY, _FROM_CHECKPOINT = "memory", "checkpoint"


class NoStateError(RuntimeError):
    """Says that the state is nowhere: neither in the memories of those that live, nor saved."""


class InPlace:
    """How one rank goes on when others die; does nothing where no rounds are ordered."""

    def __init__(self, rounds: Rounds, clock: PhaseClock) -> None:
        """Takes up the rounds; `clock` counts the phases of this rank's start."""
        self.rounds = rounds
        self._clock = clock
        self._snapshots: Snapshots | None = None
        self._restored_from = ""

    def begin(self, run: Run) -> dict[str, Any] | None:
        """Gives a rank that was just built its state; returns the position in the data.

        A collective call. A replacement gets it from the others; else it is the newest checkpoint's.
        """
        if self.rounds.is_active and (why_not := why_never(run)):
            self.rounds.say_ready(why_not)
        if self.rounds.is_active:
            layout = run.mesh.layout
            sharing = Sharing(layout.world_size, layout.ep, run.process.ranks_per_node)
            self._snapshots = Snapshots(sharing, every=run.config.job.snapshot_every)
        if self.rounds.number == 0:
            return resume(run)
        return self._take_back(run, self.rounds.came_with)

    def after_step(self, run: Run, loader: Loader) -> None:
        """Takes a snapshot if it is time."""
        if self._snapshots is not None:
            self._snapshots.take_if_due(run, loader)

    def make_steps(
        self,
        run: Run,
        loader: Loader,
        log: MetricsLog,
        world: contextlib.ExitStack,
        steps: Callable[[Run, Loader, MetricsLog], str],
    ) -> str:
        """Makes steps to the end, whoever dies on the way, as long as rounds are ordered.

        Args:
            run: the run.
            loader: its data.
            log: its metrics.
            world: has entered the context of the run's process.
            steps: makes them; what it returns is returned.
        """
        if self.rounds.number:
            self._tell(run, log, self.rounds.came_with)
        while True:
            order = None
            try:
                if self._snapshots is not None:
                    self._snapshots.take(run, loader)
                    self.rounds.say_ready()
                ended = steps(run, loader, log)
                self.rounds.end()
                return ended
            except Exception as error:
                order = self.rounds.order_after(error)
                if order is None:
                    raise
            self._go_on(run, loader, log, world, order)

    def _go_on(
        self,
        run: Run,
        loader: Loader,
        log: MetricsLog,
        world: contextlib.ExitStack,
        order: RoundOrder,
    ) -> None:
        self._clock.restart()
        run.heartbeat.enter(Phase.START)
        self._leave(run, world)
        self._clock.mark("leave")
        process = start_process(
            run.config.train.device,
            timeout_s=run.config.train.timeout_s,
            round_number=order.number,
        )
        world.enter_context(process)
        self._clock.mark("join")
        rejoin(run, process)
        self._clock.mark("build")
        self._take_back(run, order)
        self._clock.mark("load")
        loader.seek(run.progress.samples)
        self._clock.mark("loader")
        log.go_back_to(run.progress.step)
        self._tell(run, log, order)

    def _leave(self, run: Run, world: contextlib.ExitStack) -> None:
        """Leaves the groups in no good order: who died cannot be waited for."""
        run.checkpoints.abandon()
        world.pop_all()  # the process's own exit would ask why a collective has failed
        if run.process.reporter is not None:
            run.process.reporter.stop()
        run.optimizer.zero_grad()
        run.model.train()  # an evaluation may have been broken off
        stop_process()

    def _take_back(self, run: Run, order: RoundOrder) -> dict[str, Any] | None:
        """Takes back the state of the newest step that all of it can be had of."""
        assert self._snapshots is not None, "whoever hears of a round takes snapshots"
        plan = self._snapshots.plan(run, order.lost)
        if plan is not None:
            self._restored_from = _FROM_MEMORY
            return self._snapshots.restore(run, plan, order.lost)
        self._restored_from = _FROM_CHECKPOINT
        self._snapshots.forget_all_but(None)
        run.expert_placement.lay_out_in_blocks()
        position = resume(run)
        if position is None:
            raise NoStateError(
                f"ranks {list(order.lost)} have taken with them what no other rank has in memory, "
                "and there is no checkpoint yet"
            )
        return position

    def _tell(self, run: Run, log: MetricsLog, order: RoundOrder) -> None:
        logger.info("round %d: going on from step %d", order.number, run.progress.step)
        log.write(
            "in_place",
            run.progress.step,
            round=order.number,
            ranks=list(order.lost),
            restored_from=self._restored_from,
            phases_s=self._clock.rounded(),
        )


def why_never(run: Run) -> str:
    """Returns why this run's ranks cannot be replaced in place, whatever happens; or ""."""
    if run.process.world_size == 1:
        return "there is only one rank"
    if run.process.device.type != "cpu":
        return f"the ranks are on {run.process.device.type}, and it was tried on CPUs only"
    if run.config.mesh.sharding != "none":
        return f"mesh.sharding={run.config.mesh.sharding} keeps its process groups"
    if run.config.train.spikes.action == "rollback":
        return "train.spikes.action=rollback goes back by itself"
    return ""
