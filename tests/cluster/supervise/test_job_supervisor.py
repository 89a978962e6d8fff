"""Tests a job's life with fake nodes; test_local_jobs.py uses real processes."""

import contextlib
import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from moebius.cluster.job import (
    Journal,
    Launch,
    State,
    SupervisorNumber,
    begin_submission,
    read_status,
)
from moebius.cluster.nodes.assignment import AgentReport, RankFailure
from moebius.cluster.nodes.provider import Capacity, NodeLost, NodesUnavailable
from moebius.cluster.report.run_report import read_report
from moebius.cluster.stop import interrupts_stop_the_job, request_stop, stop_requested
from moebius.cluster.supervise import generation, job_supervisor, retrying_journal
from moebius.cluster.supervise.job_supervisor import JobSupervisor, supervise
from moebius.train.config.errors import EXIT_MISTAKE
from tests.cluster.pretended import (
    OK,
    Act,
    PretendedNode,
    ends,
    failed,
    fails,
    finishes,
    in_turn,
    live,
    makes_steps,
    raises,
    states,
    stops,
    with_result,
    writes,
)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(job_supervisor, "POLL_S", 0.001)
    monkeypatch.setattr(generation, "POLL_S", 0.001)


DISK_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
LOST = raises(NodeLost("its agent actor died"))
PORT_TAKEN = ends(AgentReport(ok=False, message="DistNetworkError: EADDRINUSE"))
GOES_ON = makes_steps(9, then=finishes)
ERRORS = "moebius.data_pipeline.errors"
UNSAVED = "moebius.distributed.checkpoint.format.SaveFailedError: step 4 was not saved: disk full"


def then_asks_to_stop(act: Act, **how: bool) -> Act:
    def asks(run_dir: Path) -> AgentReport | None:
        if stop_requested(run_dir) is None:
            request_stop(run_dir, **how)
            return None
        return act(run_dir)

    return asks


def waits(run_dir: Path) -> None:
    return None


# What the generations do, with what launch; the state at the end, how many generations there were, and
# words of the last reason.
ENDINGS: dict[str, tuple[list[Act], dict[str, Any], State, int, str]] = {
    "a result is a success": ([makes_steps(1, 5, then=finishes)], {}, State.SUCCEEDED, 1, "step 5"),
    "exit code zero without a result": (
        *([ends(OK)], {"max_restarts": 0}, State.FAILED, 1),
        "before the run was finished: there is no result.json",
    ),
    "a result that is none": (
        *([with_result('{"state": "diverged"}')], {"max_restarts": 0}, State.FAILED, 1),
        "result.json says 'diverged'",
    ),
    "restarts are limited": (
        [makes_steps(step, then=fails(f"ValueError: {step}")) for step in (1, 2, 3)],
        *({"max_restarts": 2}, State.FAILED, 3, "max_restarts=2 used up"),
    ),
    "the same error at the same step three times": (
        [makes_steps(7, then=fails())] * 9,
        *({"max_restarts": 8}, State.FAILED, 3, "at step 7, 3 times; the same error at the same"),
    ),
    "the same error at other steps": (
        [*(makes_steps(step, then=fails()) for step in range(1, 5)), GOES_ON],
        *({"max_restarts": 8}, State.SUCCEEDED, 5, ""),
    ),
    "a mistake": (
        [fails("moebius.train.config.errors.ConfigError: train.timeout_s=0", exit_code=78)] * 3,
        *({"max_restarts": 8}, State.FAILED, 1, "before the first step; a restart would not help"),
    ),
    "what has worked before is tried again": (
        [
            makes_steps(3, then=fails()),
            fails(f"{ERRORS}.ShardError: is not there", exit_code=78),
            GOES_ON,
        ],
        *({}, State.SUCCEEDED, 3, ""),
    ),
    "a save that fails for good": (
        [makes_steps(4, then=fails(UNSAVED))],
        *({"max_restarts": 5}, State.FAILED, 1),
        'checkpoint.on_failure="stop": step 4 was not saved: disk full',
    ),
    "a taken port costs no restart": (
        [PORT_TAKEN, GOES_ON],
        *({"max_restarts": 0}, State.SUCCEEDED, 2, ""),
    ),
    "ports that are always taken": (
        [PORT_TAKEN] * 9,
        *({"max_restarts": 0}, State.FAILED, job_supervisor.PORT_ATTEMPTS, "no port on node 0"),
    ),
    "a lost node": ([makes_steps(3, then=LOST), GOES_ON], {}, State.SUCCEEDED, 2, ""),
    "lost nodes have a budget of their own": (
        [LOST] * 9,
        *({"max_restarts": 0, "max_node_losses": 2}, State.FAILED, 3, "max_node_losses=2 used up"),
    ),
    "a node's folder that is full": ([raises(DISK_FULL), GOES_ON], {}, State.SUCCEEDED, 2, ""),
    "no step in time": (
        *([waits], {"start_timeout_s": 0.05, "max_restarts": 0}, State.FAILED, 1),
        "no step within start_timeout_s=0.05; ranks alive: [0]",
    ),
    "a failure while stopping": (
        [makes_steps(2, then=then_asks_to_stop(fails()))],
        *({}, State.STOPPED, 1, "failed while stopping: rank 0"),
    ),
    "a stop": ([makes_steps(2, then=then_asks_to_stop(stops))], {}, State.STOPPED, 1, "step 3"),
    "an end that nobody asked for": (
        *([makes_steps(3, then=stops), GOES_ON], {}, State.SUCCEEDED, 2, ""),
    ),
    "an end at once": (
        [makes_steps(2, then=then_asks_to_stop(waits, now=True))],
        *({}, State.STOPPED, 1, "at once"),
    ),
    "a preemption": (
        [makes_steps(3, then=then_asks_to_stop(stops, preempt=True))],
        *({}, State.PREEMPTED, 1, "`moebius resume` continues from there"),
    ),
    "a failure while being preempted": (
        [makes_steps(3, then=then_asks_to_stop(fails(), preempt=True))],
        *({}, State.PREEMPTED, 1, "failed while stopping"),
    ),
}


@pytest.mark.fault("F2", "F3", "F21")
@pytest.mark.parametrize("ending", ENDINGS)
def test_how_a_job_ends(tmp_path, ending):
    script, values, state, generations, words = ENDINGS[ending]
    status, node = live(tmp_path, *script, **values)
    assert status.state is state
    assert words in status.reason
    assert [each.generation for each in node.assignments] == [*range(1, generations + 1)]
    assert status.exit_code == {State.FAILED: 1, State.PREEMPTED: 75}.get(state, 0)
    assert len({each.master_port for each in node.assignments}) == generations


def test_a_start_without_a_cpu_is_excused(tmp_path):
    """It is charged to nothing, and the journal tells it once."""
    node = PretendedNode(tmp_path, [in_turn(*[waits] * 100, makes_steps(5, then=finishes))])
    node.starved = 1e6
    launch = Launch(str(tmp_path), start_timeout_s=0.01, max_restarts=0)
    begin_submission(launch)
    supervise(launch, node)
    assert read_status(tmp_path).state is State.SUCCEEDED
    told = [entry for entry in Journal(tmp_path).entries() if "had no CPU for" in entry.reason]
    assert len(told) == 1


def test_the_root_cause_is_that_of_the_last_failure(tmp_path):
    script = [makes_steps(step, then=fails(f"ValueError: {step}")) for step in (1, 2)]
    cause = live(tmp_path, *script, max_restarts=1)[0].root_cause
    assert cause is not None
    assert (cause.rank, cause.error) == (0, "ValueError: 2")
    assert cause.log == "logs/g002/node0/rank0.log"
    charged = [entry.details.get("left") for entry in Journal(tmp_path).entries()]
    assert [left for left in charged if left is not None] == [0, 0]


def test_a_result_of_an_earlier_generation_does_not_count(tmp_path):
    finishes(tmp_path)
    status, _ = live(tmp_path, ends(OK), max_restarts=0)
    assert status.state is State.FAILED


FORMER, ASKED = '{"train": {"steps": 5}}', '{"train": {"steps": 9}}'


def ends_at(step: int) -> Act:
    return with_result(json.dumps({"state": "finished", "step": step}))


def is_killed(run_dir: Path) -> None:
    raise SystemExit


MISTAKE = fails("ConfigError: no", exit_code=EXIT_MISTAKE)


@pytest.mark.parametrize(
    ("script", "is_changed"),
    [
        ([MISTAKE], False),
        ([fails()] * 2, False),
        ([is_killed], False),
        ([fails(), is_killed], False),
        ([makes_steps(6, then=is_killed), makes_steps(6, 9, then=ends_at(9))], True),
        ([makes_steps(6, then=MISTAKE)], True),
        ([fails(), makes_steps(6, 9, then=ends_at(9))], True),
        ([ends_at(9)], True),  # no step was left
    ],
)
def test_a_continued_run_is_as_it_was_until_the_first_step(tmp_path, script, is_changed):
    live(tmp_path, makes_steps(5, then=finishes), configuration=FORMER)
    names = ["config.json", "result.json"]
    before = [(tmp_path / name).read_text() for name in names]
    launch = Launch(
        str(tmp_path),
        configuration=ASKED,
        config_file="config.next.json",
        backoff_s=0.001,
        max_restarts=1,
    )
    begin_submission(launch)
    node = PretendedNode(tmp_path, script)
    while len(node.assignments) < len(script):  # another supervisor follows one that is killed
        with contextlib.suppress(SystemExit):
            supervise(launch, node)
    if is_changed:
        assert (tmp_path / "config.json").read_text() == ASKED
        assert not (tmp_path / "config.next.json").exists()
        return
    found = [(tmp_path / name).read_text() for name in names if (tmp_path / name).exists()]
    assert found == before[: len(found)]
    assert (tmp_path / "config.next.json").read_text() == ASKED, "ranks read it"
    if (status := read_status(tmp_path)).state.is_final:
        assert found == before
        assert "config.json is as before, and config.next.json holds what was" in status.reason


@pytest.mark.parametrize("name", ["config.json", "source.json"])
def test_a_folder_in_the_place_of_a_file_that_ranks_read_is_waited_for(tmp_path, monkeypatch, name):
    def breaks(run_dir: Path) -> AgentReport:
        (run_dir / name).unlink()
        (run_dir / name).mkdir()
        return failed()

    def log(self: JobSupervisor, state: State, reason: str, **details: Any) -> None:
        if f"waiting until you remove the folder {tmp_path / name}" in reason:
            (tmp_path / name).rmdir()
        logs(self, state, reason, **details)

    logs = JobSupervisor.log
    monkeypatch.setattr(JobSupervisor, "log", log)
    script = (breaks, makes_steps(5, then=finishes))
    status, _ = live(tmp_path, *script, configuration=FORMER, source=FORMER)
    assert (status.state, status.restarts) == (State.SUCCEEDED, 1)
    assert (tmp_path / name).read_text() == FORMER


# The journal --------------------------------------------------------------------------------------


def test_the_journal_tells_how_long_each_phase_of_a_start_took(tmp_path):
    start = {"kind": "start", "start_s": {"join": 0.25, "build": 0.5}}
    evaluation = {"kind": "eval", "step": 0, "loss": 5.0, "seconds": 0.75}
    begins = writes(start, evaluation, then=makes_steps(1, then=fails()))
    live(tmp_path, begins, makes_steps(2, then=finishes))
    running = [e.details for e in Journal(tmp_path).entries() if e.state is State.RUNNING]
    first, second = (details["phases_s"] for details in running)
    ranks = {"join": 0.25, "build": 0.5, "eval": 0.75, "step": 0.0}
    assert list(first) == ["place", "check", "data", "order", "processes", *ranks]
    assert ranks.items() <= first.items()
    assert list(second)[:3] == ["collect", "end", "wait"]
    assert "join" not in second, "this one's ranks have not told"
    assert all(0 <= seconds < 5 for seconds in second.values())


LIMITS = {"loss_limit": 3.5, "grad_norm": "inf", "grad_norm_limit": 2.0, "first_sample": 64}
SPIKE = {"kind": "spike", "step": 8, "loss": 9.25, "in_a_row": 1, **LIMITS}
TROUBLE = {
    "a damaged checkpoint": (
        {"kind": "checkpoint_set_aside", "step": 8, "path": "step_00000008.damaged",
         "why": "a file is missing", "resumed_from_step": 4},
        "step 8 was damaged and renamed step_00000008.damaged; the run continues from step 4: a",
    ),
    "a checkpoint that was not saved": (
        {"kind": "checkpoint", "step": 12, "seconds": 1.0, "error": "No space left on device"},
        "No space left on device",
    ),
    "the first spike of a row": (SPIKE, "loss 9.25 (limit 3.5), gradient norm inf (limit 2)"),
    "another of the same row": (SPIKE | {"step": 9, "in_a_row": 2}, ""),
    "half a line": ({"kind": "spike"}, ""),
    "a damaged checkpoint without a path": ({"kind": "checkpoint_set_aside", "step": 8}, ""),
    "a start without times": ({"kind": "start", "start_s": [1]}, ""),
    "a start with words for times": ({"kind": "start", "start_s": {"load": "long"}}, ""),
    "an evaluation in words": ({"kind": "eval", "step": "x", "seconds": "long"}, ""),
    "a step in words": ({"kind": "train", "step": "nine", "step_s": None, "time": "now"}, ""),
}  # fmt: skip


@pytest.mark.fault("F16")
@pytest.mark.parametrize("trouble", TROUBLE)
def test_trouble_with_checkpoints_and_spikes_is_in_the_journal(tmp_path, trouble):
    line, words = TROUBLE[trouble]
    live(tmp_path, makes_steps(9, then=writes(line, then=finishes)))
    told = [entry.reason for entry in Journal(tmp_path).entries()[3:-1]]
    assert len(told) == bool(words)
    assert words in "".join(told)


# Before ranks start -------------------------------------------------------------------------------


@pytest.mark.fault("F24")
def test_a_node_that_lacks_something_ends_the_job_before_a_rank_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(PretendedNode, "check", lambda *_: "b does not see the run folder")
    status, node = live(tmp_path, max_restarts=8)
    assert status.state is State.FAILED
    assert status.reason.startswith("node 0: b does not see the run folder")
    assert not node.assignments
    assert sorted(path.name for path in tmp_path.iterdir()) == ["journal.jsonl", "supervisor"]


def test_what_cannot_be_placed_fails_with_the_reason(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise NodesUnavailable("the job needs 9 nodes")

    monkeypatch.setattr(PretendedNode, "provide_nodes", refuse)
    status, _ = live(tmp_path)
    assert status.reason == "the job needs 9 nodes"
    assert states(tmp_path) == ["SUBMITTED", "FAILED"]


def test_a_stop_before_the_start_starts_nothing(tmp_path):
    launch, node = Launch(str(tmp_path)), PretendedNode(tmp_path)
    begin_submission(launch)
    request_stop(tmp_path)
    supervise(launch, node)
    assert states(tmp_path) == ["SUBMITTED", "STOPPED"]
    assert not node.assignments


@pytest.mark.fault("F26")
def test_a_node_with_a_rank_that_cannot_be_killed_is_not_used_again(tmp_path):
    def leaves_a_rank(run_dir: Path) -> AgentReport:
        first.stuck = "SIGKILL does not end process 7 (rank 0 of generation 1)"
        return failed()

    spare = PretendedNode(tmp_path, [makes_steps(3, then=finishes)])
    first: Any = PretendedNode(tmp_path, [makes_steps(2, then=leaves_a_rank)], spare)
    excluded: list[str] = []
    provided = first.provide_nodes
    first.provide_nodes = lambda *given: provided(*given) if excluded else [first]
    first.exclude = lambda node, why: excluded.append(why)
    launch = Launch(str(tmp_path), backoff_s=0.001, max_node_losses=1)
    begin_submission(launch)
    supervise(launch, first)
    assert read_status(tmp_path).state is State.SUCCEEDED
    assert (len(first.assignments), len(spare.assignments)) == (1, 1)
    assert excluded == [first.stuck]
    [told] = [one for one in Journal(tmp_path).entries() if "process 7" in one.reason]
    assert "node 0: SIGKILL does not end process 7" in told.reason
    assert "this job no longer uses the node" in told.reason
    assert told.details["charged_to"] == "infrastructure"


# Signals, other sizes, the drill ------------------------------------------------------------------


def test_sigterm_is_a_preemption_notice(tmp_path):
    with interrupts_stop_the_job(tmp_path):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_requested(tmp_path) == "preempt"
        os.kill(os.getpid(), signal.SIGINT)
        assert stop_requested(tmp_path) == "now"


@pytest.fixture
def more_nodes(monkeypatch) -> None:
    """Makes the run want more nodes, once."""
    reasons = iter(["2 node(s) are available"])
    monkeypatch.setattr(job_supervisor.Placing, "why_resize", lambda *_: next(reasons, ""))


@pytest.mark.usefixtures("more_nodes")
def test_ranks_make_way_for_another_number_of_nodes(tmp_path):
    def makes_way(run_dir: Path) -> AgentReport | None:
        return stops(run_dir) if (run_dir / "pause").exists() else None

    status, node = live(tmp_path, makes_steps(3, then=makes_way), GOES_ON, max_restarts=0)
    assert status.state is State.SUCCEEDED
    assert status.restarts == 0, "nothing has failed"
    assert states(tmp_path).count("RESIZING") == 2
    assert len(node.assignments) == 2
    assert not (tmp_path / "pause").exists()


@pytest.mark.usefixtures("more_nodes")
def test_a_person_s_stop_goes_before_a_pause(tmp_path):
    def is_stopped(run_dir: Path) -> AgentReport | None:
        if not (run_dir / "pause").exists():
            return None
        request_stop(run_dir)
        return stops(run_dir)

    status, _ = live(tmp_path, makes_steps(3, then=is_stopped))
    assert status.state is State.STOPPED


def test_the_fault_drill_is_on_purpose_free_and_happens_once(tmp_path):
    # first nothing, then the result of the kill
    answers = iter([None, failed("gloo: connection closed by peer")])
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


# Damaged files ------------------------------------------------------------------------------------


def tears(name: str, then: Act) -> Act:
    def act(run_dir: Path) -> AgentReport | None:
        (run_dir / name).write_bytes(b"\x00" * 7)
        return then(run_dir)

    return act


def test_a_damaged_generation_file_is_written_anew_while_ranks_run(tmp_path):
    looks = iter([tears("generation", waits), waits, makes_steps(5, then=finishes)])
    status, _ = live(tmp_path, lambda run_dir: next(looks)(run_dir))
    assert (status.state, status.restarts, status.generation) == (State.SUCCEEDED, 0, 1)
    assert (tmp_path / "generation").read_text() == "1"
    assert any("was damaged and is written again" in e.reason for e in Journal(tmp_path).entries())


def test_a_generation_after_a_damaged_number_has_one_that_nobody_can_have_had(tmp_path):
    """Generation 4 may have been announced without starting."""
    (tmp_path / "logs" / "g003").mkdir(parents=True)
    tears("generation", waits)(tmp_path)
    status, node = live(tmp_path, makes_steps(5, then=finishes))
    assert status.state is State.SUCCEEDED
    assert node.assignments[0].generation > 4


def test_a_damaged_wish_for_nodes_ends_the_job_and_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("moebius.cluster.supervise.placing.LOOK_EVERY_S", 0.0)
    status, _ = live(tmp_path, tears("scale.json", makes_steps(1, then=waits)))
    assert status.state is State.FAILED
    assert status.reason.startswith(f"{tmp_path}/scale.json is damaged (")
    assert f"remove it, and set the number of nodes (`moebius resume {tmp_path}" in (status.reason)


# A full disk --------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch) -> dict[str, int]:
    """Makes the run folder's disk refuse `left` writes of the supervisor."""
    state = {"left": 0, "refused": 0}

    def refusing(original):
        def write(*arguments, **named):
            if state["left"] > 0:
                state["left"] -= 1
                state["refused"] += 1
                raise DISK_FULL
            return original(*arguments, **named)

        return write

    monkeypatch.setattr(Journal, "write", refusing(Journal.write))
    write = retrying_journal.write_atomically
    monkeypatch.setattr(retrying_journal, "write_atomically", refusing(write))
    monkeypatch.setattr(retrying_journal, "_SETTLE_S", 0.001)
    return state


@pytest.mark.parametrize("writes", [1, 2, 7])
def test_a_full_disk_costs_the_supervisor_nothing_but_time(tmp_path, disk, writes):
    """It fills up while the ranks work; all entries are written in order."""

    def fills(then: Act) -> Act:
        def act(run_dir: Path) -> AgentReport | None:
            disk["left"] = writes
            return then(run_dir)

        return act

    status, node = live(
        tmp_path,
        makes_steps(1, then=fills(fails())),
        makes_steps(2, then=fills(fails("KeyError: other"))),
        makes_steps(5, then=fills(finishes)),
    )
    assert status.state is State.SUCCEEDED
    assert disk == {"left": 0, "refused": 3 * writes}
    recovery = ("STARTING", "RUNNING", "RECOVERING")
    end = ("STARTING", "RUNNING", "SUCCEEDED")
    assert states(tmp_path) == ["SUBMITTED", *recovery, *recovery, *end]
    assert [each.generation for each in node.assignments] == [1, 2, 3]
    late = [entry for entry in Journal(tmp_path).entries() if "late_s" in entry.details]
    assert {entry.details["late_because"] for entry in late} == {"No space left on device"}


def test_a_generation_that_cannot_be_announced_is_waited_for(tmp_path, disk, monkeypatch):
    placed = PretendedNode.provide_nodes

    def provide_nodes(self, num_nodes, while_waiting):
        nodes = placed(self, num_nodes, while_waiting)
        disk["left"] = 4
        return nodes

    monkeypatch.setattr(PretendedNode, "provide_nodes", provide_nodes)
    status, node = live(tmp_path, makes_steps(5, then=finishes))
    assert status.state is State.SUCCEEDED
    assert states(tmp_path) == ["SUBMITTED", "PLACING", "STARTING", "RUNNING", "SUCCEEDED"]
    assert "can be written (No space left on device)" in Journal(tmp_path).entries()[1].reason
    assert len(node.assignments) == 1


def test_a_run_folder_that_cannot_be_written_for_a_while_costs_no_restart(tmp_path, monkeypatch):
    """It is read-only when a rank is killed after 47 steps."""
    token_in, refusals = job_supervisor.token_in, iter([False, True, True, True])

    def refusing(run_dir: Path, **values: int) -> Any:
        if next(refusals, False):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return token_in(run_dir, **values)

    monkeypatch.setattr(job_supervisor, "token_in", refusing)
    killed = makes_steps(47, then=fails())
    status, node = live(tmp_path, killed, makes_steps(48, then=finishes), max_restarts=1)
    assert (status.state, status.restarts) == (State.SUCCEEDED, 1)
    assert len(node.assignments) == 2
    [waits_for] = [entry for entry in Journal(tmp_path).entries() if entry.state is State.PLACING]
    assert waits_for.reason == f"waiting until {tmp_path} can be written (Read-only file system)"


def test_a_generation_that_ends_before_a_new_step_is_not_said_to_be_the_first(tmp_path):
    script = [makes_steps(47, then=fails()), LOST, makes_steps(48, then=finishes)]
    live(tmp_path, *script)
    lost = [entry.reason for entry in Journal(tmp_path).entries() if "actor died" in entry.reason]
    assert "(before a new step, 99 restart(s) left" in lost[0]


# Another supervisor -------------------------------------------------------------------------------


@pytest.mark.fault("F10")
def test_a_supervisor_with_a_successor_ends_nothing(tmp_path):
    """It thaws after a successor has taken over its nodes and folder."""

    def is_replaced(run_dir: Path) -> None:
        SupervisorNumber.take(run_dir)

    launch = Launch(str(tmp_path))
    begin_submission(launch)
    node = PretendedNode(tmp_path, [makes_steps(1, then=is_replaced)])
    supervise(launch, node)
    assert node.runs == [1, 0], "it was not stopped"
    assert not node.is_released
    assert states(tmp_path) == ["SUBMITTED", "STARTING"]


@pytest.mark.fault("F10")
def test_a_restarted_supervisor_goes_on_and_remembers_the_failures(tmp_path):
    launch = Launch(str(tmp_path), max_restarts=1, backoff_s=0.001)
    begin_submission(launch)
    journal, cause = Journal(tmp_path), {"root_cause": {"summary": "x"}}
    journal.append(State.RECOVERING, generation=1, reason="x", details=cause)
    journal.append(State.RUNNING, generation=2, reason="")
    (tmp_path / "generation").write_text("2")
    node = PretendedNode(tmp_path, [makes_steps(3, then=fails())])
    supervise(launch, node)
    assert node.assignments[0].generation == 3
    # one failure was before the supervisor was killed, and max_restarts is 1
    assert read_status(tmp_path).state is State.FAILED
    assert "the supervisor was killed and has been restarted" in journal.entries()[3].reason


def begin_generation(tmp_path: Path, *states: State) -> Launch:
    """Writes what a supervisor leaves that is killed while generation 1 runs."""
    launch = Launch(str(tmp_path), max_restarts=0)
    begin_submission(launch)
    journal = Journal(tmp_path)
    for state in (State.STARTING, *states):
        journal.append(state, generation=1, reason="", details={"num_nodes": 1})
    (tmp_path / "generation").write_text("1")
    return launch


def running_node(tmp_path: Path, *script: Act) -> PretendedNode:
    """Returns a node that runs generation 1; its script begins with the successor."""
    node = PretendedNode(tmp_path, script)
    node.runs, node.act = [1, 0], lambda run_dir: next(node.script)(run_dir)
    return node


TAKEOVERS = {
    "of a run": ((State.RUNNING,), [waits, makes_steps(3, then=finishes)], "SUCCEEDED", "step 5"),
    "of a start": ((), [makes_steps(1, then=finishes)], "SUCCEEDED", "step 5"),
    "of a failure": ((State.RUNNING,), [fails()], "FAILED", "at step 2"),
}


@pytest.mark.fault("F10")
@pytest.mark.parametrize("takeover", TAKEOVERS)
def test_a_restarted_supervisor_takes_over_the_generation_that_goes_on(tmp_path, takeover):
    before, script, end, words = TAKEOVERS[takeover]
    launch = begin_generation(tmp_path, *before)
    if before:
        makes_steps(1, 2, then=waits)(tmp_path)
    node = running_node(tmp_path, *script)
    supervise(launch, node)
    assert node.assignments == [], "nothing was started"
    after = Journal(tmp_path).entries()[2 + len(before) :]
    assert "generation 1 kept running" in after[0].reason
    assert after[-1].state.value == end
    assert words in after[-1].reason
    assert read_status(tmp_path).restarts == 0


@pytest.mark.parametrize("runs", [[], [2, 0], [1, 1]])
def test_nodes_that_run_something_else_get_a_new_generation(tmp_path, runs):
    launch = begin_generation(tmp_path, State.RUNNING)
    node = PretendedNode(tmp_path, [makes_steps(3, then=finishes)])
    node.runs = runs
    supervise(launch, node)
    assert [each.generation for each in node.assignments] == [2]
    assert "a new generation takes over" in Journal(tmp_path).entries()[3].reason


def test_a_supervisor_that_was_killed_after_the_end_only_tidies_up(tmp_path):
    launch = begin_generation(tmp_path, State.RUNNING, State.SUCCEEDED)
    node = running_node(tmp_path)
    supervise(launch, node)
    assert node.is_released
    assert states(tmp_path)[-1] == "SUCCEEDED"


# The network --------------------------------------------------------------------------------------


class CutOffNode(PretendedNode):
    """One of two nodes that cannot reach each other the first two times."""

    def __init__(self, run_dir: Path, number: int, *script: Act):
        super().__init__(run_dir, script)
        self.number, self.answers = number, [[1 - number]] * 2

    def describe(self):
        return {"address": "127.0.0.1", "listens_at": (f"10.0.0.{self.number}", 6379)}

    def unreachable(self, others) -> list[int]:
        assert others == [("10.0.0.0", 6379), ("10.0.0.1", 6379)]
        return self.answers.pop() if self.answers else []


def test_nodes_that_do_not_reach_each_other_are_named_and_waited_for(tmp_path):
    nodes = []
    for number in (0, 1):
        report = AgentReport(False, (RankFailure(number, 1, 1.0, "RuntimeError: timed out"),))
        script = makes_steps(3, then=ends(report)), makes_steps(4, then=finishes)
        nodes.append(CutOffNode(tmp_path, number, *script))
    provider = nodes[0]
    provider.capacity = lambda: Capacity(2, 2)
    provider.provide_nodes = lambda num_nodes, while_waiting: nodes
    launch = Launch(str(tmp_path), num_nodes=2, max_restarts=0, backoff_s=0.001)
    begin_submission(launch)
    supervise(launch, provider)
    told = {entry.state: entry for entry in Journal(tmp_path).entries()}
    words = "node 0 (10.0.0.0) and node 1 (10.0.0.1) cannot reach each other"
    assert told[State.RECOVERING].reason.startswith(f"{words} over the network: rank 0")
    assert told[State.RECOVERING].details["charged_to"] == "infrastructure"
    assert told[State.PLACING].reason == f"{words}; the job waits for the network between them"
    assert read_status(tmp_path).state is State.SUCCEEDED
    assert len(nodes[0].assignments) == 2


def gap(of: str, why: str, lost: int) -> dict[str, Any]:
    return {"kind": "gap", "step": 4, "of": of, "why": why, "lost": lost}


def test_what_records_lack_stands_in_journal_and_status(tmp_path):
    lines = [
        gap("metrics.jsonl", "was deleted: it lacks the steps before 4", 1),
        gap("wandb", "cannot be written (x)", 1),
        gap("mlflow", "cannot be written (y)", 1),
        gap("mlflow", "works again; it lacks 0 lines", 0),
        gap("wandb", "lacks 2 lines in all", 2),
    ]
    status, _ = live(tmp_path, writes(*lines, then=GOES_ON))
    told = [entry.reason for entry in Journal(tmp_path).entries()]
    assert [words for words in told if "cannot be written" in words or "deleted" in words] == [
        f"{line['of']} {line['why']}" for line in lines[:3]
    ]
    assert status.gaps == (
        "metrics.jsonl was deleted: it lacks the steps before 4",
        "wandb lacks 2 lines in all",
    )


def test_a_job_whose_metrics_are_gone_has_trained_nevertheless(tmp_path):
    def loses_them(run_dir: Path) -> AgentReport | None:
        (run_dir / "metrics.jsonl").unlink()
        return finishes(run_dir)

    status, _ = live(tmp_path, makes_steps(3, 5, then=loses_them))
    assert (status.state, status.step) == (State.SUCCEEDED, 5)
    assert "SUCCEEDED at step 5" in read_report(tmp_path).story()


@pytest.mark.parametrize("compiles", [True, False])
def test_ranks_that_compile_say_so_before_their_first_step(tmp_path, compiles):
    live(tmp_path, GOES_ON, configuration=json.dumps({"train": {"compile": compiles}}))
    [started] = [one for one in Journal(tmp_path).entries() if one.state is State.STARTING]
    assert ("train.compile=true" in started.reason) == compiles
