"""Tests jobs of real processes on this machine, without a cluster."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_job import TINY_JOB, write_paragraphs

from moebius.cluster.job import begin_submission, python_module
from moebius.cluster.launch import launch_here
from moebius.cluster.local import train_here
from moebius.data_pipeline.make.pools import LocalPool
from moebius.train.config.run_config import Config
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import open_run, place_data

ROOT = Path(__file__).resolve().parents[2]


# Files of a working folder that no process of a job may import instead of Python's or a library's module.
SHADOWS = (
    *(
        "abc",
        "asyncio",
        "base64",
        "collections",
        "copy",
        "enum",
        "functools",
        "io",
        "json",
        "logging",
    ),
    *("math", "os", "pickle", "queue", "random", "re", "select", "signal", "socket", "string"),
    *("subprocess", "threading", "token", "tokenize", "types", "typing", "numpy", "pyarrow", "ray"),
    *("resource_tracker", "site", "sitecustomize", "tokenizers", "torch", "psutil", "pydantic"),
)
OWN_PART = "def keep(text):\n    return None\n"


@pytest.fixture
def shadows(tmp_path, monkeypatch) -> Path:
    """Changes to a folder of files that end whoever imports them; one part of the user's is there too."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py was imported')")
    (tmp_path / "mine.py").write_text(OWN_PART)
    write_paragraphs(tmp_path, paragraphs=40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


PREPARED = (
    *("prepare.input=['text.txt']", "prepare.filters=['mine:keep']", "prepare.tokenizer=bytes"),
    *("prepare.vocab_size=257", "prepare.segment_tokens=2000"),
)
ONE_RANK = (
    "train.steps=2",
    "job.num_nodes=1",
    "job.ranks_per_node=1",
    "mesh.ep=1",
    "mesh.dp_replicate=1",
)
COMMANDS = {
    "train": ("train", "smoke", *TINY_JOB, *PREPARED, *ONE_RANK, "train.start_when=1"),
    "submit": ("submit", "smoke", *TINY_JOB, *PREPARED, *ONE_RANK),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", COMMANDS)
def test_files_of_the_working_folder_shadow_no_module(shadows, command):
    python = (sys.executable, "-P", "-c", "from moebius.cli.main import main; main()")
    words = [*python, *COMMANDS[command]]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_child_is_started_with_a_safe_path():
    """A new `python -m` would bring the working folder back."""
    sources = list((ROOT / "cluster").rglob("*.py"))
    assert len(sources) > 40
    assert [path.name for path in sources if 'sys.executable, "-m"' in path.read_text()] == []
    assert python_module("moebius.train", "x")[1:] == ["-P", "-m", "moebius.train", "x"]


def test_a_worker_of_a_pool_imports_nothing_from_the_working_folder(shadows):
    with LocalPool(1) as pool:
        pool.submit(len, "four")
        assert pool.wait()[1] == 4
    assert "PYTHONSAFEPATH" not in os.environ


def test_a_command_that_ends_while_it_prepares_leaves_the_old_run(tmp_path, monkeypatch):
    config = place_data(RECIPES["smoke"](), tmp_path)
    run_dir = tmp_path / "run"
    open_run(config, run_dir)
    (run_dir / "checkpoints" / "step_00000080").mkdir(parents=True)
    (run_dir / "result.json").write_text("{}")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    def ends(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moebius.cluster.local.prepare", ends)
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 900})})
    with pytest.raises(KeyboardInterrupt):
        train_here(longer, run_dir)
    assert {path: path.read_bytes() for path in before} == before
    assert not (run_dir / "journal.jsonl").exists()
    begin_submission(launch_here(longer, run_dir))
    assert {path: path.read_bytes() for path in before} == before, "until the first step"
    assert Config.load(run_dir / "config.next.json") == longer
