"""What `moebius doctor` finds is judged by figures, and the whole command runs on this machine."""

import json
from pathlib import Path

import pytest
import torch

from moebius.cli.main import main
from moebius.cluster.check.findings import (
    Finding,
    exit_code,
    judge_disk,
    judge_fsync,
    judge_gpus,
    judge_links,
    judge_shared_memory,
    judge_versions,
)
from moebius.planning.measured import read_table

GB = 10**9


def gpu(free: float = 80 * GB, total: float = 80 * GB) -> dict[str, object]:
    return {"name": "H100", "free_bytes": free, "total_bytes": total}


@pytest.mark.parametrize(
    ("finding", "verdict", "words"),
    [
        (judge_disk(100 << 30, "/r"), "ok", "100.0 GiB free at /r"),
        (judge_disk(5 << 30, "/r"), "warn", "5.0 GiB"),
        (judge_disk(1 << 20, "/r"), "fail", "0.0 GiB"),
        (judge_fsync(0.002, "/r"), "ok", "2.0 ms"),
        (judge_fsync(0.2, "/r"), "warn", "200.0 ms"),
        (judge_fsync(2.0, "/r"), "fail", "2000.0 ms"),
        (judge_shared_memory(None), "ok", "no /dev/shm"),
        (judge_shared_memory(8 << 30), "ok", "8.0 GiB"),
        (judge_shared_memory(64 << 20), "warn", "0.1 GiB"),
        (judge_gpus([], ""), "warn", "none"),
        (judge_gpus([gpu(), gpu()], ""), "ok", "2 × H100; at least 100% of the memory free"),
        (judge_gpus([gpu(), gpu(free=8 * GB)], ""), "warn", "at least 10%"),
        (judge_gpus([gpu(), gpu(40 * GB, 40 * GB)], ""), "warn", "2 × H100"),
        (judge_gpus([gpu()], "GPU 1 gives wrong numbers"), "fail", "GPU 1 gives wrong numbers"),
        (judge_versions([], {"torch": "2"}), "ok", "torch 2"),
        (judge_versions(["ray"], {"torch": "2"}), "warn", "torch 2"),
        (judge_links(2e-4, 1e-9, world=2, sound=True), "ok", "α 200 µs, 1/β 1.00 GB/s"),
        (judge_links(2e-4, 0.0, world=2, sound=True), "ok", "inf GB/s"),
        (judge_links(2e-2, 1e-9, world=2, sound=True), "warn", "α 20,000 µs"),
        (judge_links(2e-4, 1e-9, world=2, sound=False), "fail", "wrong numbers"),
    ],
)
def test_figures_are_judged(finding: Finding, verdict: str, words: str) -> None:
    assert finding.verdict == verdict
    assert words in finding.found
    assert (finding.verdict == "fail") == bool(exit_code([finding]))


def test_a_number_of_processes_that_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--processes", "1"])
    assert ended.value.code == 2
    assert "--processes 1: 2 to 16" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_machine_without_gpus_has_none_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--gpu"], "torch sees no GPU here"),
        (["--gpu", "--address", "auto"], "does not go with --address"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *words])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links = tmp_path / "links.json"
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--run-dir", str(tmp_path / "runs"), "--links", str(links), "--json"])
    findings = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    verdicts = {each["check"]: each["verdict"] for each in findings}
    assert set(verdicts) == {
        *("versions", "disk space", "fsync", "shared memory", "ports", "GPUs", "all-to-all")
    }
    assert ended.value.code == int("fail" in verdicts.values())
    assert verdicts["all-to-all"] != "fail"
    assert read_table(links).worlds("all_to_all") == [2]
    measured = json.loads(links.read_text())
    assert measured["alpha_s"] >= 0
    assert measured["beta_s_per_byte"] >= 0
