"""Directories appear atomically, despite concurrent writers and killed ones."""

import errno
import fcntl
import io
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from world import RankFailed, run_ranks

from moebius.distributed.checkpoint import atomic_directory as directory
from moebius.distributed.checkpoint import checkpoint_folder
from moebius.distributed.checkpoint.atomic_directory import atomic_directory
from moebius.distributed.checkpoint.format import CheckpointError


def write(
    out: Path, text: str = "all", then: Callable[[Path], object] = lambda folder: None
) -> None:
    with atomic_directory(out, needed_bytes=1) as folder:
        (folder / "file").write_text(text)
        then(folder)


@pytest.mark.parametrize(
    ("needed", "free", "words"),
    [
        (400_000, 0, "needs 1 MiB, .* 0 MiB"),
        (2**40 + 1, 2**40, "needs 1,048,577 MiB, .* 1,048,576"),
    ],
)
def test_a_disk_that_is_too_small_is_seen_in_the_numbers(
    needed: int, free: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))(2**41, 2**41 - free, free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with (
        pytest.raises(CheckpointError, match=words),
        atomic_directory(tmp_path / "out", needed_bytes=needed),
    ):
        pass


def attempts(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{out.name}.*"))


def killed_while_writing(out: Path) -> None:
    with atomic_directory(out, needed_bytes=1) as folder:
        (folder / "file").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def abandoned(tmp_path: Path) -> Path:
    """What a process left that was killed while it wrote `out`."""
    with pytest.raises(RankFailed):
        run_ranks(killed_while_writing, 1, tmp_path / "out")
    [left] = attempts(tmp_path / "out")
    assert sorted(os.listdir(left)) == ["file", "lock"]
    return left


def test_it_appears_with_the_usual_permissions_and_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    out = tmp_path / "deep" / "out"
    with atomic_directory(out, needed_bytes=1) as folder:
        (folder / "file").write_text("all")
        assert not out.exists()
    assert os.listdir(out.parent) == ["out"]
    assert os.listdir(out) == ["file"]
    assert out.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_of_two_attempts_at_once_the_second_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"

    def second(folder: Path) -> None:
        with pytest.raises(CheckpointError, match=r"out\.part\.tmp is being written by another"):
            write(out, "second")
        assert (folder / "file").read_text() == "first"

    write(out, "first", second)
    assert (out / "file").read_text() == "first"
    assert os.listdir(tmp_path) == ["out"]
    assert caplog.text == ""


def test_what_came_before_the_rename_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late it comes."""
    rename = Path.rename

    def late(path: Path, target: Path) -> Path:
        target.mkdir()
        (target / "file").write_text("first")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(CheckpointError, match="out exists already and is not overwritten"):
        write(tmp_path / "out", "late")
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert os.listdir(tmp_path) == ["out"]


def test_what_a_killed_attempt_left_is_removed_and_told(
    abandoned: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = abandoned.with_name("out")
    with caplog.at_level(logging.WARNING):
        write(out)
    assert os.listdir(out.parent) == ["out"]
    assert f"{abandoned} was left by a killed process; removing it" in caplog.text


def test_a_lock_that_was_replaced_is_not_taken_for_ones_own(
    abandoned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def another_was_faster(file: io.FileIO, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        flock(file, operation)
        (abandoned / "lock").rename(abandoned / "gone")
        (abandoned / "lock").touch()

    monkeypatch.setattr(fcntl, "flock", another_was_faster)
    with pytest.raises(CheckpointError, match="its lock was replaced"):
        write(abandoned.with_name("out"))
    assert (abandoned / "file").read_text() == "half"


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_where_there_are_no_locks_it_is_written_all_the_same(tmp_path: Path) -> None:
    write(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.usefixtures("no_locks")
def test_where_there_are_no_locks_what_was_left_stays_and_is_named(tmp_path: Path) -> None:
    left = tmp_path / "out.part.tmp"
    left.mkdir()
    (left / "lock").touch()
    with pytest.raises(CheckpointError, match=r"\(No locks available\): remove it if nothing"):
        write(tmp_path / "out")
    assert os.listdir(left) == ["lock"]


def test_what_is_complete_is_not_called_unwritten_when_its_name_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = directory.sync

    def fail_on_the_parent(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    monkeypatch.setattr(directory, "sync", fail_on_the_parent)
    with pytest.raises(
        CheckpointError, match=r"out is complete, but its name may not survive a power cut: Input/"
    ) as told:
        write(tmp_path / "out")
    assert "it was removed" not in str(told.value)
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "all"


def test_an_error_is_blamed_on_the_file_that_it_is_about(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere/source"):
        write(tmp_path / "out", then=lambda folder: (tmp_path / "nowhere" / "source").read_text())
    with pytest.raises(
        CheckpointError,
        match=r"out could not be written: No such file or directory \(.*part\.tmp/absent\)",
    ):
        write(tmp_path / "out", then=lambda folder: (folder / "absent").read_text())
    with pytest.raises(
        CheckpointError, match=r"out could not be written: Bad file descriptor \(.*/out\)"
    ):
        write(tmp_path / "out", then=lambda folder: os.fsync(2**20))
    assert os.listdir(tmp_path) == []


def test_a_link_to_nothing_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="exists already"):
        write(tmp_path / "out")


def test_what_belongs_to_another_directory_stays(abandoned: Path) -> None:
    for name in ("ou", "out.part", "[o]ut"):
        write(abandoned.with_name(name))
    assert (abandoned / "file").read_text() == "half"


def test_a_folder_without_a_lock_is_somebodys_own(tmp_path: Path) -> None:
    own = tmp_path / "out.part.tmp"
    own.mkdir()
    (own / "precious").touch()
    with pytest.raises(CheckpointError, match=r"out\.part\.tmp is being written .* or was left"):
        write(tmp_path / "out")
    assert os.listdir(own) == ["precious"]


def test_what_cannot_be_deleted_is_told_and_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_folder.shutil, "rmtree", lambda path, ignore_errors: None)
    checkpoint_folder.discard(tmp_path)
    assert f"{tmp_path} could not be deleted; it is no longer needed" in caplog.text
