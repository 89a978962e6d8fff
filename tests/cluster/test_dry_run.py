"""Dry runs with real ranks: what they say, and that nothing of them is left."""

import io
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tiny_job import MOEBIUS, TINY_JOB, write_paragraphs

from moebius.cluster.job import JobStatus, State
from moebius.cluster.local import dry_run, train_here
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import place_data

TWO_RANKS = ("job.num_nodes=1", "job.ranks_per_node=2", "mesh.ep=2", "mesh.dp_replicate=1")
DRAWN_LOOPS = ("model.loops.depth.kind=poisson", "model.loops.depth.per=sequence")
BROKEN = (
    "import torch\ndef broken(*_, **__):\n    raise torch.OutOfMemoryError('no memory [left]')\n"
)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary folders, of which none is left."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.iterdir())


def config_of(folder: Path, *changes: str, length: str = "train.steps=40") -> Config:
    given = [*TINY_JOB, *TWO_RANKS, length, "checkpoint.every=10", *changes]
    return place_data(resolve("smoke", given, RECIPES), folder)


def said(config: Config, run_dir: Path) -> tuple[JobStatus, str]:
    screen = Console(file=io.StringIO(), width=10_000)
    status = dry_run(config, run_dir, console=screen)
    return status, screen.file.getvalue()  # type: ignore[attr-defined]


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def test_what_a_run_will_take_is_said_before_there_is_data(tmp_path: Path, scratch: Path) -> None:
    changes = (*DRAWN_LOOPS, "data.document_attention=true")
    config = config_of(tmp_path, *changes, length="train.epochs=2")
    status, text = said(config, tmp_path / "run")
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0), text
    assert re.search(r"^memory +at most 0\.\d+ GB on a rank$", text, re.MULTILINE)
    assert re.search(r"^step +[\d.e-]+ s, [\d,]+ tokens/s$", text, re.MULTILINE)
    assert re.search(r"^run +train\.epochs=2\.0: as many steps as", text, re.MULTILINE)
    assert "checkpoints at once" not in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scratch"]


def test_a_run_that_exists_stays_as_it_is(tmp_path: Path, scratch: Path) -> None:
    text = write_paragraphs(tmp_path, paragraphs=60)
    wide = "model.feed_forward.d_expert=1024"
    config = config_of(tmp_path, f"prepare.input=['{text}']", wide)
    run_dir = tmp_path / "run"
    train = config.train.model_copy(update={"steps": 10})
    train_here(config.model_copy(update={"train": train}), run_dir, console=Console(quiet=True))
    before = files_of(tmp_path)
    status, words = said(config, run_dir)
    assert status.exit_code == 0, words
    assert re.search(r"^run +40 steps in .+, and evaluations$", words, re.MULTILINE)
    assert "for up to 3 checkpoints at once" in words
    assert files_of(tmp_path) == before
    saved = [
        json.loads(line)["bytes"]
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
        if '"kind": "checkpoint"' in line
    ]
    told = re.search(r"^checkpoint +([\d.,]+) MB$", words, re.MULTILINE)
    assert told is not None
    # a checkpoint has the names and shapes of its tensors, too
    assert saved[0] == pytest.approx(float(told[1]) * 1e6, rel=0.05)


def test_an_error_of_a_rank_is_told_and_leaves_nothing(
    tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks.py").write_text(BROKEN)
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path, 'train.losses={"breaks:broken" = 0.1}')
    status, text = said(config, tmp_path / "run")
    assert (status.state, status.exit_code) == (State.FAILED, 1), text
    assert "no memory [left]" in text
    assert str(scratch) not in text
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_an_interrupted_dry_run_leaves_nothing(tmp_path: Path, scratch: Path) -> None:
    words = [*TINY_JOB, *TWO_RANKS, "train.global_batch=4096"]  # a step of minutes
    command = [*MOEBIUS, "train", "smoke", *words, "--dry-run", "--run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(scratch.glob("moebius-dry-run-*/logs/g001/node0/rank1.log")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    time.sleep(1)
    process.send_signal(signal.SIGTERM)  # the second ends it at once
    process.wait(60)
    assert not (tmp_path / "run").exists()
