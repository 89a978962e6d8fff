"""Tests data preparation beside the ranks: when ranks begin, and what follows if preparation dies."""

import io
import json
import threading
import time
from pathlib import Path

import pytest
from jobs import wait_for
from made_folder import MadeFolder, documents
from rich.console import Console

from moebius.cluster.job import JobStatus, Journal, Launch, State, begin_submission, read_status
from moebius.cluster.nodes.assignment import AgentReport
from moebius.cluster.report.data_progress import EXIT_FAILED, ProgressLog
from moebius.cluster.report.live import View, render
from moebius.cluster.stop import request_stop
from moebius.cluster.supervise import background_data, generation, job_supervisor
from moebius.cluster.supervise.background_data import BackgroundData, is_enough, workers_beside
from moebius.cluster.supervise.job_supervisor import supervise
from moebius.data_pipeline.errors import PrepareError
from moebius.data_pipeline.make.units import PrepareProgress, SourceProgress
from moebius.data_pipeline.manifest import give_up, given_up, read_manifest
from tests.cluster.pretended import OK, Act, PretendedNode, ends, failed, finishes, makes_steps

USED_UP = "moebius.data_pipeline.errors.PreparationFailedError: segment 1 will not come: why"


class Child:
    """A preparing process that ends when a test sets its exit code."""

    pid = 2**30  # nobody's

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9

    def wait(self) -> None:
        assert self.code is not None


class Pretended(BackgroundData):
    """Prepares with fake processes, which it keeps."""

    def __init__(self, launch: Launch):
        super().__init__(launch, list)
        self.children: list[Child] = []

    def _start(self) -> None:
        self._child = child = Child()  # type: ignore[assignment]
        self.children.append(child)


class Node(PretendedNode):
    """A node whose ranks end with a report once they may."""

    def __init__(self, run_dir: Path, *reports: AgentReport):
        super().__init__(run_dir, map(self.act_of, reports))
        self.may_end = threading.Event()

    def act_of(self, report: AgentReport) -> Act:
        end = finishes if report.ok else makes_steps(3, then=ends(report))
        return lambda run_dir: end(run_dir) if self.may_end.is_set() else None


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(job_supervisor, "POLL_S", 0.002)
    monkeypatch.setattr(generation, "POLL_S", 0.002)
    monkeypatch.setattr(generation, "COLLECT_S", 0.0)
    monkeypatch.setattr(background_data, "_MAX_BACKOFF_S", 0.0)


@pytest.fixture
def made(tmp_path) -> MadeFolder:
    return MadeFolder(tmp_path / "data")


def launch_of(tmp_path: Path, made: MadeFolder, *, tokens: int = 1, **values) -> Launch:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config = {
        "data": {"directory": str(made.folder)},
        "train": {"start_when": tokens},
    }
    (run_dir / "config.json").write_text(json.dumps(config))
    return Launch(str(run_dir), prepares_data=True, backoff_s=0.001, **values)


def seal(made: MadeFolder, number: int = 0) -> None:
    made.seal("text", documents(number, 5))


class Job:
    """Runs a supervisor in a thread."""

    def __init__(self, launch: Launch, *reports: AgentReport):
        self.run_dir = Path(launch.run_dir)
        self.nodes = Node(self.run_dir, *(reports or (OK,)))
        self.preparation = Pretended(launch)
        begin_submission(launch)
        self._thread = threading.Thread(
            target=supervise, args=(launch, self.nodes, self.preparation)
        )
        self._thread.start()

    def await_words(self, words: str) -> None:
        wait_for(lambda: words in self.told(), what=words)

    def told(self) -> str:
        return "\n".join(
            f"{entry.state.value}: {entry.reason}" for entry in Journal(self.run_dir).entries()
        )

    def end(self) -> JobStatus:
        self.nodes.may_end.set()
        self._thread.join(timeout=100)
        assert not self._thread.is_alive()
        return read_status(self.run_dir)


def test_ranks_begin_when_so_much_is_sealed_and_the_preparation_goes_on(tmp_path, made):
    wanted = 1 + sum(len(document.tokens) for document in documents(0, 5))
    job = Job(launch_of(tmp_path, made, tokens=wanted))
    job.await_words(f"PREPARING: the ranks start when {wanted} training tokens are sealed")
    seal(made)
    time.sleep(0.05)
    assert not job.nodes.assignments
    seal(made, 1)
    job.await_words("2 segments with")
    job.await_words("STARTING: starting 1 rank(s)")
    made.complete()
    job.preparation.children[0].code = 0
    job.await_words("STARTING: the data is complete: 2 segments with")
    assert job.end().state is State.SUCCEEDED
    assert len(job.preparation.children) == 1
    assert read_status(job.run_dir).restarts == 0


def test_ranks_begin_with_a_segment_of_every_source(tmp_path):
    made = MadeFolder(tmp_path, ("a", "b"))
    made.seal("a", documents(0, 20))
    tokens = len(made.stream("a", 0))
    assert not is_enough(read_manifest(tmp_path), tokens), "nothing of b"
    made.seal("b", documents(2, 2))
    assert is_enough(read_manifest(tmp_path), tokens)
    assert not is_enough(read_manifest(tmp_path), 10**6)
    made.complete()
    assert is_enough(read_manifest(tmp_path), 10**6)


def test_a_preparation_that_dies_is_started_again_within_the_budget(tmp_path, made):
    seal(made)
    job = Job(launch_of(tmp_path, made, max_restarts=2))
    for number in range(3):
        wait_for(lambda n=number: len(job.preparation.children) > n)
        job.preparation.children[number].code = -9
    job.await_words("data preparation died (killed by signal 9) and is being restarted; 1 res")
    job.await_words("data preparation failed: killed by signal 9. The ranks continue")
    assert given_up(made.folder) == "killed by signal 9"
    assert job.end().state is State.SUCCEEDED, "what was sealed was enough"
    assert len(job.preparation.children) == 3


def test_a_preparation_that_would_fail_again_ends_the_job_that_waits_for_it(tmp_path, made):
    job = Job(launch_of(tmp_path, made))
    job.await_words("PREPARING")
    ProgressLog(job.run_dir).end("failed", "b.txt is not UTF-8")
    job.preparation.children[0].code = EXIT_FAILED
    status = job.end()
    assert status.state is State.FAILED
    assert status.reason == "the data could not be prepared: b.txt is not UTF-8"
    assert len(job.preparation.children) == 1
    assert not job.nodes.assignments


def test_another_run_of_a_given_up_folder_begins_anew(tmp_path, made):
    seal(made)
    give_up(made.folder, "yesterday")
    job = Job(launch_of(tmp_path, made))
    job.await_words("STARTING")
    assert given_up(made.folder) is None
    job.end()


def test_a_job_that_waits_for_data_can_be_stopped(tmp_path, made):
    job = Job(launch_of(tmp_path, made))
    job.await_words("PREPARING")
    request_stop(job.run_dir)
    status = job.end()
    assert status.state is State.STOPPED
    assert job.preparation.children[0].code == -9


def test_ranks_that_have_used_up_what_is_sealed_are_not_started_again(tmp_path, made):
    seal(made)
    status = Job(launch_of(tmp_path, made), failed(USED_UP)).end()
    assert status.state is State.FAILED
    assert status.reason == "the data ended after step 3: segment 1 will not come: why"
    assert status.root_cause is not None
    assert status.root_cause.summary == "segment 1 will not come: why"
    assert status.generation == 1


def test_a_failure_that_a_full_disk_hides_from_the_ranks_is_told_later(tmp_path, made, monkeypatch):
    disk = iter([True, True])

    def refuses_twice(directory: Path, reason: str) -> None:
        if next(disk, False):
            raise PrepareError("no room for given-up.json")
        give_up(directory, reason)

    monkeypatch.setattr(background_data, "give_up", refuses_twice)
    seal(made)
    job = Job(launch_of(tmp_path, made, max_restarts=0))
    job.await_words("STARTING")
    job.preparation.children[0].code = -9
    job.await_words("data preparation failed: killed by signal 9. The ranks continue")
    wait_for(lambda: given_up(made.folder) == "killed by signal 9")
    assert job.end().state is State.SUCCEEDED


def test_the_preparation_has_the_cpus_that_ranks_leave(monkeypatch):
    monkeypatch.setattr(background_data.os, "cpu_count", lambda: 8)
    assert workers_beside(2) == ["--workers", "6"]
    assert workers_beside(8) == workers_beside(9) == ["--workers", "1"]


# ---- what people see


def progress(done: int, *, news: str = "") -> PrepareProgress:
    source = SourceProgress("text", done, 9, 1, 2, 1000 * done, done // 2)
    return PrepareProgress("tokenising", (source,), 1234.5, 60.0, news)


def test_both_progresses_are_shown_at_once(tmp_path):
    Journal(tmp_path).append(State.RUNNING, generation=1, reason="")
    log = ProgressLog(tmp_path)
    for done in (3, 4, 5):
        log.write(progress(done, news="c[1].txt is left out" if done == 5 else ""))
    train = {"kind": "train", "time": time.time() + 1, "step": 7, "loss": 2.5, "tokens_per_s": 99.0}
    wait = {
        "kind": "data_wait",
        "time": time.time() + 2,
        "step": 7,
        "seconds": 20.0,
        "reason": "segment 3",
    }
    (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(train)}\n{json.dumps(wait)}\n")
    view = View(tmp_path)
    events = [event.text for event in view.refresh()]
    assert "the ranks have waited 20 s for data: segment 3" in events
    assert "preparing data: c[1].txt is left out" in events
    console = Console(file=io.StringIO(), width=120)
    console.print(render(view, width=120))
    for told in ("tokenising 5/9, 5,000 tokens, 2 segments sealed, 1,234 tokens/s", "step 7", "99"):
        assert told in console.file.getvalue()  # type: ignore[attr-defined]
