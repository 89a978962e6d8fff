"""A small main job end to end: text → shards → 2 simulated nodes × 2 ranks, EP 2 × DP 2 → killed,
restarted → finished.
"""

import os
import subprocess
from pathlib import Path

import pytest
from jobs import curve
from tiny_job import MOEBIUS, TINY_JOB, write_paragraphs
from trained import lines
from world import run_ranks

import moebius
from moebius.cluster.job import Journal, State, read_status
from moebius.data_pipeline.make.prepare import prepare
from moebius.distributed.checkpoint.format import list_checkpoints, open_verified
from moebius.evaluation.perplexity import measure
from moebius.train.config.resolve import resolve
from moebius.train.loop import train
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import open_run, place_data

SETTINGS = (
    *TINY_JOB,
    "train.steps=24",
    "train.eval_every=12",
    "train.eval_rows=16",
    "checkpoint.every=5",
    "job.rehearse_failure_at_step=13",
)
pytestmark = pytest.mark.slow  # two minutes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("main-job")
    write_paragraphs(folder, paragraphs=80)
    return folder


def settings(folder: Path, *changes: str) -> list[str]:
    return [*SETTINGS, f"prepare.input=['{folder}/text.txt']", *changes]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """Runs the same on four ranks, without a cluster, an agent or a drill."""
    words = settings(folder, "job.rehearse_failure_at_step=none")
    config = place_data(resolve("smoke", words, RECIPES), folder)
    run_dir = folder / "undisturbed"
    open_run(config, run_dir)
    prepare(config.prepare, config.data.directory)
    assert run_ranks(train, 4, config, run_dir, timeout_s=250) == ["finished"] * 4
    return run_dir


@pytest.fixture(scope="module")
def disturbed(folder: Path) -> tuple[Path, str]:
    """Runs `moebius submit` as a user would, without a terminal."""
    run_dir = folder / "disturbed"
    words = settings(folder, f"data.directory={folder}/submitted", f"--run-dir={run_dir}")
    ended = subprocess.run(
        [*MOEBIUS, "submit", "smoke", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "120"},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return run_dir, ended.stdout


@pytest.mark.fault("F1")
def test_a_killed_rank_leaves_no_trace_in_the_curve(
    undisturbed: Path, disturbed: tuple[Path, str]
) -> None:
    run_dir, said = disturbed
    assert sorted(curve(run_dir)) == list(range(1, 25))
    assert curve(run_dir) == curve(undisturbed)  # bit for bit
    status = read_status(run_dir)
    assert (status.generation, status.restarts, status.step) == (2, 1, 24)
    assert status.root_cause is not None
    assert status.root_cause.on_purpose
    assert "killed on purpose" in said
    assert "continued from the checkpoint of step" in said


def test_the_journal_tells_the_story(disturbed: tuple[Path, str]) -> None:
    first, *states = [entry.state for entry in Journal(disturbed[0]).entries()]
    assert (first, states[-1]) == (State.SUBMITTED, State.SUCCEEDED)
    assert State.STARTING in states[states.index(State.RECOVERING) :]


def test_what_a_run_leaves_behind(disturbed: tuple[Path, str]) -> None:
    run_dir, said = disturbed
    assert [c.step for c in list_checkpoints(run_dir / "checkpoints")] == [20, 24]
    meta = open_verified(list_checkpoints(run_dir / "checkpoints")[-1].path).meta
    assert (meta.layout.dp_replicate, meta.layout.ep) == (2, 2)
    assert (run_dir / "summary.png").read_bytes().startswith(b"\x89PNG")
    for generation in ("g001", "g002"):
        logs = sorted(path.name for path in (run_dir / "logs" / generation).rglob("rank*.log"))
        assert logs == [f"rank{rank}.log" for rank in range(4)]
    assert "validation loss" in said
    assert str(run_dir) in said


def test_it_has_learned_and_can_be_measured_and_write(disturbed: tuple[Path, str]) -> None:
    run_dir, _ = disturbed
    evals = {line["step"]: line["loss"] for line in lines(run_dir, "eval")}
    assert evals[24] < evals[0] - 0.5
    measured = measure(run_dir, max_rows=16)  # one rank with all experts, not four
    assert measured.step == 24
    assert measured.result.loss == pytest.approx(evals[24], rel=1e-6)
    first, again = (moebius.load(run_dir).generate("one two", seed=1) for _ in range(2))
    assert first.startswith("one two")
    assert first == again
