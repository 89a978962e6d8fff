"""A process's log: complete, in order, on a full disk, redacted."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from moebius.cluster.job import Journal, State
from moebius.cluster.report.logs import follow_logs
from moebius.train.record.process_log import ProcessLog

PREAMBLE = """
import os, resource, sys, threading
from moebius.train.record.process_log import keep_log
keep_log()
"""


def start_rank(run_dir: Path, code: str, **more: str) -> subprocess.Popen[bytes]:
    """Starts a rank in its own process with its log as standard output, as agents do."""
    folder = run_dir / "logs" / "g001" / "node0"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "rank0.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + code], env=os.environ | more, stdout=log, stderr=log
        )


def run_rank(run_dir: Path, code: str, **more: str) -> str:
    """Runs a rank to its end, and returns its log."""
    rank = start_rank(run_dir, code, **more)
    assert rank.wait(timeout=120) == 0, (run_dir / "logs/g001/node0/rank0.log").read_text()
    return "\n".join(line.text for line in follow_logs(run_dir))


FAST = """
def talk(name):
    for number in range(4000):
        print(f"{name} {number} " + "x" * (number % 50))

def talk_like_c(name):
    for number in range(4000):
        os.write(1, f"{name} {number}\\n".encode())

talkers = [threading.Thread(target=talk, args=(name,)) for name in "ab"]
talkers += [threading.Thread(target=talk_like_c, args=("c",))]
[talker.start() for talker in talkers]
[talker.join() for talker in talkers]
"""


@pytest.mark.fault("F29")
def test_a_rank_that_writes_fast_is_followed_line_by_line(tmp_path: Path) -> None:
    """It writes from threads and past Python."""
    journal = Journal(tmp_path)
    journal.append(State.RUNNING, generation=1, reason="")
    rank = start_rank(tmp_path, FAST)
    said: dict[str, list[int]] = defaultdict(list)
    for line in follow_logs(tmp_path, rank=0, follow=True, poll_s=0.01):
        name, number = line.text.split()[:2]
        said[name].append(int(number))
        if sum(map(len, said.values())) == 12_000 and rank.wait(timeout=60) == 0:
            journal.append(State.SUCCEEDED, generation=1, reason="")
    assert dict(said) == {name: list(range(4000)) for name in "abc"}


@pytest.mark.fault("F29")
def test_a_full_disk_costs_lines_and_says_how_many(tmp_path: Path) -> None:
    """A file size limit stands for a full disk: the write fails in the same place."""
    code = """
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
for number in range(200): print("x" * 99)
print("an error", file=sys.stderr)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print("space again")
"""
    text = run_rank(tmp_path, code)
    whole = [line for line in text.splitlines() if line == "x" * 99]
    torn = next(line for line in text.splitlines() if line.startswith("x") and len(line) < 99)
    found = re.search(r"\[([\d,]+) bytes of this log are missing: File too large\]", text)
    assert found is not None
    lost = int(found[1].replace(",", ""))
    assert lost + 100 * len(whole) + len(torn) == 200 * 100 + len("an error\n")
    assert text.endswith("space again")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_no_write_to_a_full_device_raises(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    log = ProcessLog()
    log.write(full, b"one\n")
    log.write(full, b"two\n")
    log.tell_of_loss(full)
    with open(tmp_path / "space", "wb") as space:
        os.dup2(space.fileno(), full)
    log.tell_of_loss(full)
    log.write(full, b"three\n")
    os.close(full)
    missing = "[8 bytes of this log are missing: No space left on device]"
    assert (tmp_path / "space").read_text() == f"\n{missing}\nthree\n"


def test_secrets_are_blotted_out_of_prints_and_tracebacks(tmp_path: Path) -> None:
    code = """
print("token", os.environ["MY_TOKEN"], "end")
import logging
logging.warning("with %s", os.environ["MY_TOKEN"])
def fail():
    raise ValueError("refused: " + os.environ["MY_TOKEN"])
thread = threading.Thread(target=fail)
thread.start(); thread.join()
print("s3://me:hunter2@bucket")
"""
    text = run_rank(tmp_path, code, MY_TOKEN="opensesame")
    assert "token *** end" in text
    assert "ValueError: refused: ***" in text
    written = (tmp_path / "logs/g001/node0/rank0.log").read_text()
    assert "opensesame" not in written
    assert "hunter2" not in written


def test_a_fork_and_its_parent_print_each_line_once(tmp_path: Path) -> None:
    code = """
pid = os.fork()
for number in range(20 if pid == 0 else 10):
    print(f"{'child' if pid == 0 else 'parent'} {number}")
if pid:
    os.waitpid(pid, 0)
    print("x" * 300)
    print("end")
"""
    text = run_rank(tmp_path, code)
    for name, count in (("child", 20), ("parent", 10)):
        said = [int(line.split()[1]) for line in text.splitlines() if line.startswith(name)]
        assert sorted(said) == list(range(count))
