"""A directory that appears: whole or not at all, whoever else is at it, and whoever was killed at
it before.
"""

import errno
import fcntl
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from world import RankFailed, run_ranks

from moebius.distributed.checkpoint import writing as checkpoint_writing
from moebius.distributed.checkpoint.files import CheckpointError
from moebius.distributed.checkpoint.writing import appearing

LONG_AGO_S = 120


def write(
    out: Path, text: str = "all", then: Callable[[Path], object] = lambda folder: None
) -> None:
    with appearing(out, needed_bytes=1) as folder:
        (folder / "file").write_text(text)
        then(folder)


def attempts(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{out.name}.*"))


def age(path: Path) -> None:
    then = path.stat().st_mtime - LONG_AGO_S
    os.utime(path, (then, then))


def killed_while_writing(out: Path) -> None:
    with appearing(out, needed_bytes=1) as folder:
        (folder / "file").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def abandoned(tmp_path: Path) -> Path:
    """What an attempt at `out` left that was killed long ago."""
    with pytest.raises(RankFailed):
        run_ranks(killed_while_writing, 1, tmp_path / "out")
    [left] = attempts(tmp_path / "out")
    age(left)
    return left


def test_it_appears_with_the_usual_permissions_and_nothing_beside_it(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    out = tmp_path / "deep" / "out"
    with appearing(out, needed_bytes=1) as folder:
        (folder / "file").write_text("all")
        assert not out.exists()
    assert os.listdir(out.parent) == ["out"]
    assert os.listdir(out) == ["file"]
    assert out.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_of_two_attempts_at_once_the_first_that_is_ready_wins(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="out exists already and is not overwritten"):
        write(out, "late", lambda folder: write(out, "first"))
    assert (out / "file").read_text() == "first"
    assert os.listdir(tmp_path) == ["out"]


def test_one_that_comes_between_the_last_look_and_the_rename_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def late(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        write(tmp_path / "out", "first")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(CheckpointError, match="out exists already and is not overwritten"):
        write(tmp_path / "out", "late")
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_to_nothing_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="exists already"):
        write(tmp_path / "out")


def test_what_a_killed_attempt_left_is_removed_and_told(
    abandoned: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = abandoned.with_name("out")
    with caplog.at_level(logging.WARNING):
        write(out)
    assert os.listdir(out.parent) == ["out"]
    assert f"{abandoned} was left by an attempt that was killed; it is removed" in caplog.text


def test_what_belongs_to_another_directory_stays(abandoned: Path) -> None:
    for name in ("ou", "out.part", "[o]ut"):
        write(abandoned.with_name(name))
    assert (abandoned / "whole" / "file").read_text() == "half"


@pytest.mark.parametrize(
    "name", ["out.part-old.tmp", "out.part-OLDCOPY.tmp", "out.part-old_copy.1.tmp"]
)
def test_a_name_that_no_attempt_has_is_somebodys_own(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is in there, and not worth a word."""
    own = tmp_path / name
    own.mkdir()
    for file in ("lock", "precious"):
        (own / file).touch()
    age(own)
    write(tmp_path / "out")
    assert sorted(os.listdir(own)) == ["lock", "precious"]
    assert caplog.text == ""


def test_a_folder_without_a_lock_gets_none_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By its name it could be an attempt's; that alone does not make it one."""
    own = tmp_path / "out.part-old_copy.tmp"
    own.mkdir()
    (own / "precious").touch()
    age(own)
    write(tmp_path / "out")
    assert os.listdir(own) == ["precious"]
    assert (
        f"{own} is being written, or was left by an attempt that was killed; its lock"
        in caplog.text
    )


def test_an_attempt_that_lives_is_not_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However long it takes."""
    out = tmp_path / "out"

    def another(folder: Path) -> None:
        age(folder.parent)
        write(out, "fast")
        assert (folder / "file").read_text() == "slow"

    with pytest.raises(CheckpointError, match="exists already"):
        write(out, "slow", another)
    assert caplog.text == ""


def test_an_attempt_that_just_began_is_not_removed(abandoned: Path) -> None:
    """It may not have got to its lock yet."""
    os.utime(abandoned)
    write(abandoned.with_name("out"))
    assert abandoned.is_dir()


@pytest.mark.parametrize("how", ["no locks", "not ours"])
def test_without_a_lock_to_ask_it_stays_and_is_told(
    how: str, abandoned: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if how == "no locks":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    else:  # also for root, who may open everything
        (abandoned / "lock").unlink()
        (abandoned / "lock").mkdir()
        age(abandoned)
    write(abandoned.with_name("out"))
    assert sorted(os.listdir(abandoned.parent)) == ["out", abandoned.name]
    assert (
        f"{abandoned} is being written, or was left by an attempt that was killed; its lock"
        in caplog.text
    )


def test_what_is_complete_is_not_called_unwritten_when_its_name_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = checkpoint_writing.sync_directory

    def fail_on_the_parent(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(path)

    monkeypatch.setattr(checkpoint_writing, "sync_directory", fail_on_the_parent)
    with pytest.raises(
        CheckpointError, match=r"out is complete, but its name may not survive a power cut: Input/"
    ) as told:
        write(tmp_path / "out")
    assert "nothing was left" not in str(told.value)
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "all"


def test_an_error_is_blamed_on_the_file_that_it_is_about(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere/source"):
        write(tmp_path / "out", then=lambda folder: (tmp_path / "nowhere" / "source").read_text())
    with pytest.raises(
        CheckpointError,
        match=r"out could not be written: No such file or directory \(.*whole/absent\)",
    ):
        write(tmp_path / "out", then=lambda folder: (folder / "absent").read_text())
    with pytest.raises(
        CheckpointError, match=r"out could not be written: Bad file descriptor \(.*/out\)"
    ):
        write(tmp_path / "out", then=lambda folder: os.fsync(2**20))
    assert os.listdir(tmp_path) == []
