"""Runs a job from its launch to its end: generation after generation until it is finished, stopped or given up.

Read `supervise` first. This module knows nothing of Ray: a `NodeProvider` supplies the nodes, so it runs jobs
on a cluster (actor.py) and on this machine alone (`ThisMachine`).

A generation is announced in the file `generation`, which fences off every older writer. One agent per node is
started and watched until all ranks have exited with 0 and a result, or something else happens. The
supervisor then ends all processes on all nodes and journals the reason, and the job continues or ends:

* result.json says "finished" or "stopped": SUCCEEDED or STOPPED (PREEMPTED if that was the reason). If the
  supervisor had paused the ranks, the next generation follows on other nodes (placing.py).
* A stop was requested: STOPPED or PREEMPTED, however the generation ended.
* A rank says that no restart would help (train/config/errors.py), the same error occurs at the same step
  three times, or a budget is used up (budgets.py): FAILED with the root cause.
* Otherwise: RECOVERING, and the next generation resumes from the last checkpoint. Without progress, the
  back-off doubles.
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...data_pipeline.errors import PreparationFailedError
from ...train.config.errors import EXIT_MISTAKE
from ...train.record.untrusted import read_text
from ..job import (
    CONFIG,
    GENERATION,
    NEXT_CONFIG,
    PAUSE,
    RESULT,
    SOURCE,
    JobError,
    Launch,
    ReplacedError,
    RootCause,
    State,
    SupervisorNumber,
    as_details,
    last_logged,
    read_generation,
)
from ..liveness import HEARTBEAT
from ..nodes.node_check import token_in
from ..nodes.provider import NodeHandle, NodeLost, NodeProvider, NodesUnavailable
from ..stop import STOP_PREEMPT, StopFlag
from .background_data import BackgroundData
from .budgets import RestartBudgets
from .generation import POLL_S, GenerationWatch, Outcome, RecoveryClock
from .network import NetworkWatch
from .placing import Placing
from .retrying_journal import RetryingJournal, announce, waiting_to_write
from .takeover import Predecessor

SAVE_FAILED = "SaveFailedError"  # of distributed/checkpoint/, which is not imported here
PORT_ATTEMPTS = 5  # generations that found their port taken, which max_restarts does not count
MAX_BACKOFF_S = 30.0
_CHECKS_AT_ONCE = 32


class StopAsked(Exception):
    """Says that a stop was requested while nothing was running."""


class NodeUnfit(Exception):
    """Says which node cannot run its part of the job, and why."""


class DataGivenUp(Exception):
    """Says why the data that a job waits for will not come."""


def supervise(
    launch: Launch,
    node_provider: NodeProvider,
    data: BackgroundData | None = None,
    *,
    number: SupervisorNumber | None = None,
) -> None:
    """Runs the job to its end and journals everything.

    Raises only for our own defects, after journaling them.

    Args:
        data: prepares the job's data meanwhile; None: it is complete.
        number: of this supervisor; None: takes the next one.
    """
    number = number or SupervisorNumber.take(Path(launch.run_dir))
    job = JobSupervisor(launch, node_provider, data, number)
    try:
        job.run()
    except ReplacedError:
        # a successor has taken over the nodes and ranks: write nothing, end nothing
        return job.end_data()
    except Exception as error:
        job.log(State.FAILED, f"the supervisor itself failed: {type(error).__name__}: {error}")
        job.release()
        job.journal.settle()
        raise
    job.release()
    job.leave_files()
    job.journal.settle()
    # no heartbeat means that nothing is left of the job
    (Path(launch.run_dir) / HEARTBEAT).unlink(missing_ok=True)


class JobSupervisor:
    """Decides what a job does next, and journals it."""

    def __init__(
        self,
        launch: Launch,
        node_provider: NodeProvider,
        data: BackgroundData | None,
        number: SupervisorNumber,
    ):
        self.launch = launch
        self.number = number
        self.node_provider = node_provider
        self.data = data
        self.clock = RecoveryClock()
        self.state = State.SUBMITTED
        self.run_dir = Path(launch.run_dir)
        self.predecessor = Predecessor(launch)
        self.journal = RetryingJournal(self.run_dir)
        self.stop_flag = StopFlag(self.run_dir)
        self.keep = self.journal.kept.keep
        if launch.configuration:
            self.keep(launch.config_file, launch.configuration)
        if launch.source:  # without it, ranks would begin with drawn weights
            self.keep(SOURCE, launch.source)
        self.generation = read_generation(self.run_dir)
        entries = self.predecessor.entries
        self.budgets = RestartBudgets.from_journal(launch, entries)
        self.has_started = any(entry.state is State.STARTING for entry in entries)
        self.has_worked = any(entry.state is State.RUNNING for entry in entries)
        self.is_stored = launch.config_file == CONFIG
        self.former_result = read_text(self.run_dir / RESULT)
        if self.has_worked:
            self.store_config()
        self.placing = Placing(
            launch,
            node_provider,
            self._while_placing,
            note=lambda words: self.log(self.state, words),
            has_run=self.has_started,
            poll_s=POLL_S,
        )
        self.why_resize = self.placing.why_resize
        self.without_progress = 0
        self.ports_taken = 0
        self.network = NetworkWatch()
        self._reason = ""

    def run(self) -> None:
        """Starts generation after generation until the job has ended."""
        if self.predecessor.had_finished:  # it was killed before it released the nodes
            self.node_provider.adopt_nodes()
            return
        taken_over = self._take_over()
        while True:
            outcome = self._next_outcome(taken_over)
            if outcome is None or self.has_ended(outcome):
                return
            taken_over = ()
            self.has_worked |= outcome.step is not None
            if not self.wait_before_restart():
                self.log(self._stopped(), "stopped between two generations")
                return

    def _next_outcome(self, taken_over: Sequence[NodeHandle]) -> Outcome | None:
        """Returns how the next generation ended; None: the job has ended, as the journal says.

        Args:
            taken_over: nodes that still run a predecessor's generation; empty: start a new one.
        """
        try:
            if taken_over:
                self._await_data()
                return self._watch_on(taken_over)
            self._until(self.journal.catch_up)
            nodes = self.placing.place()
            self.network.wait(nodes, self._while_placing)
            self.clock.mark("place")
            self._exclude_stuck(nodes)
            self._check(nodes)
            self.clock.mark("check")
            self._await_data()
            self.clock.mark("data")
            return self.run_generation(nodes)
        except NodeLost as error:
            return _lost(error)
        except NodeUnfit as error:
            if self.has_started:
                return Outcome("failed", RootCause(summary=str(error), infrastructure=True))
            self.log(State.FAILED, f"{error} (found before any rank was started)")
        except (NodesUnavailable, JobError) as error:
            self.log(State.FAILED, str(error))
        except DataGivenUp as error:
            self.log(State.FAILED, f"the data could not be prepared: {error}")
        except StopAsked:
            self.log(self._stopped(), "stopped before the ranks were started")
        return None

    def release(self) -> None:
        """Ends data preparation and everything on the nodes."""
        self.end_data()
        self.node_provider.release()

    def end_data(self) -> None:
        """Ends the data preparation beside the ranks, if any."""
        if self.data is not None:
            self.data.end()

    def log(self, state: State, reason: str, **details: Any) -> None:
        """Appends a state with its reason to the journal."""
        self.state = state
        if state.is_final and not self.is_stored:
            reason += f"; {CONFIG} is as before, and {NEXT_CONFIG} holds what was asked for"
        self.journal.append(state, generation=self.generation, reason=reason, details=details)

    def beat(self) -> None:
        """Sends a heartbeat, and restores files of the run folder that somebody else has changed.

        Raises:
            ReplacedError: this supervisor has a successor, whose files they are.
        """
        self.number.check()
        self.journal.beat()
        for name in self.journal.kept.restore():
            self.log(self.state, f"the file {name} was damaged and is written again")

    def store_config(self) -> None:
        """Replaces a continued run's former configuration by the new one."""
        if not self.is_stored:
            self.is_stored = True
            self.keep(CONFIG, self.launch.configuration)
            self.journal.kept.restore()

    def leave_files(self) -> None:
        """Leaves the folder of a continued run as it was, if the job has made no step."""
        if self.is_stored:
            self.journal.kept.forget(NEXT_CONFIG)
            (self.run_dir / NEXT_CONFIG).unlink(missing_ok=True)
        elif self.former_result:
            self.keep(RESULT, self.former_result)

    # -- before a generation -----------------------------------------------------------------------

    def _take_over(self) -> Sequence[NodeHandle]:
        """Returns nodes on which a killed predecessor's generation continues.

        Empty if there was no predecessor, or if a new generation must follow.
        """
        if not self.predecessor.existed:
            return ()
        nodes = self.node_provider.adopt_nodes()
        unwatched_s = round(max(0.0, time.time() - self.predecessor.heard_at), 2)
        killed = "the supervisor was killed and has been restarted"
        if self.predecessor.generation_goes_on(nodes):
            words = f"{killed}; generation {self.generation} kept running for {unwatched_s:.1f} s"
            state = self.predecessor.entries[-1].state
            self.log(state, f"{words} without it", unwatched_s=unwatched_s)
            return nodes
        self._end_everywhere(nodes)
        words = f"{killed}; a new generation takes over"
        self.log(State.RECOVERING, words, unwatched_s=unwatched_s)
        return ()

    def _until(self, is_done: Callable[[], bool]) -> None:
        """Retries until the run folder can be written; no generation begins before that."""
        while not is_done():
            self._while_placing("")
            time.sleep(POLL_S)

    def _announce(self, generation: int) -> bool:
        """Announces the next generation; returns False if that cannot be written."""
        self.journal.kept.forget(PAUSE)
        refusal = announce(self.run_dir, generation, self.journal.kept)
        if not refusal:
            self.keep(GENERATION, str(generation))
        self._while_placing(refusal)
        return not refusal

    def _while_placing(self, reason: str) -> None:
        self.beat()
        if not self.run_dir.is_dir():
            raise JobError(f"{self.run_dir}: the run folder was deleted")
        if self.stop_flag.read():
            raise StopAsked
        if reason and reason != self._reason:
            self.log(State.PLACING, reason)
            self._reason = reason

    def _exclude_stuck(self, nodes: Sequence[NodeHandle]) -> None:
        """Excludes nodes with unkillable processes of an earlier generation.

        Raises:
            NodeUnfit: there was one; the job continues elsewhere.
            NodesUnavailable: there is no other node.
            NodeLost: a node does not answer.
        """
        for number, node in enumerate(nodes if self.has_started else ()):
            if stuck := node.unkillable(self.launch.run_dir):
                self.node_provider.exclude(node, stuck)
                raise NodeUnfit(f"node {number}: {stuck}; this job no longer uses the node")

    def _check(self, nodes: Sequence[NodeHandle]) -> None:
        """Checks that every node sees the run folder and has the devices.

        Raises:
            NodeUnfit: one does not.
            NodeLost: one does not answer.
        """
        while (faults := self._ask_nodes(nodes)) is None:
            time.sleep(POLL_S)
        for node_rank, fault in enumerate(faults):
            if fault:
                raise NodeUnfit(f"node {node_rank}: {fault}")

    def _ask_nodes(self, nodes: Sequence[NodeHandle]) -> list[str] | None:
        """Returns what each node lacks; None if the run folder cannot be written for now."""
        try:
            with (
                token_in(self.run_dir, gpus=self.launch.needs_gpus) as wanted,
                ThreadPoolExecutor(min(len(nodes), _CHECKS_AT_ONCE)) as pool,
            ):
                return list(pool.map(lambda node: node.check(wanted), nodes))
        except OSError as error:
            if self.has_started:
                self._while_placing(waiting_to_write(self.run_dir, error))
                return None
            raise NodeUnfit(
                f"the supervisor cannot write to the run folder {self.run_dir} "
                f"({error.strerror}): choose a folder that the head of the cluster sees, too"
            ) from error

    def _await_data(self) -> None:
        """Waits until enough data is sealed; the ranks' CPUs are reserved by now.

        Raises:
            DataGivenUp: there will never be enough.
            StopAsked: a stop was requested meanwhile.
        """
        if self.data is None:
            return
        self.data.begin()
        started, told = time.monotonic(), False
        while not self.data.has_enough():
            if self.data.failure:
                raise DataGivenUp(self.data.failure)
            if not told:
                tokens = f"{self.data.start_when:,} training tokens"
                self.log(State.PREPARING, f"the ranks start when {tokens} are sealed")
            told = True
            self.beat()
            if self.stop_flag.read():
                raise StopAsked
            self.look_after_data()
            time.sleep(POLL_S)
        if told:
            seconds = time.monotonic() - started
            self.log(
                State.PREPARING,
                f"{self.data.sealed_words()} sealed after {seconds:.1f} s; the ranks start",
            )

    def look_after_data(self) -> None:
        """Checks the process that prepares the data, and journals its news."""
        if self.data is not None and (news := self.data.look_after()):
            self.log(self.state, news)

    def run_generation(self, nodes: Sequence[NodeHandle]) -> Outcome:
        """Announces a generation, runs it, and ends it everywhere; returns how it ended."""
        generation = max(self.generation, last_logged(self.run_dir)) + 1
        self._until(lambda: self._announce(generation))
        self.generation = generation
        launch = self.placing.launch_on(len(nodes))
        words = f"starting {launch.world_size} rank(s){self.placing.mesh_words(len(nodes))}"
        if json.loads(launch.configuration or "{}").get("train", {}).get("compile"):
            words += "; they compile before their first step (train.compile=true)"
        self.log(State.STARTING, words, num_nodes=len(nodes))
        self.has_started = True
        watch = GenerationWatch(self, nodes, launch)
        return self._watch(watch, nodes, watch.start)

    def _watch_on(self, nodes: Sequence[NodeHandle]) -> Outcome:
        """Watches a predecessor's generation to its end."""
        watch = GenerationWatch(self, nodes, self.placing.launch_on(len(nodes)))
        return self._watch(watch, nodes, lambda: self.predecessor.hand_over(watch))

    def _watch(
        self, watch: GenerationWatch, nodes: Sequence[NodeHandle], begin: Callable[[], None]
    ) -> Outcome:
        try:
            begin()
            return self.network.explain(watch.until_the_end(), nodes)
        except NodeLost as error:
            watch.read_metrics()  # noticing the loss took seconds, in which ranks may have made steps
            return _lost(error, watch.step)
        except OSError as error:  # of this process; a node's own are NodeLost
            return _lost(error, watch.step)
        except ReplacedError:
            nodes = ()  # they belong to the successor
            raise
        finally:
            self.clock.mark("collect")
            self._end_everywhere(nodes)
            self.clock.mark("end")

    def _end_everywhere(self, nodes: Sequence[NodeHandle]) -> None:
        for node in nodes:
            try:
                node.stop()
            except NodeLost:
                # its ranks die with it, or are fenced by the generation file
                continue

    # -- after a generation ------------------------------------------------------------------------

    def has_ended(self, outcome: Outcome) -> bool:
        """Journals how the generation ended; returns whether the job has ended."""
        if outcome.state == "finished":
            self.log(State.SUCCEEDED, f"finished at step {outcome.step}", step=outcome.step)
        elif outcome.state == "paused":
            words = f"paused at step {outcome.step}, with a checkpoint"
            self.log(State.RESIZING, f"{words}; the next generation uses other nodes")
            return False
        elif outcome.state == "stopped":
            self._log_stop(outcome)
        elif outcome.state == "ended":
            self.log(State.STOPPED, "ended at once without a checkpoint, as requested")
        elif self.stop_flag.read():
            summary = outcome.cause.summary if outcome.cause else outcome.state
            self.log(
                self._stopped(),
                f"stopped; the last generation failed while stopping: {summary}",
                **_cause(outcome),
            )
        elif outcome.state == "port taken":
            return self._port_was_taken()
        elif message := _said_by(outcome, PreparationFailedError.__name__):
            self._data_used_up(message, outcome)
        elif message := _said_by(outcome, SAVE_FAILED):
            self.log(State.FAILED, f'checkpoint.on_failure="stop": {message}', **_cause(outcome))
        elif (mistake := self._mistake(outcome)) is not None:
            self.log(
                State.FAILED,
                f"{mistake.summary} ({self._where(outcome)}; a restart would not help: fix this "
                "and submit again)",
                **_cause(outcome),
            )
        else:
            return self._is_given_up(outcome)
        return True

    def _mistake(self, outcome: Outcome) -> RootCause | None:
        """Returns the cause if a rank says that no restart would help, and that is plausible.

        After a generation that worked, the cause has appeared since (a mount, for example) and may be repaired.
        """
        cause = outcome.cause
        says_so = cause is not None and cause.exit_code == EXIT_MISTAKE
        return cause if says_so and not self.has_worked else None

    def _where(self, outcome: Outcome) -> str:
        if outcome.step is not None:
            return f"at step {outcome.step}"
        return f"before {'a new' if self.has_worked else 'the first'} step"

    def _stopped(self) -> State:
        preempted = self.stop_flag.read() == STOP_PREEMPT
        return State.PREEMPTED if preempted else State.STOPPED

    def _log_stop(self, outcome: Outcome) -> None:
        """Journals that the ranks have saved and ended as requested."""
        saved = f"at step {outcome.step}, with a checkpoint"
        if self._stopped() is State.PREEMPTED:
            words = f"preempted {saved}; `moebius resume` continues from there"
            self.log(State.PREEMPTED, words, step=outcome.step)
        else:
            self.log(State.STOPPED, f"stopped {saved}", step=outcome.step)

    def _data_used_up(self, message: str, outcome: Outcome) -> None:
        """Journals the end of a job whose ranks have used up the sealed data."""
        at = f"after step {outcome.step}" if outcome.step is not None else "before a step"
        cause = RootCause(summary=message)
        self.log(
            State.FAILED,
            f"the data ended {at}: {message}",
            **_cause(Outcome("failed", cause, outcome.step)),
        )

    def _port_was_taken(self) -> bool:
        self.ports_taken += 1
        if self.ports_taken >= PORT_ATTEMPTS:
            self.log(
                State.FAILED,
                f"no port on node 0 stayed free long enough, {PORT_ATTEMPTS} times in a row",
            )
            return True
        self.log(State.RECOVERING, "another process took the port chosen on node 0; trying another")
        return False

    def _is_given_up(self, outcome: Outcome) -> bool:
        assert outcome.cause is not None, "a failure has a cause"
        cause = outcome.cause
        if cause.on_purpose:
            self.log(State.RECOVERING, cause.summary, **_cause(outcome))
            return False
        self.without_progress = 0 if outcome.step is not None else self.without_progress + 1
        verdict = self.budgets.charge(cause, outcome.step)
        self.log(
            State.FAILED if verdict.given_up else State.RECOVERING,
            f"{cause.summary} ({self._where(outcome)}, {verdict.words})",
            **_cause(outcome),
            **verdict.details,
        )
        return verdict.given_up

    def wait_before_restart(self) -> bool:
        """Backs off while generations make no step; returns False if a stop was requested."""
        wait_s = (
            min(self.launch.backoff_s * 2 ** (self.without_progress - 1), MAX_BACKOFF_S)
            if self.without_progress
            else 0.0
        )
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and not self.stop_flag.read():
            self.beat()
            time.sleep(POLL_S)
        self.clock.mark("wait")
        return not self.stop_flag.read()


def _said_by(outcome: Outcome, kind: str) -> str:
    """Returns the message of an error of this kind, if it ended a generation."""
    error = outcome.cause.error if outcome.cause is not None else None
    name, _, message = (error or "").partition(": ")
    return message if name.rpartition(".")[2] == kind else ""


def _lost(error: NodeLost | OSError, step: int | None = None) -> Outcome:
    return Outcome("failed", RootCause(summary=str(error), infrastructure=True), step)


def _cause(outcome: Outcome) -> dict[str, Any]:
    if outcome.cause is None:
        return {}
    return {"root_cause": as_details(outcome.cause), "step": outcome.step}
