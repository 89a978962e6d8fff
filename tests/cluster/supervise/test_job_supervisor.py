"""A job's life: what follows on what, with nodes that only pretend. Real processes: test_local_jobs.py."""

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moebius.cluster.job import (
    JobStatus,
    Journal,
    Launch,
    State,
    begin_submission,
    read_generation,
    read_status,
)
from moebius.cluster.nodes.assignment import AgentReport, Assignment, RankFailure
from moebius.cluster.nodes.node_check import NodeCheck
from moebius.cluster.nodes.provider import Capacity, NodeLost, NodesUnavailable
from moebius.cluster.stop import interrupts_stop_the_job, request_stop, stop_requested
from moebius.cluster.supervise import generation
from moebius.cluster.supervise import job_supervisor as generations
from moebius.cluster.supervise import retrying_journal as patient_journal
from moebius.cluster.supervise.fencing import SupervisorNumber
from moebius.cluster.supervise.job_supervisor import supervise
from moebius.cluster.watch.evidence import Evidence
from moebius.cluster.watch.heartbeats import RankState
from moebius.distributed.checkpoint.format import SaveFailedError

OK = AgentReport(ok=True)


def failed(error: str = "ValueError: bad", *, exit_code: int = 1) -> AgentReport:
    return AgentReport(ok=False, failures=(RankFailure(0, exit_code, 1.0, error),))


class PretendedNode:
    """A node whose generations end as the script says: each entry is called with the run folder,
    and gives a report.
    """

    def __init__(self, run_dir: Path, script: Iterator[Callable[[Path], AgentReport | None]]):
        self.run_dir = run_dir
        self.script = script
        self.assignments: list[Assignment] = []
        self.runs: list[int] = []  # generation and node rank
        self.stuck, self.spare = "", self

    def describe(self):
        return {"address": "127.0.0.1", "runs": self.runs}

    def unkillable(self, run_dir: str) -> str:
        return self.stuck

    def check(self, wanted: NodeCheck) -> str:
        return wanted.faults()

    def free_port(self) -> int:
        return 1000 + len(self.assignments)

    def start(self, assignment: Assignment) -> None:
        self.assignments.append(assignment)
        self.runs = [assignment.generation, assignment.node_rank]
        self.act = next(self.script)

    def poll(self) -> AgentReport | None:
        return self.act(self.run_dir)

    def heartbeats(self) -> list[RankState]:
        return []

    def gather_evidence(self) -> list[Evidence]:
        return []

    def unreachable(self, others) -> list[int]:
        return []

    def running_ranks(self) -> list[int]:
        return [0]

    def kill_rank(self, rank: int) -> bool:
        return True

    def stop(self) -> None:
        self.runs = []


class PretendedNodeProvider:
    def __init__(self, node: PretendedNode):
        self.node = node
        self.released = False

    def capacity(self) -> Capacity:
        return Capacity(1, 1)

    def provide_nodes(self, num_nodes, while_waiting):
        while_waiting("")
        return [self.node]

    def adopt_nodes(self):
        return [self.node] if self.node.runs else []

    def exclude(self, node, why: str) -> None:
        self.node = node.spare

    def release(self) -> None:
        self.released = True


def finishes(run_dir: Path) -> AgentReport:
    (run_dir / "result.json").write_text('{"state": "finished", "step": 5}')
    return OK


def makes_steps(*steps: int, then: Callable[[Path], AgentReport | None]):
    def act(run_dir: Path) -> AgentReport | None:
        with open(run_dir / "metrics.jsonl", "a") as file:
            file.writelines(
                json.dumps({"kind": "train", "step": step, "loss": 1.0}) + "\n" for step in steps
            )
        return then(run_dir)

    return act


def ends(report: AgentReport):
    return lambda run_dir: report


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(generations, "POLL_S", 0.001)
    monkeypatch.setattr(generation, "POLL_S", 0.001)


def live(run_dir: Path, *script, **values: Any) -> tuple[JobStatus, PretendedNode]:
    launch = Launch(str(run_dir), **(dict[str, Any](backoff_s=0.001) | values))
    node_provider = PretendedNodeProvider(PretendedNode(run_dir, iter(script)))
    begin_submission(launch)
    supervise(launch, node_provider)
    assert node_provider.released
    return read_status(run_dir), node_provider.node


def states(run_dir: Path) -> list[str]:
    return [entry.state.value for entry in Journal(run_dir).entries()]


def test_success_needs_a_result(tmp_path):
    status, node = live(tmp_path, makes_steps(1, 5, then=finishes))
    assert status.state is State.SUCCEEDED
    assert status.exit_code == 0
    assert len(node.assignments) == 1


@pytest.mark.parametrize(
    ("result", "said"),
    [(None, "there is no result.json"), ('{"state": "diverged"}', "result.json says 'diverged'")],
)
def test_exit_code_zero_without_a_good_result_is_a_failure(tmp_path, result, said):
    def ends_early(run_dir: Path) -> AgentReport:
        if result:
            (run_dir / "result.json").write_text(result)
        return OK

    status, _ = live(tmp_path, ends_early, max_restarts=0)
    assert status.state is State.FAILED
    assert said in status.reason
    assert "before the run was finished" in status.reason


def test_a_result_of_an_earlier_generation_does_not_count(tmp_path):
    finishes(tmp_path)
    status, _ = live(tmp_path, ends(OK), max_restarts=0)
    assert status.state is State.FAILED


def test_every_generation_has_its_own_number_and_port_and_announces_itself_first(tmp_path):
    announced = []

    def fails(run_dir: Path) -> AgentReport:
        announced.append(read_generation(run_dir))
        return failed(f"error {len(announced)}")

    status, node = live(tmp_path, fails, fails, makes_steps(1, then=finishes))
    assert status.state is State.SUCCEEDED
    assert [attempt.generation for attempt in node.assignments] == [1, 2, 3]
    assert len({attempt.master_port for attempt in node.assignments}) == 3
    assert announced == [1, 2]
    assert read_generation(tmp_path) == 3


def test_the_journal_tells_why_a_node_has_no_warm_start(tmp_path, monkeypatch):
    told = {"address": "127.0.0.1", "starts": "as programs: imports have started threads: a, b"}
    monkeypatch.setattr(PretendedNode, "describe", lambda self: told)
    live(tmp_path, makes_steps(1, then=finishes))
    running = next(e.reason for e in Journal(tmp_path).entries() if e.state is State.RUNNING)
    assert running.endswith("; no warm start on node 0: imports have started threads: a, b")
    assert running.startswith("first step (1) after ")


def test_the_journal_tells_how_long_each_phase_of_a_start_took(tmp_path):
    def starts(run_dir: Path) -> None:
        with open(run_dir / "metrics.jsonl", "a") as file:
            file.write(
                json.dumps({"kind": "start", "start_s": {"join": 0.25, "build": 0.5}}) + "\n"
            )
            file.write(json.dumps({"kind": "eval", "step": 0, "loss": 5.0, "seconds": 0.75}) + "\n")

    def begins(run_dir: Path) -> AgentReport | None:
        starts(run_dir)
        return makes_steps(1, then=ends(failed()))(run_dir)

    live(tmp_path, begins, makes_steps(2, then=finishes))
    running = [e.details for e in Journal(tmp_path).entries() if e.state is State.RUNNING]
    first, second = (details["phases_s"] for details in running)
    ranks = {"join": 0.25, "build": 0.5, "eval": 0.75, "step": 0.0}
    assert list(first) == ["place", "check", "data", "order", "processes", *ranks]
    assert ranks.items() <= first.items()
    assert list(second)[:3] == ["collect", "end", "wait"]
    assert "join" not in second, "this one's ranks have not told"
    assert all(0 <= seconds < 5 for seconds in second.values())


def test_restarts_are_limited_and_the_root_cause_is_told(tmp_path):
    script = [makes_steps(step, then=ends(failed(f"ValueError: {step}"))) for step in (1, 2, 3)]
    status, node = live(tmp_path, *script, max_restarts=2)
    assert status.state is State.FAILED
    assert len(node.assignments) == 3
    assert "max_restarts=2 used up" in status.reason
    assert status.root_cause is not None
    assert (status.root_cause.rank, status.root_cause.error) == (0, "ValueError: 3")
    assert status.root_cause.log == "logs/g003/node0/rank0.log"


def test_the_same_error_at_the_same_step_three_times_is_the_end(tmp_path):
    status, node = live(tmp_path, *[makes_steps(7, then=ends(failed()))] * 9, max_restarts=8)
    assert status.state is State.FAILED
    assert len(node.assignments) == 3
    assert "at step 7, 3 times; the same error at the same place" in status.reason


def test_a_mistake_ends_the_job_at_once(tmp_path):
    mistake = failed("moebius.train.config.run_config.ConfigError: train.timeout_s=0", exit_code=78)
    status, node = live(tmp_path, *[ends(mistake)] * 3, max_restarts=8)
    assert status.state is State.FAILED
    assert len(node.assignments) == 1
    assert "ConfigError: train.timeout_s=0 (before the first step, no restart would mend this" in (
        status.reason.replace(";", ",")
    )


def test_what_has_worked_before_is_tried_again(tmp_path):
    mistake = failed("moebius.data_pipeline.errors.ShardError: is not there", exit_code=78)
    status, _ = live(
        tmp_path,
        makes_steps(3, then=ends(failed())),
        ends(mistake),
        makes_steps(4, then=finishes),
    )
    assert status.state is State.SUCCEEDED
    assert status.restarts == 2


def test_a_node_that_lacks_something_ends_the_job_before_a_rank_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(PretendedNode, "check", lambda *_: "b does not see the run folder")
    status, node = live(tmp_path, max_restarts=8)
    assert status.state is State.FAILED
    assert status.reason.startswith("node 0: b does not see the run folder")
    assert not node.assignments
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.jsonl", "supervisor"]


def test_the_same_error_at_different_steps_is_not(tmp_path):
    script = [makes_steps(step, then=ends(failed())) for step in range(1, 5)]
    status, _ = live(tmp_path, *script, makes_steps(9, then=finishes), max_restarts=8)
    assert status.state is State.SUCCEEDED
    assert status.restarts == 4


def tells(line: dict[str, Any], then: Callable[[Path], AgentReport | None]):
    def act(run_dir: Path) -> AgentReport | None:
        with open(run_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        return then(run_dir)

    return act


def test_what_happened_to_checkpoints_is_in_the_journal(tmp_path):
    aside = {
        "kind": "checkpoint_set_aside",
        "step": 8,
        "path": "step_00000008.damaged-20260101-000000",
        "why": "a file is missing",
        "resumed_from_step": 4,
    }
    unsaved = {"kind": "checkpoint", "step": 12, "seconds": 1.0, "error": "No space left on device"}
    live(tmp_path, tells(aside, makes_steps(9, then=tells(unsaved, finishes))))
    reasons = [entry.reason for entry in Journal(tmp_path).entries()]
    assert any("step 8 was damaged and is set aside" in reason for reason in reasons)
    assert any("goes on from step 4: a file is missing" in reason for reason in reasons)
    assert "No space left on device" in reasons


def test_spikes_and_rollbacks_are_in_the_journal(tmp_path):
    limits = {"loss_limit": 3.5, "grad_norm": "inf", "grad_norm_limit": 2.0, "first_sample": 64}
    first = {"kind": "spike", "step": 8, "loss": 9.25, "in_a_row": 1, **limits}
    back = {
        "kind": "rollback",
        "step": 9,
        "to_step": 4,
        "number": 1,
        "most": 10,
        "first_sample": 32,
        "end_sample": 72,
        "why": "2 spikes within 4 steps, the first at step 8 and the last at step 9",
        "abandoned": ["step_00000008.abandoned-20260101-000000"],
    }
    stays = {"kind": "rollback_impossible", "step": 9, "why": "2 spikes", "at_most": 1}
    said = [first, first | {"step": 9, "in_a_row": 2}, back, stays, {"kind": "rollback"}]
    act = finishes
    for line in reversed(said):
        act = tells(line, act)
    live(tmp_path, makes_steps(9, then=act))
    reasons = "\n".join(entry.reason for entry in Journal(tmp_path).entries())
    assert "loss 9.25 (limit 3.5), gradient norm inf (limit 2)" in reasons
    assert reasons.count("was a spike") == 1
    assert "went back from step 9 to the checkpoint of step 4 (rollback 1 of at most 10)" in reasons
    assert "samples 32 to 71 are left out, 1 later checkpoint(s) set aside" in reasons
    assert "no whole checkpoint of step 1 or before" in reasons


def test_a_job_that_shall_stop_where_it_cannot_save_is_not_started_again(tmp_path):
    error = "moebius.distributed.checkpoint.format.SaveFailedError: step 4 was not saved: disk full"
    status, _ = live(tmp_path, makes_steps(4, then=ends(failed(error))), max_restarts=5)
    assert status.state is State.FAILED
    assert states(tmp_path).count("STARTING") == 1
    assert 'checkpoint.on_failure="stop": step 4 was not saved: disk full' in status.reason


def test_the_name_of_the_error_is_that_of_the_class():
    assert SaveFailedError.__name__ == generations.SAVE_FAILED


def test_a_taken_port_costs_no_restart_but_is_not_tried_for_ever(tmp_path):
    taken = AgentReport(ok=False, message="DistNetworkError: EADDRINUSE")
    status, _ = live(tmp_path / "a", ends(taken), makes_steps(1, then=finishes), max_restarts=0)
    assert status.state is State.SUCCEEDED
    status, node = live(tmp_path / "b", *[ends(taken)] * 9, max_restarts=0)
    assert status.state is State.FAILED
    assert len(node.assignments) == generations.PORT_ATTEMPTS


def test_a_lost_node_is_a_failure_that_is_recovered_from(tmp_path):
    def lost(run_dir: Path) -> AgentReport:
        raise NodeLost("its agent actor died")

    status, _ = live(tmp_path, makes_steps(3, then=lost), makes_steps(4, then=finishes))
    assert status.state is State.SUCCEEDED
    assert status.root_cause is not None
    assert status.root_cause.summary == "node 0 was lost: its agent actor died"


def test_no_step_within_the_start_timeout_is_a_failure(tmp_path):
    status, _ = live(tmp_path, lambda run_dir: None, start_timeout_s=0.05, max_restarts=0)
    assert status.state is State.FAILED
    assert "no step within start_timeout_s=0.05; ranks alive: [0]" in status.reason


def test_what_cannot_be_placed_fails_with_the_reason(tmp_path):
    launch = Launch(str(tmp_path))
    node_provider = PretendedNodeProvider(PretendedNode(tmp_path, iter(())))

    def refuse(num_nodes, while_waiting):
        raise NodesUnavailable("the job needs 9 nodes")

    node_provider.provide_nodes = refuse
    begin_submission(launch)
    supervise(launch, node_provider)
    assert read_status(tmp_path).reason == "the job needs 9 nodes"
    assert states(tmp_path) == ["SUBMITTED", "FAILED"]


def test_a_stop_before_the_start_starts_nothing(tmp_path):
    launch = Launch(str(tmp_path))
    node_provider = PretendedNodeProvider(PretendedNode(tmp_path, iter(())))
    begin_submission(launch)
    request_stop(tmp_path)
    supervise(launch, node_provider)
    assert states(tmp_path) == ["SUBMITTED", "STOPPED"]
    assert not node_provider.node.assignments


def test_a_node_with_a_rank_that_cannot_be_killed_is_not_used_again(tmp_path):
    def leaves_a_rank(run_dir: Path) -> AgentReport:
        first.stuck = "SIGKILL does not end process 7 (rank 0 of generation 1)"
        return failed()

    first = PretendedNode(tmp_path, iter([makes_steps(2, then=leaves_a_rank)]))
    first.spare = PretendedNode(tmp_path, iter([makes_steps(3, then=finishes)]))
    launch = Launch(str(tmp_path), backoff_s=0.001, max_node_losses=1)
    begin_submission(launch)
    supervise(launch, PretendedNodeProvider(first))
    assert read_status(tmp_path).state is State.SUCCEEDED
    assert (len(first.assignments), len(first.spare.assignments)) == (1, 1)
    [told] = [one for one in Journal(tmp_path).entries() if "process 7" in one.reason]
    assert "node 0: SIGKILL does not end process 7" in told.reason
    assert "this job does not use the node again" in told.reason
    assert told.details["charged_to"] == "infrastructure"


def test_a_generation_that_fails_while_stopping_is_not_followed_by_another(tmp_path):
    def stops_badly(run_dir: Path) -> AgentReport:
        request_stop(run_dir)
        return failed()

    status, node = live(tmp_path, makes_steps(2, then=stops_badly))
    assert status.state is State.STOPPED
    assert "failed on the way: rank 0" in status.reason
    assert len(node.assignments) == 1


def stops(run_dir: Path) -> AgentReport:
    (run_dir / "result.json").write_text('{"state": "stopped", "step": 3}')
    return OK


@pytest.mark.parametrize("then", [stops, ends(failed())])
def test_a_preemption_notice_ends_the_job_as_preempted(tmp_path, then):
    def is_announced(run_dir: Path) -> None:
        if stop_requested(run_dir) is None:
            request_stop(run_dir, preempt=True)
            return None
        return then(run_dir)

    status, node = live(tmp_path, makes_steps(3, then=is_announced))
    assert status.state is State.PREEMPTED
    assert status.exit_code == 75
    assert len(node.assignments) == 1
    assert "STOPPING" in states(tmp_path)


def test_sigterm_is_a_preemption_notice(tmp_path):
    with interrupts_stop_the_job(tmp_path):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_requested(tmp_path) == "preempt"
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_requested(tmp_path) == "now"


def test_ranks_make_way_for_another_number_of_nodes(tmp_path, monkeypatch):
    wishes = iter(["2 node(s) can be had"])
    monkeypatch.setattr(generations.Placing, "why_resize", lambda *_: next(wishes, ""))

    def makes_way(run_dir: Path) -> AgentReport | None:
        return stops(run_dir) if (run_dir / "pause").exists() else None

    status, node = live(
        tmp_path, makes_steps(3, then=makes_way), makes_steps(4, then=finishes), max_restarts=0
    )
    assert status.state is State.SUCCEEDED
    assert status.restarts == 0, "nothing has failed"
    assert states(tmp_path).count("RESIZING") == 2
    assert len(node.assignments) == 2
    assert not (tmp_path / "pause").exists()


def test_a_person_s_stop_goes_before_a_pause(tmp_path, monkeypatch):
    monkeypatch.setattr(generations.Placing, "why_resize", lambda *_: "2 node(s) can be had")

    def is_stopped(run_dir: Path) -> AgentReport | None:
        if not (run_dir / "pause").exists():
            return None
        request_stop(run_dir)
        return stops(run_dir)

    status, _ = live(tmp_path, makes_steps(3, then=is_stopped))
    assert status.state is State.STOPPED


def test_lost_nodes_are_charged_to_a_budget_of_their_own(tmp_path):
    def lost(run_dir: Path) -> AgentReport:
        raise NodeLost("its agent actor died")

    status, node = live(tmp_path, *[lost] * 9, max_restarts=0, max_node_losses=2)
    assert status.state is State.FAILED
    assert "max_node_losses=2 used up" in status.reason
    assert len(node.assignments) == 3
    charged = [entry.details.get("left") for entry in Journal(tmp_path).entries()]
    assert [left for left in charged if left is not None] == [1, 0, 0]


def test_stop_now_ends_ranks_that_do_not(tmp_path):
    def never(run_dir: Path) -> None:
        request_stop(run_dir, now=True)

    status, _ = live(tmp_path, makes_steps(2, then=never))
    assert status.state is State.STOPPED
    assert "at once" in status.reason


@pytest.fixture
def disk(monkeypatch) -> dict[str, int]:
    """A disk of the run folder that refuses so many writes of the supervisor as `left` says."""
    state = {"left": 0, "refused": 0}

    def refusing(original):
        def write(*arguments, **named):
            if state["left"] > 0:
                state["left"] -= 1
                state["refused"] += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return original(*arguments, **named)

        return write

    monkeypatch.setattr(Journal, "write", refusing(Journal.write))
    write = patient_journal.write_atomically
    monkeypatch.setattr(patient_journal, "write_atomically", refusing(write))
    monkeypatch.setattr(patient_journal, "_SETTLE_S", 0.001)
    return state


@pytest.mark.parametrize("writes", [1, 2, 7])
def test_a_full_disk_costs_the_supervisor_nothing_but_time(tmp_path, disk, writes):
    """It fills up while the ranks work; whatever is refused, all is told and in order."""

    def fills(report: AgentReport):
        def act(run_dir: Path) -> AgentReport:
            disk["left"] = writes
            return report

        return act

    status, node = live(
        tmp_path,
        makes_steps(1, then=fills(failed())),
        makes_steps(2, then=fills(failed("KeyError: other"))),
        makes_steps(5, then=lambda run_dir: (fills(OK)(run_dir), finishes(run_dir))[1]),
    )
    assert status.state is State.SUCCEEDED
    assert disk == {"left": 0, "refused": 3 * writes}
    assert states(tmp_path) == [
        "SUBMITTED",
        *("STARTING", "RUNNING", "RECOVERING") * 2,
        *("STARTING", "RUNNING", "SUCCEEDED"),
    ]
    assert [attempt.generation for attempt in node.assignments] == [1, 2, 3]
    late = [entry for entry in Journal(tmp_path).entries() if "late_s" in entry.details]
    assert [entry.state.value for entry in late if "No space left" in entry.reason] == [
        "RUNNING",
        "RUNNING",
        "RUNNING",
    ]


def test_a_generation_that_cannot_be_announced_is_waited_for(tmp_path, disk, monkeypatch):
    placed = PretendedNodeProvider.provide_nodes

    def provide_nodes(self, num_nodes, while_waiting):
        nodes = placed(self, num_nodes, while_waiting)
        disk["left"] = 4
        return nodes

    monkeypatch.setattr(PretendedNodeProvider, "provide_nodes", provide_nodes)
    status, node = live(tmp_path, makes_steps(5, then=finishes))
    assert status.state is State.SUCCEEDED
    assert states(tmp_path) == ["SUBMITTED", "PLACING", "STARTING", "RUNNING", "SUCCEEDED"]
    assert "can be written (No space left on device)" in Journal(tmp_path).entries()[1].reason
    assert len(node.assignments) == 1


def test_a_node_whose_folder_cannot_be_written_is_a_failure_that_is_recovered_from(tmp_path):
    def has_no_space(run_dir: Path) -> AgentReport:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    status, _ = live(tmp_path, has_no_space, makes_steps(5, then=finishes))
    assert status.state is State.SUCCEEDED
    assert status.restarts == 1


def test_the_fault_drill_is_on_purpose_free_and_happens_once(tmp_path):
    answers = iter(
        [None, failed("gloo: connection closed by peer")]
    )  # first nothing, then what the kill did
    status, node = live(
        tmp_path,
        makes_steps(4, then=lambda run_dir: next(answers)),
        makes_steps(3, 4, 5, then=finishes),
        max_restarts=0,
        rehearse_failure_at_step=4,
    )
    assert status.state is State.SUCCEEDED
    assert len(node.assignments) == 2
    assert status.root_cause is not None
    assert status.root_cause.on_purpose
    assert status.root_cause.summary == "fault drill: rank 0 was killed on purpose at step 4"


def test_a_supervisor_that_was_superseded_stops_without_a_word(tmp_path):
    def newer_one_appears(run_dir: Path) -> None:
        (run_dir / "generation").write_text("9")

    _, node = live(tmp_path, makes_steps(1, then=newer_one_appears))
    assert states(tmp_path) == ["SUBMITTED", "STARTING"]
    assert len(node.assignments) == 1


def test_a_restarted_supervisor_goes_on_and_remembers_the_failures(tmp_path):
    launch = Launch(str(tmp_path), max_restarts=1, backoff_s=0.001)
    begin_submission(launch)
    journal = Journal(tmp_path)
    journal.append(
        State.RECOVERING, generation=1, reason="x", details={"root_cause": {"summary": "x"}}
    )
    journal.append(State.RUNNING, generation=2, reason="")
    (tmp_path / "generation").write_text("2")
    node = PretendedNode(tmp_path, iter([makes_steps(3, then=ends(failed()))]))
    supervise(launch, PretendedNodeProvider(node))
    assert node.assignments[0].generation == 3
    status = read_status(tmp_path)
    assert status.state is State.FAILED, (
        "one failure was before the supervisor was killed, max_restarts is 1"
    )
    assert (
        "the supervisor was killed and has been restarted"
        in [entry.reason for entry in journal.entries()][3]
    )


def begin_generation(tmp_path: Path, *states: State) -> Launch:
    """Leaves what a supervisor leaves that is killed while generation 1 runs."""
    launch = Launch(str(tmp_path), max_restarts=0)
    begin_submission(launch)
    journal = Journal(tmp_path)
    for state in (State.STARTING, *states):
        journal.append(state, generation=1, reason="", details={"num_nodes": 1})
    (tmp_path / "generation").write_text("1")
    return launch


def running_node(tmp_path: Path, *script: Callable[[Path], AgentReport | None]) -> PretendedNode:
    """A node that runs generation 1; the script begins when the successor looks."""
    node = PretendedNode(tmp_path, iter(script))
    node.runs, node.act = [1, 0], lambda run_dir: next(node.script)(run_dir)
    return node


def test_a_restarted_supervisor_takes_over_the_generation_that_goes_on(tmp_path):
    launch = begin_generation(tmp_path, State.RUNNING)
    makes_steps(1, 2, then=ends(OK))(tmp_path)
    node = running_node(tmp_path, lambda run_dir: None, makes_steps(3, then=finishes))
    supervise(launch, PretendedNodeProvider(node))
    assert node.assignments == [], "nothing was started"
    entries = Journal(tmp_path).entries()
    assert [entry.state.value for entry in entries[3:]] == ["RUNNING", "SUCCEEDED"]
    assert "generation 1 has gone on" in entries[3].reason
    assert read_status(tmp_path).restarts == 0


def test_what_happens_after_the_takeover_is_judged_as_ever(tmp_path):
    launch = begin_generation(tmp_path, State.RUNNING)
    makes_steps(1, 2, then=ends(OK))(tmp_path)
    supervise(launch, PretendedNodeProvider(running_node(tmp_path, ends(failed()))))
    status = read_status(tmp_path)
    assert status.state is State.FAILED
    assert "at step 2" in status.reason


def test_a_generation_that_was_still_starting_is_taken_over_too(tmp_path):
    launch = begin_generation(tmp_path)
    node = running_node(tmp_path, makes_steps(1, then=finishes))
    supervise(launch, PretendedNodeProvider(node))
    assert states(tmp_path)[2:] == ["STARTING", "RUNNING", "SUCCEEDED"]


@pytest.mark.parametrize("runs", [[], [2, 0], [1, 1]])
def test_nodes_that_run_something_else_get_a_new_generation(tmp_path, runs):
    launch = begin_generation(tmp_path, State.RUNNING)
    node = PretendedNode(tmp_path, iter([makes_steps(3, then=finishes)]))
    node.runs = runs
    supervise(launch, PretendedNodeProvider(node))
    assert [attempt.generation for attempt in node.assignments] == [2]
    assert "a new generation takes over" in Journal(tmp_path).entries()[3].reason


def test_a_supervisor_with_a_successor_ends_nothing(tmp_path):
    """It has thawed: its nodes and the folder are the other's."""

    def is_replaced(run_dir: Path) -> None:
        SupervisorNumber.take(run_dir)

    launch = Launch(str(tmp_path))
    begin_submission(launch)
    node = PretendedNode(tmp_path, iter([makes_steps(1, then=is_replaced)]))
    provider = PretendedNodeProvider(node)
    supervise(launch, provider)
    assert node.runs == [1, 0], "it was not stopped"
    assert not provider.released
    assert states(tmp_path) == ["SUBMITTED", "STARTING"]


def test_a_supervisor_that_was_killed_after_the_end_only_tidies_up(tmp_path):
    launch = begin_generation(tmp_path, State.RUNNING, State.SUCCEEDED)
    provider = PretendedNodeProvider(running_node(tmp_path))
    supervise(launch, provider)
    assert provider.released
    assert states(tmp_path)[-1] == "SUCCEEDED"


class CutOffNode(PretendedNode):
    """One of two nodes that do not reach each other when they are asked the first two times."""

    def __init__(self, run_dir: Path, number: int, *script: Callable[[Path], AgentReport | None]):
        super().__init__(run_dir, iter(script))
        self.number, self.answers = number, [[0], [0]]

    def describe(self):
        return {"address": "127.0.0.1", "listens_at": (f"10.0.0.{self.number}", 6379)}

    def unreachable(self, others) -> list[int]:
        assert others == [(f"10.0.0.{1 - self.number}", 6379)]
        return self.answers.pop() if self.answers else []


def test_nodes_that_do_not_reach_each_other_are_named_and_waited_for(tmp_path):
    nodes = []
    for number in (0, 1):
        report = AgentReport(False, (RankFailure(number, 1, 1.0, "RuntimeError: timed out"),))
        script = makes_steps(3, then=ends(report)), makes_steps(4, then=finishes)
        nodes.append(CutOffNode(tmp_path, number, *script))
    provider = PretendedNodeProvider(nodes[0])
    provider.capacity = lambda: Capacity(2, 2)
    provider.provide_nodes = lambda num_nodes, while_waiting: nodes
    launch = Launch(str(tmp_path), num_nodes=2, max_restarts=0, backoff_s=0.001)
    begin_submission(launch)
    supervise(launch, provider)
    told = {entry.state: entry for entry in Journal(tmp_path).entries()}
    words = "node 0 (10.0.0.0) and node 1 (10.0.0.1) do not reach each other"
    assert told[State.RECOVERING].reason.startswith(f"{words} over the network: rank 0")
    assert told[State.RECOVERING].details["charged_to"] == "infrastructure"
    assert told[State.PLACING].reason == f"{words}; the job waits for the network between them"
    assert read_status(tmp_path).state is State.SUCCEEDED
    assert len(nodes[0].assignments) == 2
