"""Tests the evidence about hanging ranks, with files and processes like those of real ranks."""

import subprocess
import sys
import time

import pytest

from moebius.cluster.watch import evidence
from moebius.cluster.watch.evidence import gather, innermost_frame
from moebius.cluster.watch.heartbeats import GONE, STOPPED
from moebius.train.record.heartbeat import Beat, Phase, page_of, started_ticks

STACKS = """\
Thread 0x00007f7c00ff96c0 [heartbeat] (most recent call first):
  File "/x/moebius/train/heartbeat.py", line 99 in _answer

Current thread 0x00007f7c0a1fa740 (most recent call first):
  File "/x/torch/distributed/distributed_c10d.py", line 3180 in all_reduce
  File "/x/moebius/distributed/gradients.py", line 150 in clip_gradients
  File "/x/moebius/train/loop.py", line 200 in step
"""


@pytest.mark.parametrize(
    ("stacks", "frame"),
    [
        (STACKS, "gradients.py:150 in clip_gradients"),
        (STACKS.replace("/moebius/", "/theirs/"), "distributed_c10d.py:3180 in all_reduce"),
        ("", ""),
        ("Thread 0x1 (most recent call first):\n  <no Python frame>\n", ""),
    ],
)
def test_where_the_main_thread_is(stacks, frame):
    assert innermost_frame(stacks) == frame


@pytest.fixture
def ranks(monkeypatch):
    """Heartbeats of sleeping processes, which SIGUSR1 does not reach."""
    monkeypatch.setattr(evidence.os, "kill", lambda pid, number: None)
    monkeypatch.setattr(evidence, "WAIT_S", 0.3)
    sleepers = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)
    ]
    yield {
        rank: Beat(each.pid, Phase.STEP, 7, time.monotonic() - 9, 0.1, 0.0, started_ticks(each.pid))
        for rank, each in enumerate(sleepers)
    }
    for each in sleepers:
        each.communicate(b"\n")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_what_a_rank_answers_and_that_another_does_not(ranks, tmp_path, monkeypatch):
    def answer(pid: int, number: int) -> None:
        if pid == ranks[0].pid:
            assert page_of(tmp_path, 0).with_suffix(".ask").exists()
            with page_of(tmp_path, 0).with_suffix(".stacks").open("a") as file:
                file.write(STACKS)
            position = (
                '{"group": "g", "description": "world", "issued": 9, "pending": [9, "x", "4"]}'
            )
            page_of(tmp_path, 0).with_suffix(".calls").write_text(f"[{position}]")

    monkeypatch.setattr(evidence.os, "kill", answer)
    page_of(tmp_path, 0).with_suffix(".stacks").write_text("of another time\n")
    ranks[2] = Beat(ranks[1].pid, Phase.STEP, 7, 0.0, 0.1, 0.0, started_ticks=1)  # it has ended
    one, two, three = gather(tmp_path, ranks, tmp_path / "stall")
    assert one.process  # which of R, S or D: as the machine is busy
    assert one.process not in (GONE, *STOPPED)
    assert one.where == "gradients.py:150 in clip_gradients"
    assert one.positions is not None
    assert (two.where, two.positions) == ("", None)
    assert (three.process, three.positions) == (GONE, None)
    text = (tmp_path / "stall" / "rank0.txt").read_text()
    assert f"process {ranks[0].pid}: phase step of step 7 for 9." in text
    assert "group 'world': issued 9, waits in no. 9: x of 4" in text
    assert "in clip_gradients" in text
    assert "of another time" not in text
    assert "no answer" in (tmp_path / "stall" / "rank1.txt").read_text()


def test_a_full_disk_hides_no_evidence(ranks, tmp_path):
    """The files cannot be written, but what is known goes into the journal."""
    (tmp_path / "stall").write_text("in the way of the folder")
    for rank in ranks:
        page_of(tmp_path, rank).with_suffix(".calls").mkdir()  # nor can the question be asked
    found = gather(tmp_path, ranks, tmp_path / "stall" / "deeper")
    assert [each.rank for each in found] == [0, 1]
    assert all(each.positions is None for each in found)
