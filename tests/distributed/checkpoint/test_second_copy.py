"""Copies of checkpoints in a second place: never another run's, and used if the run's own are missing
or damaged.
"""

import itertools
import shutil
import threading
from pathlib import Path

import fsspec
import pytest
import torch
from meshes import meshed, saver_in
from world import run_ranks

from moebius.distributed.checkpoint.checkpoint_folder import CheckpointConfig
from moebius.distributed.checkpoint.format import CheckpointError, list_checkpoints, open_verified
from moebius.distributed.checkpoint.second_copy import MARK, SecondCopy

NAMES = itertools.count()
KEEPS_TWO = CheckpointConfig(keep_last=2)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


@pytest.fixture
def place() -> str:
    """A place in memory, of this test alone."""
    return f"memory://place{next(NAMES)}"


def checkpoint_of(run_dir: Path, step: int) -> Path:
    """What looks like one to who only copies files."""
    path = run_dir / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_bytes(bytes(range(256)) * step)
    (path / "manifest.json").write_text(f"manifest of {step}")
    return path


def copied(second: SecondCopy, *steps: int) -> None:
    for step in steps:
        second.copy_later(checkpoint_of(second._run_dir, step))
        second.wait(10)


def test_the_last_n_are_there_and_come_back(run_dir: Path, place: str) -> None:
    second = SecondCopy(place, run_dir, KEEPS_TWO)
    second.claim()
    assert second.steps() == []
    copied(second, 10, 20, 30)
    assert second.steps() == [30, 20]
    assert [(each.step, each.error) for each in second.poll()] == [
        (10, None),
        (20, None),
        (30, None),
    ]
    second.fetch("step_00000020", run_dir / "back")
    own = run_dir / "checkpoints" / "step_00000020"
    assert {file.name: file.read_bytes() for file in (run_dir / "back").iterdir()} == {
        file.name: file.read_bytes() for file in own.iterdir()
    }


def test_a_copy_without_its_last_file_is_none(run_dir: Path, place: str) -> None:
    second = SecondCopy(place, run_dir, KEEPS_TWO)
    copied(second, 10, 20)
    fsspec.filesystem("memory").rm_file(f"{second.url}/step_00000020/manifest.json")
    assert second.steps() == [10]


def test_a_failing_place_is_told_and_ends_nothing(
    run_dir: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = SecondCopy(place, run_dir, KEEPS_TWO)

    def broken(*_: object, **__: object) -> None:
        raise ConnectionError("the bucket is gone")

    with monkeypatch.context() as patched:
        patched.setattr(type(fsspec.filesystem("memory")), "put_file", broken)
        copied(second, 10)
    (record,) = second.poll()
    assert record.error is not None
    assert "step_00000010 was not copied" in record.error
    assert "ConnectionError: the bucket is gone" in record.error
    copied(second, 20)
    assert second.steps() == [20]


def test_of_those_that_wait_only_the_newest_is_copied(
    run_dir: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, may_go_on, copy = (
        SecondCopy(place, run_dir, CheckpointConfig(keep_last=9)),
        threading.Event(),
        None,
    )
    copy = SecondCopy._copy

    def slow(self: SecondCopy, checkpoint: Path) -> int:
        may_go_on.wait(10)
        return copy(self, checkpoint)

    monkeypatch.setattr(SecondCopy, "_copy", slow)
    paths = [checkpoint_of(run_dir, step) for step in (10, 20, 30)]
    second.copy_later(paths[0])
    while second.reading is None:
        threading.Event().wait(0.001)
    for path in paths[1:]:
        second.copy_later(path)
    assert second.reading == paths[0]
    may_go_on.set()
    second.wait(10)
    assert second.steps() == [30, 10]


def test_another_runs_copies_are_not_taken(tmp_path: Path, run_dir: Path, place: str) -> None:
    SecondCopy(place, run_dir, KEEPS_TWO).claim()
    SecondCopy(place, run_dir, KEEPS_TWO).claim()  # the next generation of the same run
    other = tmp_path / "elsewhere" / "mine"
    other.mkdir(parents=True)
    second = SecondCopy(place, other, KEEPS_TWO)
    with pytest.raises(CheckpointError, match="holds the checkpoints of another run, not of"):
        second.claim()
    assert not (other / MARK).exists()
    (other / MARK).write_bytes(fsspec.filesystem("memory").cat_file(f"{second.url}/run.json"))
    second.claim()  # as the message says


def test_a_place_that_cannot_be_reached_is_told_at_the_first_start_and_later_borne(
    run_dir: Path, place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise TimeoutError

    second = SecondCopy(place, run_dir, KEEPS_TWO)
    with monkeypatch.context() as patched:
        patched.setattr(type(fsspec.filesystem("memory")), "exists", unreachable)
        with pytest.raises(
            CheckpointError, match=r"cannot be used \(TimeoutError\): check the add"
        ):
            second.claim()
    second.claim()
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "exists", unreachable)
    second.claim()
    assert "continuing without it" in caplog.text
    with pytest.raises(CheckpointError, match="cannot be read"):
        second.steps()


# A run with ranks ---------------------------------------------------------------------------------


def state_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(16, 8, generator=generator) for name in ("a", "b")}


def save_and_go_on(run_dir: Path, place: Path, steps: list[int]) -> object:
    """Saves, and says what a run would go on from, the damaged ones, and who fetched."""
    with meshed() as (process, mesh):
        second = SecondCopy(f"file://{place}", run_dir, KEEPS_TWO)
        saver = saver_in(run_dir / "checkpoints", process, mesh, second=second)
        for step in steps:
            saver.save(step, state_of(step), {}, {})
            saver.wait()
            saver.wait_for_copies(10)
        try:
            found = saver.newest_whole()
        except CheckpointError as error:
            return str(error)
        if found is None:
            return None
        renamed = saver.adopt(found)
        return found.meta.step, found.fetched_for is not None, [each.path.name for each in renamed]


@pytest.mark.slow
def test_a_run_goes_on_from_the_copy_of_what_is_gone_or_damaged(
    run_dir: Path, tmp_path: Path
) -> None:
    place, folder = tmp_path / "place", run_dir / "checkpoints"
    assert run_ranks(save_and_go_on, 2, run_dir, place, []) == [None, None]
    assert run_ranks(save_and_go_on, 2, run_dir, place, [10, 20, 30]) == [(30, False, [])] * 2
    (folder / "step_00000030" / "__1_0.distcp").unlink()
    first, second = run_ranks(save_and_go_on, 2, run_dir, place, [])
    assert first[:2] == second[:2] == (30, True)  # the copy of the same step, not the one before
    assert first[2][0].startswith("step_00000030.damaged-")
    open_verified(folder / "step_00000030")
    shutil.rmtree(folder)
    assert run_ranks(save_and_go_on, 2, run_dir, place, []) == [(30, True, [])] * 2
    assert [each.step for each in list_checkpoints(folder)] == [30]
    assert not list(folder.glob("*.tmp"))


@pytest.mark.slow
def test_damaged_here_and_there_means_the_one_before(run_dir: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    run_ranks(save_and_go_on, 1, run_dir, place, [10, 20])
    for root in (run_dir / "checkpoints", place / "mine"):
        (root / "step_00000020" / "__0_0.distcp").write_bytes(b"nonsense")
    step, fetched, _ = run_ranks(save_and_go_on, 1, run_dir, place, [])[0]
    assert (step, fetched) == (10, False)
    shutil.rmtree(run_dir / "checkpoints")
    shutil.rmtree(place / "mine" / "step_00000010")
    told = run_ranks(save_and_go_on, 1, run_dir, place, [])[0]
    assert f"the copy in file://{place}/mine: " in told
    assert "no intact checkpoint left" in told
