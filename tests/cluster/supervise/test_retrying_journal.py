"""Tests a supervisor's journal on a disk that is full for a while: /dev/full replaces its file."""

import logging
from pathlib import Path

import pytest

from moebius.cluster.job import Journal, State
from moebius.cluster.stop import request_stop
from moebius.cluster.supervise.retrying_journal import RetryingJournal

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


class Disk:
    """A journal's file that can be replaced by a full disk, and a clock."""

    def __init__(self, run_dir: Path) -> None:
        self.file, self.aside = run_dir / "journal.jsonl", run_dir / "aside"
        self.now_s = 0.0
        self.journal = RetryingJournal(run_dir, clock=lambda: self.now_s)

    def fill(self) -> None:
        self.file.rename(self.aside)
        self.file.symlink_to(FULL)

    def free(self) -> None:
        self.file.unlink()
        self.aside.rename(self.file)


def test_what_is_decided_on_a_full_disk_is_written_when_there_is_space(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path)
    disk.journal.append(State.RUNNING, generation=1, reason="first")
    disk.fill()
    with caplog.at_level(logging.WARNING):
        disk.journal.append(State.RECOVERING, generation=1, reason="second")
        disk.now_s = 30.0
        disk.journal.append(State.STARTING, generation=2, reason="third")
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text
    assert not disk.journal.catch_up()
    disk.now_s = 45.0
    disk.free()
    assert disk.journal.catch_up()
    disk.journal.append(State.RUNNING, generation=2, reason="fourth")
    entries = Journal(tmp_path).entries()
    why = {"late_because": "No space left on device"}
    assert [(entry.reason, entry.details) for entry in entries] == [
        ("first", {}),
        ("second", {"late_s": 45.0} | why),
        ("third", {"late_s": 15.0} | why),
        ("fourth", {}),
    ]
    assert [entry.time for entry in entries] == sorted(entry.time for entry in entries)


@pytest.mark.parametrize("torn_at", [1, 40, -1, None])
def test_a_line_that_was_written_in_part_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn_at: int | None
) -> None:
    """`-1`: all but the end of the line; None: the whole line, not confirmed by the disk."""
    journal = RetryingJournal(tmp_path)
    journal.append(State.RUNNING, generation=1, reason="before")
    write = Journal.write

    def write_part(self: Journal, entry: dict[str, object]) -> None:
        write(self, entry)
        whole = self.path.read_bytes()
        begin = whole[:-1].rfind(b"\n") + 1
        self.path.write_bytes(whole[:begin] + whole[begin:][:torn_at])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", write_part)
        journal.append(State.RECOVERING, generation=1, reason="torn")
    assert journal.catch_up()
    journal.append(State.STARTING, generation=2, reason="after")
    states = [entry.state for entry in Journal(tmp_path).entries()]
    assert states == [State.RUNNING, State.RECOVERING, State.STARTING]


def test_what_is_given_up_is_said_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "journal.jsonl").symlink_to(FULL)
    journal = RetryingJournal(tmp_path)
    journal.append(State.SUCCEEDED, generation=1, reason="finished at step 7")
    request_stop(tmp_path, now=True)
    journal.settle()
    assert "finished at step 7" in caplog.text
    assert journal.catch_up()
