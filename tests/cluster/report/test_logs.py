"""Tests the logs of a run's ranks as one stream over all generations."""

import os
from pathlib import Path

import pytest

from moebius.cluster.job import Journal, State
from moebius.cluster.report import logs
from moebius.cluster.report.logs import follow_logs, skipped_logs


def write_log(run_dir: Path, generation: int, node: int, name: str, text: str) -> Path:
    folder = run_dir / "logs" / f"g{generation:03d}" / f"node{node}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.log").write_text(text)
    return folder / f"{name}.log"


def write_logs(run_dir: Path) -> None:
    write_log(run_dir, 1, 0, "rank0", "a0\na1\n")
    write_log(run_dir, 1, 1, "rank1", "b0\n")
    write_log(run_dir, 2, 0, "rank0", "c0\nunfinished")
    write_log(run_dir, 1, 0, "agent", "hello\n")


def lines(run_dir: Path, **asked) -> list[str]:
    return [str(line) for line in follow_logs(run_dir, **asked)]


def test_logs_of_all_ranks_generation_by_generation(tmp_path):
    write_logs(tmp_path)
    assert lines(tmp_path) == [
        "[g1 node0 agent] hello",
        "[g1 rank0] a0",
        "[g1 rank0] a1",
        "[g1 rank1] b0",
        "[g2 rank0] c0",
        "[g2 rank0] unfinished",
    ]


def test_logs_of_one_rank_and_of_one_generation(tmp_path):
    write_logs(tmp_path)
    assert lines(tmp_path, rank=1) == ["[g1 rank1] b0"]
    assert lines(tmp_path, generation=2) == ["[g2 rank0] c0", "[g2 rank0] unfinished"]
    with pytest.raises(ValueError, match="no logs of rank 7"):
        lines(tmp_path, rank=7)
    with pytest.raises(ValueError, match="no logs of rank 1 in generation 2"):
        lines(tmp_path, rank=1, generation=2)


@pytest.mark.fault("F29")
def test_logs_are_followed_across_generations_until_the_job_ends(tmp_path):
    journal = Journal(tmp_path)
    journal.append(State.RUNNING, generation=1, reason="")
    log = write_log(tmp_path, 1, 0, "rank0", "first\nsec")
    followed = follow_logs(tmp_path, follow=True, poll_s=0.01)
    assert str(next(followed)) == "[g1 rank0] first"
    with open(log, "a") as file:
        file.write("ond\n")
    assert str(next(followed)) == "[g1 rank0] second"
    write_log(tmp_path, 2, 0, "rank0", "third\n")
    journal.append(State.SUCCEEDED, generation=2, reason="")
    assert [str(line) for line in followed] == ["[g2 rank0] third"]


def test_following_the_last_lines_goes_on_with_all_that_is_new(tmp_path):
    """`--tail` skips old lines; a later generation is shown whole."""
    journal = Journal(tmp_path)
    journal.append(State.RUNNING, generation=1, reason="")
    write_log(tmp_path, 1, 0, "rank0", "one\ntwo\nthree\n")
    followed = follow_logs(tmp_path, follow=True, tail=1, poll_s=0.01)
    assert str(next(followed)) == "[g1 rank0] three"
    write_log(tmp_path, 2, 0, "rank0", "four\nfive\n")
    journal.append(State.SUCCEEDED, generation=2, reason="")
    assert [line.text for line in followed] == ["four", "five"]


@pytest.mark.fault("F29")
def test_the_tail_of_a_rank_reaches_back_over_its_restarts(tmp_path):
    """Compared with the last N of all lines of the rank."""
    for generation, count in ((1, 7), (2, 0), (3, 4), (4, 1)):
        for rank in (0, 1):
            text = "".join(f"{generation}.{number}\n" for number in range(count + rank))
            write_log(tmp_path, generation, rank, f"rank{rank}", text)
    whole = {rank: [line.text for line in follow_logs(tmp_path, rank=rank)] for rank in (0, 1)}
    for tail in range(18):
        for rank in (0, 1):
            expected = whole[rank][-tail:] if tail else []
            assert [line.text for line in follow_logs(tmp_path, rank=rank, tail=tail)] == expected
        told = list(follow_logs(tmp_path, tail=tail))
        assert len(told) == sum(min(tail, len(texts)) for texts in whole.values())


@pytest.mark.fault("F29")
@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_the_tail_of_a_log_longer_than_a_block(tmp_path, end, monkeypatch):
    monkeypatch.setattr("moebius.cluster.report.logs._BLOCK", 16)
    text = "\n".join(f"line {number} {'x' * (number % 23)}" for number in range(60)) + end
    write_log(tmp_path, 1, 0, "rank0", text)
    expected = text.removesuffix("\n").split("\n")
    for tail in (1, 2, 5, 59, 60, 61, 62, 100):
        assert [line.text for line in follow_logs(tmp_path, tail=tail)] == expected[-tail:]


def test_a_truncated_log_is_followed_from_its_new_start(tmp_path):
    journal = Journal(tmp_path)
    journal.append(State.RUNNING, generation=1, reason="")
    log = write_log(tmp_path, 1, 0, "rank0", "a line\n")
    followed = follow_logs(tmp_path, follow=True, poll_s=0.01)
    assert next(followed).text == "a line"
    log.write_text("b\n")
    assert next(followed).text == "b"
    journal.append(State.SUCCEEDED, generation=1, reason="")
    assert list(followed) == []


def test_secrets_in_logs_are_not_shown(tmp_path, monkeypatch):
    """Secrets of this process's environment, and text that looks like one, since C++ prints too."""
    monkeypatch.setenv("MY_TOKEN", "opensesame")
    write_log(tmp_path, 1, 0, "rank0", "opensesame\ns3://me:hunter2@bucket\nplain\n")
    texts = [line.text for line in follow_logs(tmp_path)]
    assert texts == ["***", "s3://***@bucket", "plain"]


def test_what_a_log_says_cannot_move_the_terminal_s_cursor(tmp_path):
    write_log(tmp_path, 1, 0, "rank0", "a\x1b]0;title\x07b\tc\r\nd\u202ee\n")
    assert lines(tmp_path) == [
        "[g1 rank0] a\\x1b]0;title\\x07b\tc",
        "[g1 rank0] d\\u202ee",
    ]


@pytest.mark.parametrize("how", ["file", "folder", "pipe", "endless", "circle"])
def test_only_regular_files_of_the_run_folder_are_logs_and_others_are_named(tmp_path, how, moebius):
    run_dir, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    (other / "rank1.log").write_text("secret\n")
    write_log(run_dir, 1, 0, "rank0", "mine\n")
    log = run_dir / "logs/g001/node0/rank1.log"
    if how == "folder":
        (run_dir / "logs/g001/node1").symlink_to(other)
    elif how == "pipe":
        os.mkfifo(log)
    else:
        log.symlink_to({"file": other / "rank1.log", "endless": "/dev/zero", "circle": log}[how])
    assert lines(run_dir) == ["[g1 rank0] mine"]
    assert lines(run_dir, tail=5) == ["[g1 rank0] mine"]
    name = f"logs/g001/node{1 if how == 'folder' else 0}/rank1.log"
    assert skipped_logs(run_dir).endswith(
        f" log(s) that are not regular files of the run folder: {name}"
    )
    assert moebius("logs", str(run_dir)).err == f"{skipped_logs(run_dir)}\n"


def test_of_many_skipped_logs_ten_are_named(tmp_path):
    write_log(tmp_path, 1, 0, "rank0", "mine\n")
    assert skipped_logs(tmp_path) == ""
    for rank in range(1, 15):
        (tmp_path / f"logs/g001/node0/rank{rank}.log").symlink_to("/dev/zero")
    told = skipped_logs(tmp_path)
    assert told.count("rank") == 10
    assert told.startswith("skipped 14 log(s) ")
    assert told.endswith(" and 4 more")


def test_a_line_without_an_end_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "MAX_LINE", 10)
    write_log(tmp_path, 1, 0, "rank0", "x" * 25 + "\nend\n")
    assert [len(line) - len("[g1 rank0] ") for line in lines(tmp_path)] == [10, 10, 5, 3]
