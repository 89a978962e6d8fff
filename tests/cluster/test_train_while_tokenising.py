"""F20: trains while tokenizing, and kills workers and the preparing process meanwhile.

Data, samples, losses and weights must equal those of preparing first.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from jobs import metrics, wait_for
from tiny_job import (
    MOEBIUS,
    SLOW_READING,
    TINY_JOB,
    write_jsonl_files,
    write_slow_filter,
)
from world import run_ranks

from moebius.cluster.job import JOURNAL, Journal, State, read_status
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.manifest import read_manifest
from moebius.train.config.resolve import resolve
from moebius.train.config.run_config import Config
from moebius.train.loop import train
from moebius.train.recipes.smoke import RECIPES
from moebius.train.record.run_folder import open_run

pytestmark = pytest.mark.slow  # two minutes

NUM_FILES = 10
DOCUMENTS = 40  # of each
STEPS = 24  # of 8 × 32 tokens: some segments
SETTINGS = (
    *TINY_JOB,
    *SLOW_READING,
    f"train.steps={STEPS}",
    "checkpoint.every=10",
    "mesh.dp_replicate=1",
    "job.ranks_per_node=1",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """Makes texts and a slow filter, importable here and in every child process."""
    folder = tmp_path_factory.mktemp("f20")
    write_slow_filter(folder)
    write_jsonl_files(folder, files=NUM_FILES, documents=DOCUMENTS, words=12)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def overrides(folder: Path, data: str) -> list[str]:
    named = [f"prepare.input=['{folder}/texts/*.jsonl']", f"data.directory={folder}/{data}"]
    return [*SETTINGS, *named]


@pytest.fixture(scope="module")
def afterwards(folder: Path) -> Path:
    """Makes the run on fully prepared data, without a cluster."""
    config: Config = resolve("smoke", overrides(folder, "prepared"), RECIPES)
    prepare(config.prepare, config.data.directory)
    assert len(read_manifest(folder / "prepared").sealed) >= 8
    open_run(config, folder / "afterwards")
    assert run_ranks(train, 2, config, folder / "afterwards", timeout_s=250) == ["finished"] * 2
    return folder / "afterwards"


def start(folder: Path, *arguments: str, slow_s: float) -> subprocess.Popen[str]:
    """Starts the command without a terminal."""
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*MOEBIUS, *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": paths, "SLOW_S": str(slow_s), "COLUMNS": "120"},
    )


def found(program: subprocess.Popen[str], words: str) -> list[psutil.Process]:
    """Returns processes below a command whose command line contains these words."""

    def has_words(process: psutil.Process) -> bool:
        try:
            return words in " ".join(process.cmdline())
        except psutil.Error:
            return False

    return [one for one in psutil.Process(program.pid).children(recursive=True) if has_words(one)]


def told(run_dir: Path) -> str:
    return "\n".join(f"{entry.state}: {entry.reason}" for entry in Journal(run_dir).entries())


def awaits(run_dir: Path, program: subprocess.Popen[str], words: str) -> None:
    def has_come() -> bool:
        assert program.poll() is None, program.communicate()[0]
        return (run_dir / JOURNAL).exists() and words in told(run_dir)

    wait_for(has_come, timeout_s=150, what=words)


def seen(run_dir: Path) -> dict[int, tuple[int, float]]:
    return {line["step"]: (line["digest"], line["loss"]) for line in metrics(run_dir, "train")}


def files(folder: Path, keep: Callable[[str], bool]) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if keep(path.name)}


def assert_same_as(run_dir: Path, afterwards: Path, data: Path) -> None:
    assert seen(run_dir) == seen(afterwards)
    assert metrics(run_dir, "eval")[-1]["loss"] == metrics(afterwards, "eval")[-1]["loss"]
    step = Path("checkpoints") / f"step_{STEPS:08d}"
    weights = files(afterwards / step, lambda name: name.endswith(".distcp"))
    assert weights
    assert files(run_dir / step, lambda name: name.endswith(".distcp")) == weights
    # the ranks may finish before the preparing process: prepare the rest now
    config = resolve("smoke", overrides(data.parent, data.name), RECIPES)
    prepare(config.prepare, config.data.directory)
    shards = files(afterwards.parent / "prepared", is_of_the_data)
    assert files(data, is_of_the_data) == shards


def is_of_the_data(name: str) -> bool:
    """Reports, and the record of the texts' files, hold times."""
    return not name.startswith(("report", "files.json"))


@pytest.mark.fault("F20")
def test_submit_trains_while_workers_and_the_preparing_process_are_killed(folder, afterwards):
    run_dir = folder / "submitted"
    changes = [*overrides(folder, "growing"), "train.start_when=1", "job.num_nodes=2"]
    program = start(folder, "submit", "smoke", *changes, "--run-dir", str(run_dir), slow_s=0.06)
    try:
        awaits(run_dir, program, "STARTING: starting 2 rank(s)")
        assert not read_manifest(folder / "growing").complete
        victims = wait_for(lambda: found(program, "ray::_call"), what="a worker")
        victims[0].kill()
        wait_for(
            lambda: [one for one in found(program, "ray::_call") if one.pid != victims[0].pid],
            what="another worker",
        )
        (preparer,) = found(program, "moebius.cluster.prepare_data")
        preparer.kill()
        awaits(
            run_dir, program, "preparation died (killed by signal 9) and is being restarted; 2 re"
        )
        output, _ = program.communicate(timeout=200)
    finally:
        program.kill()
    assert program.returncode == 0, output
    for words in (
        "preparing data: tokenising",
        "segments sealed",
        "tokens/s",
        "SUCCEEDED  finished",
    ):
        assert words in output
    assert read_status(run_dir).generation == 1, "the ranks noticed nothing"
    assert_same_as(run_dir, afterwards, folder / "growing")


@pytest.mark.nightly
def test_train_ends_with_what_is_sealed_and_goes_on_when_the_input_is_mended(folder, afterwards):
    run_dir, data = folder / "trained", folder / "mended"
    last = folder / "texts" / "0002.jsonl"
    whole = last.read_bytes()
    last.write_bytes(whole.replace(b"expert", b"exp\xffrt"))
    changes = [*overrides(folder, "mended"), "train.start_when=2000", "job.num_nodes=1"]
    command = ["train", "smoke", *changes, "job.ranks_per_node=2", "--run-dir", str(run_dir)]
    try:
        program = start(folder, *command, slow_s=0.01)
        output, _ = program.communicate(timeout=200)
    finally:
        last.write_bytes(whole)
    assert program.returncode == 1, output
    status = read_status(run_dir)
    assert status.state is State.FAILED
    assert status.reason.startswith(f"the data ended after step {status.step}: segment ")
    assert last.name in status.reason
    assert "UTF-8" in status.reason
    assert (run_dir / "checkpoints" / f"step_{status.step:08d}").exists()
    assert status.generation == 1
    shutil.rmtree(data)
    program = start(folder, *command, slow_s=0.0)
    output, _ = program.communicate(timeout=200)
    assert program.returncode == 0, output
    assert f"from the checkpoint of step {status.step}" in output
    assert_same_as(run_dir, afterwards, data)


def test_what_prepares_dies_with_the_command(folder):
    run_dir = folder / "killed"
    changes = [*overrides(folder, "left"), "train.start_when=1_000_000_000", "job.num_nodes=1"]
    command = ["train", "smoke", *changes, "job.ranks_per_node=2", "--run-dir", str(run_dir)]
    program = start(folder, *command, slow_s=5.0)
    try:
        awaits(run_dir, program, "PREPARING")
        preparers = wait_for(
            lambda: found(program, "moebius.cluster.prepare_data"), what="the preparing process"
        )
        below = [*preparers, *preparers[0].children(recursive=True)]
    finally:
        program.kill()
        program.communicate()
    wait_for(lambda: not any(map(psutil.Process.is_running, below)), what="its end")
