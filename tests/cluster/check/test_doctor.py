"""Tests `moebius doctor`: first with fake nodes, then on this machine and a simulated cluster."""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moebius.cli.main import main
from moebius.cluster.check.doctor import examine
from moebius.cluster.check.exchange import Exchange
from moebius.cluster.check.findings import (
    Finding,
    judge_folder,
    judge_gpus,
    judge_memory,
    judge_versions,
)
from moebius.cluster.check.probe import (
    Gpu,
    NodeFacts,
    NodeFault,
    Probe,
    Trial,
    gpus_here,
)
from moebius.cluster.nodes import node_check
from moebius.cluster.nodes.node_check import NodeCheck

GIB = 1 << 30


def facts_of(number: int, **values: Any) -> NodeFacts:
    facts = NodeFacts(
        address=f"10.0.0.{number}",
        versions={"moebius": "1.0", "torch": "2.13.0", "nccl": "2.27"},
        memory_free_bytes=900 * GIB,
        memory_total_bytes=1000 * GIB,
        shared_memory_bytes=400 * GIB,
        driver="580.1",
        gpus=(Gpu("H100", 80 * GIB, 80 * GIB),) * 8,
    )
    return replace(facts, **values)


class FakeNode:
    """A node with only the given faults."""

    def __init__(self, number: int, **faults: Any) -> None:
        self.number, self.faults = number, faults
        self.name = f"10.0.0.{number}"

    def facts(self) -> NodeFacts:
        if "dies" in self.faults:
            raise NodeFault("no answer within 30 s")
        return facts_of(self.number, **self.faults.get("facts", {}))

    def attempt(self, others: Sequence[tuple[str, int]], wanted: NodeCheck) -> Trial:
        mount = self.faults.get("mount", "")
        trial = Probe().attempt([], replace(wanted, token_file=f"{mount}{wanted.token_file}"))
        closed = [name for name, _ in others if name in self.faults.get("closed", ())]
        return replace(trial, unreached=closed, free_bytes=100 * GIB)

    def free_port(self) -> int:
        return 1000

    def run_ranks(self, exchange: Exchange, node: int) -> tuple[bool, float]:
        if fault := self.faults.get("ranks"):
            raise NodeFault(fault)
        assert exchange.meets_at == ("10.0.0.1", 1000)
        return self.faults.get("sound", True), 1.5e-3


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(node_check, "APPEARS_WITHIN_S", 0.1)


def checked(tmp_path: Path, *faults: dict[str, Any]) -> list[Finding]:
    nodes = [FakeNode(number, **each) for number, each in enumerate(faults, 1)]
    done = examine({node.name: node for node in nodes}, tmp_path / "runs")
    assert os.listdir(tmp_path / "runs") == []
    return done


def by_check(findings: Sequence[Finding]) -> Mapping[str, Finding]:
    return {finding.check: finding for finding in findings}


def test_a_cluster_without_faults(tmp_path):
    done = by_check(checked(tmp_path, {}, {}, {}))
    assert {check: found.verdict for check, found in done.items()} == dict.fromkeys(
        [
            *("nodes", "versions", "memory", "GPUs"),
            *("ports", "shared folder", "disk space", "all-to-all"),
        ],
        "ok",
    )
    assert "all 6 connections work" in done["ports"].found
    assert done["all-to-all"].found.endswith(": 1.40 GB/s per rank, all numbers correct")


NONE: dict[str, Any] = {}
FAULTS = {
    "another version": (
        {"facts": {"versions": {"moebius": "1.0", "torch": "2.12.1", "nccl": "2.27"}}},
        *("versions", "fail", "moebius 1.0, torch 2.12.1, nccl 2.27 on 10.0.0.3"),
    ),
    "a closed port": (
        {"closed": {"10.0.0.1"}},
        *("ports", "fail", "1 of 6 connections failed (10.0.0.3 → 10.0.0.1)"),
    ),
    "a folder of its own": (
        {"mount": "/elsewhere"},
        *("shared folder", "fail", "(No such file"),
    ),
    "a number that was changed": (
        {},
        *("all-to-all", "fail", "6 ranks on 3 node(s) received wrong numbers"),
    ),
    "a rank that fails": (
        {"ranks": "OSError: no route"},
        *("all-to-all", "fail", "the ranks on 10.0.0.3 failed: OSError: no route"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_is_found_named_and_answered(tmp_path, fault):
    given, check, verdict, words = FAULTS[fault]
    done = checked(tmp_path, {"sound": bool(given)}, NONE, given)
    finding = by_check(done)[check]
    assert finding.verdict == verdict
    assert words in finding.found
    assert finding.advice
    others = [each for each in done if each.check != check]
    assert all(each.verdict == "ok" for each in others)


def test_who_gives_no_answer_is_left_out_of_the_rest(tmp_path):
    done = checked(tmp_path, {}, {"dies": True}, {})
    first = done[0]
    assert (first.check, first.verdict) == ("nodes", "fail")
    assert "1 of 3 failed or did not answer (10.0.0.2: no answer within 30 s)" in first.found
    assert "all 2 connections work" in by_check(done)["ports"].found


# Pure functions -----------------------------------------------------------------------------------


def judged(judge, *changes: dict[str, Any]) -> tuple[str, str]:
    finding = judge([facts_of(number, **each) for number, each in enumerate(changes, 1)])
    return finding.verdict, finding.found


H100 = Gpu("H100", 80 * GIB, 80 * GIB)


@pytest.mark.parametrize(
    ("judge", "changes", "verdict", "words"),
    [
        (judge_gpus, [{"gpus": ()}, {"gpus": ()}], "ok", "none; ranks"),
        (judge_gpus, [{}, {}], "ok", "8 × H100, driver 580.1 on 10.0.0.1, 10.0.0.2"),
        (judge_gpus, [{}, {"gpus": (H100,) * 7}], "warn", "; 7 × H100, driver 580.1 on 10.0.0.2"),
        (judge_gpus, [{}, {"driver": "570.9"}], "warn", "driver 570.9 on 10.0.0.2"),
        (judge_gpus, [{}, {"gpus": (replace(H100, free_bytes=GIB),) * 8}], "warn", "in use on"),
        (judge_memory, [{}, {"memory_free_bytes": 100 * GIB}], "warn", "at least 10% free"),
        (
            judge_memory,
            [{}, {"shared_memory_bytes": 64 << 20}],
            "warn",
            "less than 1 GiB on 10.0.0.2",
        ),
        (judge_memory, [{"shared_memory_bytes": None}], "ok", "at least 90% free (900.0 GiB)"),
        (judge_versions, [{}], "ok", "moebius 1.0, torch 2.13.0, nccl 2.27"),
        (judge_versions, [{"versions": {"ray": "none"}}], "warn", "ray none"),
    ],
)
def test_facts_are_judged(judge, changes, verdict, words):
    assert judged(judge, *changes)[0] == verdict
    assert words in judged(judge, *changes)[1]


@pytest.mark.parametrize(("free_gib", "verdict"), [(100, "ok"), (5, "warn"), (0.1, "fail")])
def test_the_disk_of_the_run_folder_is_judged(free_gib, verdict):
    trial = Trial(free_bytes=int(free_gib * GIB))
    assert judge_folder({"10.0.0.1": trial}, "/runs")[1].verdict == verdict


# What a node does ---------------------------------------------------------------------------------


def test_a_node_reaches_another_and_no_closed_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    ports = [Probe().facts().port, closed]
    assert Probe().unreachable([("127.0.0.1", port) for port in ports]) == [1]


def test_a_folder_that_cannot_be_written_or_is_no_run_folder_is_a_finding(tmp_path):
    (tmp_path / "file").write_text("")
    finding = by_check(examine({"10.0.0.1": FakeNode(1)}, tmp_path / "file"))
    assert "cannot be written here (File exists)" in finding["shared folder"].found


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (
            'echo "580.65, NVIDIA H100 80GB HBM3, 80995, 81559"; echo "580.65, NVIDIA GB10, [N/A], [N/A]"',
            (
                "580.65",
                [Gpu("NVIDIA H100 80GB HBM3", 80995 << 20, 81559 << 20), Gpu("NVIDIA GB10", 0, 0)],
            ),
        ),
        ('echo "it could not communicate with the driver"; exit 9', ("", [])),
        (None, ("", [])),
    ],
)
def test_the_gpus_as_the_driver_tells_them(tmp_path, monkeypatch, script, found):
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_here() == found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("words", "said"),
    [(["--gpu"], "torch sees no GPU here"),
     (["--gpu", "--address", "auto"], "omit --address")],
)  # fmt: skip
def test_a_machine_without_gpus_has_none_to_check(words, said, moebius):
    done = moebius("doctor", *words)
    assert done.code == 2
    assert said in done.text


def test_this_machine(tmp_path, moebius):
    """The whole command on one node, whose ranks run under a job's own agent."""
    done = moebius("doctor", "--run-dir", tmp_path / "runs", "--json")
    findings = [json.loads(line) for line in done.out.splitlines()]
    verdicts = {each["check"]: each["verdict"] for each in findings}
    assert verdicts.keys() >= {"versions", "disk space", "memory", "GPUs", "all-to-all"}
    assert done.code == int("fail" in verdicts.values())
    assert verdicts["all-to-all"] == "ok"
    assert os.listdir(tmp_path / "runs") == []


@pytest.mark.slow
def test_a_simulated_cluster(tmp_path, monkeypatch, capsys):
    """The whole command on two simulated nodes."""
    pytest.importorskip("ray")
    from moebius.cluster.places.standing import end_cluster, start_cluster

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    runs = tmp_path / "runs"
    standing = start_cluster(2, cpus_per_node=2)
    try:
        words = ["--address", "simulated", "--run-dir", str(runs)]
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *words, "--json"])
    finally:
        end_cluster(standing, force=True)
    found = {line["check"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    for check in ("nodes", "versions", "ports", "shared folder", "all-to-all"):
        assert found[check]["verdict"] == "ok", found[check]
    assert "2 of 2 answer" in found["nodes"]["found"]
    assert ended.value.code == int(any(each["verdict"] == "fail" for each in found.values()))
    assert os.listdir(runs) == []
