"""Tests how a node checks the run folder and its devices before ranks start."""

from dataclasses import replace
from pathlib import Path

import pytest

from moebius.cluster.nodes import node_check
from moebius.cluster.nodes.node_check import count_gpus, token_in


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(node_check, "APPEARS_WITHIN_S", 0.0)


def test_a_node_that_sees_the_folder_has_no_faults_and_nothing_is_left_there(tmp_path):
    with token_in(tmp_path, gpus=0) as wanted:
        assert wanted.faults() == ""
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_missing_or_another_one_is_told(tmp_path):
    with token_in(tmp_path, gpus=0) as wanted:
        elsewhere = replace(wanted, token_file=str(tmp_path / "not mounted" / "token"))
        assert "not mounted does not exist there (No such file or directory)" in elsewhere.faults()
        (tmp_path / "own disk").mkdir()
        other = replace(wanted, token_file=str(tmp_path / "own disk" / "token"))
        assert "own disk is a different folder there" in other.faults()
        Path(wanted.token_file).write_text("of somebody else")
        assert "a file of the same name has other contents" in wanted.faults()


def test_missing_devices_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(node_check, "count_gpus", lambda: (1, ""))
    with token_in(tmp_path, gpus=2) as wanted:
        assert "has 1 GPUs, but train.device=cuda needs 2" in wanted.faults()
        assert replace(wanted, gpus=1).faults() == ""


def test_a_machine_without_a_driver_says_so(monkeypatch):
    monkeypatch.setattr(
        node_check, "_COUNT_GPUS", node_check._COUNT_GPUS.replace("libcuda.so.1", "libnone.so")
    )
    count, why = count_gpus()
    assert (count, "there is no CUDA driver" in why) == (0, True)
