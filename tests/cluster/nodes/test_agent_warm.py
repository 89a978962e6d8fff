"""Tests agents and ranks that are forked from a template: they act like programs, and leave nothing behind.

The quick tests share a template for the user's command; ranks of the training loop are slow.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jobs import (
    agent_pids,
    assert_nothing_left,
    curve,
    fake_launch,
    rank_pids,
    template_pids,
    wait_for,
)
from rich.console import Console
from small_corpus import sections_of_words, shards_of_words
from small_model import TINY
from torch.distributed.elastic.agent.server.api import WorkerSpec

from moebius.cluster.job import Launch, State
from moebius.cluster.local import train_here
from moebius.cluster.nodes import processes, ranks, template_process
from moebius.cluster.nodes.assignment import AgentReport, Assignment
from moebius.cluster.nodes.node import Node
from moebius.cluster.nodes.rendezvous import Meeting, NodeRendezvous
from moebius.distributed.layout import MeshConfig
from moebius.train.config.run_config import (
    CheckpointConfig,
    Config,
    JobConfig,
    TrainConfig,
)
from moebius.train.record.run_folder import open_run

pytestmark = pytest.mark.skipif(not processes.IS_LINUX, reason="elsewhere nothing is forked")


def attempt_of(launch: Launch, node: Node, *, generation: int = 1) -> Assignment:
    return Assignment(launch, generation, 0, "127.0.0.1", node.free_port(), "127.0.0.1", "a secret")


@pytest.fixture
def node(tmp_path) -> Iterator[Node]:
    """A node with a template for the user's command."""
    warm = Node(launch=fake_launch(tmp_path, "plain=1"))
    yield warm
    warm.end()
    assert_nothing_left(tmp_path)


@pytest.mark.fault("F4")
def test_a_forked_agent_is_what_a_program_is(node, tmp_path):
    """It has its marks, parent and log; the template outlives it."""
    launch = fake_launch(tmp_path, "plain=1", "step_s=60", ranks_per_node=2)
    node.start(attempt_of(launch, node))
    wait_for(lambda: len(rank_pids(tmp_path)) == 2, what="two ranks")
    assert node.describe()["starts"] == "as forks"
    [template], [(agent, holder)] = template_pids(tmp_path), agent_pids(tmp_path).items()
    assert holder == os.getpid(), "what the template was started with is what is shown"
    assert processes.descendants(template)[0] == agent
    assert set(processes.find(str(tmp_path), generation=1)) == {
        agent,
        *rank_pids(tmp_path).values(),
    }
    assert not node.kill_rank(7)
    assert node.kill_rank(1)
    report = wait_for(node.poll, what="the report")
    assert {failure.rank: failure.exit_code for failure in report.failures} == {0: -15, 1: -9}
    assert "sending SIGTERM" in (tmp_path / "logs/g001/node0/agent.log").read_text()

    node.start(attempt_of(fake_launch(tmp_path, "plain=1", "steps=1"), node, generation=2))
    assert wait_for(node.poll, what="the report") == AgentReport(ok=True)
    assert template_pids(tmp_path) == [template]
    environment = Path(f"/proc/{template}/environ").read_text()
    assert "a secret" not in environment

    node.start(attempt_of(launch, node, generation=3))
    [agent] = wait_for(lambda: agent_pids(tmp_path), what="the agent")
    os.kill(agent, signal.SIGKILL)
    report = wait_for(node.poll, what="the report")
    assert "ended with exit code -9" in report.message
    wait_for(lambda: not rank_pids(tmp_path), what="the end of the ranks")


SLOW_IMPORT = """
import os, time
while not os.path.exists(os.environ["IMPORTED"]):
    time.sleep(0.01)
"""


def test_a_template_that_still_imports_serves_the_next_generation(tmp_path):
    """On a starved machine the import would never end if each generation began it anew."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_IMPORT)
    imported = tmp_path / "imported"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    slowly = {"PYTHONPATH": path, "IMPORTED": str(imported)}
    launch = fake_launch(tmp_path, "plain=1", "steps=1", environment=slowly)
    node = Node(launch=launch)
    try:
        for generation in (1, 2):
            node.start(attempt_of(launch, node, generation=generation))
            [template] = template_pids(tmp_path)
            began_s = time.monotonic()
            node.stop()
            assert time.monotonic() - began_s < template_process.KILL_TIMEOUT_S / 2
        node.start(attempt_of(launch, node, generation=3))
        imported.touch()
        assert wait_for(node.poll, what="the report") == AgentReport(ok=True)
        assert template_pids(tmp_path) == [template]
        assert not (tmp_path / "logs/g001/node0/agent.log").exists(), "an ended order was obeyed"
    finally:
        node.end()
    assert_nothing_left(tmp_path)


def test_a_template_that_stands_still_is_replaced(node, tmp_path, monkeypatch):
    monkeypatch.setattr(template_process, "KILL_TIMEOUT_S", 0.3)
    launch = fake_launch(tmp_path, "plain=1")
    [template] = wait_for(lambda: template_pids(tmp_path), what="the template")
    os.kill(template, signal.SIGSTOP)
    node.start(attempt_of(launch, node))
    node.stop()
    assert template_pids(tmp_path) == []


@pytest.mark.slow  # 6 s: two templates
def test_an_agent_waits_for_one_that_is_late_as_long_as_the_supervisor_lets_it(tmp_path):
    """The late one may have had no CPU, for which the supervisor excuses it and agents cannot."""
    launch = fake_launch(tmp_path, "plain=1", "steps=1", num_nodes=2, start_timeout_s=0.2)
    nodes = [Node(launch=launch) for _ in range(2)]
    port = nodes[0].free_port()
    log = tmp_path / "logs/g001/node0/agent.log"
    try:
        for rank, node in enumerate(nodes):
            node.start(Assignment(launch, 1, rank, "127.0.0.1", port, "127.0.0.1"))
            wait_for(log.exists, what="the first agent")
            time.sleep(1.0)  # five times what it was given
        assert all(wait_for(node.poll, what="the report").ok for node in nodes)
    finally:
        for node in nodes:
            node.end()
    assert_nothing_left(tmp_path)


@pytest.mark.slow  # 6 s
def test_an_agent_is_started_as_a_program_where_the_template_refuses(tmp_path):
    """A library has started threads; the agent's log gives this reason."""
    threaded = {"OPENBLAS_NUM_THREADS": "2"}
    launch = fake_launch(tmp_path, "plain=1", "steps=1", environment=threaded)
    node = Node(launch=launch)
    try:
        node.start(attempt_of(launch, node))
        assert wait_for(node.poll, what="the report") == AgentReport(ok=True)
        assert "threads" in node.describe()["starts"]
        log = (tmp_path / "logs/g001/node0/agent.log").read_text()
        assert log.startswith("this agent is no fork of a template: imports started threads")
    finally:
        node.end()
    assert_nothing_left(tmp_path)


def test_a_rank_that_sigterm_does_not_end_is_killed_after_a_short_grace(monkeypatch):
    """For example a stopped rank; torch alone would wait half a minute."""
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    rank = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    os.kill(rank.pid, signal.SIGSTOP)
    stopped = psutil.Process(rank.pid)  # before that SIGTERM would end it
    wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED, what="the stop")
    meeting = Meeting("", 0, 1, "127.0.0.1", 0, "", 1.0)
    spec = WorkerSpec("rank", 1, NodeRendezvous(meeting), entrypoint="rank")
    agent = ranks.RankAgent(spec, lambda local_rank, variables: rank)
    agent._ranks = {0: rank}
    agent._shutdown()
    assert rank.wait(60) == -signal.SIGKILL


@pytest.mark.slow  # 25 s
def test_ranks_that_are_forked_train_as_programs_do(tmp_path):
    """Bit for bit, and across a kill."""
    data = shards_of_words(tmp_path, 60)
    curves = {}
    for name, changes in (
        ("programs", {"warm_start": False}),
        ("forks", {"rehearse_failure_at_step": 6}),
    ):
        run_dir = tmp_path / name
        status = train_here(run_config(data, changes), run_dir, console=Console(quiet=True))
        assert status.state is State.SUCCEEDED
        assert status.generation == (1 if name == "programs" else 2)
        curves[name] = curve(run_dir)
        assert_nothing_left(run_dir)
    assert curves["forks"] == curves["programs"]
    assert len(curves["forks"]) == 12


def run_config(shards: Path, changes: dict[str, Any]) -> Config:
    return Config(
        model=TINY,
        **sections_of_words(shards, seq_len=16),
        checkpoint=CheckpointConfig(every=4),
        mesh=MeshConfig(dp_replicate=2),
        train=TrainConfig(
            steps=12, global_batch=8, micro_batch=4, log_every=1, eval_rows=4, device="cpu"
        ),
        job=JobConfig(ranks_per_node=2, **changes),
    )


@pytest.mark.slow  # 15 s
def test_nothing_of_forked_ranks_is_left_whoever_is_killed(tmp_path):
    """Rank, agent and template in turn, while ranks train; a rank cannot read the secret."""
    data = shards_of_words(tmp_path, 60)
    run_dir = tmp_path / "run"
    config = run_config(data, {})
    config = config.model_copy(update={"train": config.train.model_copy(update={"steps": 10**6})})
    open_run(config, run_dir)
    node = Node(launch=Launch(str(run_dir), ranks_per_node=2))
    try:
        for generation, victim in enumerate(("rank", "agent", "template"), start=1):
            (run_dir / "generation").write_text(str(generation))
            node.start(
                attempt_of(Launch(str(run_dir), ranks_per_node=2), node, generation=generation)
            )
            wait_for(lambda: len(node.heartbeats()) == 2, what="two ranks that train")
            living = rank_pids(run_dir)
            [agent] = agent_pids(run_dir)
            for pid in living.values():
                assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
                assert processes.descendants(agent)[:2] == sorted(living.values())
            pids = {"rank": living[1], "agent": agent, "template": template_pids(run_dir)[0]}
            os.kill(pids[victim], signal.SIGKILL)
            assert not wait_for(node.poll, what="the report").ok
            node.stop()
            assert not rank_pids(run_dir)
            assert not agent_pids(run_dir)
    finally:
        node.end()
    assert_nothing_left(run_dir)


STARTER = """
import os, signal, sys
from moebius.cluster.nodes.node import Node
from moebius.cluster.job import Launch
Node(launch=Launch(sys.argv[1], command=("true",)))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_template_whose_node_is_killed_before_it_could_bind_itself_ends(tmp_path):
    """The template has hardly begun when its parent is gone."""
    starter = subprocess.run([sys.executable, "-c", STARTER, str(tmp_path)], check=False)
    assert starter.returncode == -signal.SIGKILL
    assert_nothing_left(tmp_path, within_s=60)
