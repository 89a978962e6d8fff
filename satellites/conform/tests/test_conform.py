"""The kit on real ranks: correct layers pass, and every fault gets its class."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from moebius_conform.ranks.processes import Launcher
from moebius_conform.run import check_with

LAYERS = Path(__file__).with_name("layers.py")
FAULTS = {  # of layers.py: name -> classes that must be named, and no other
    "router_not_summed": ["missing partial sum"],
    "nothing_summed": ["missing partial sum"],
    "inputs_partial": ["missing partial sum"],
    "same_inputs": ["missing partial sum"],
    "same_answers": ["missing partial sum"],
    "data_parallel_alone": ["missing partial sum"],
    "times_ranks": ["scaled"],
    "over_ranks": ["scaled"],
    "averaged": ["scaled"],
    "capacity": ["lost or doubled routes"],
    "last_row": ["lost or doubled routes"],
    "twice": ["lost or doubled routes"],
    "not_put_back": ["order of rows"],
    "other_weights": ["order of rows"],
    "next_expert": ["order of rows"],
    "detached": ["gate gradient"],
    "own_gates": ["gate gradient"],
    "same_gate": ["gate gradient"],
    # rows that nobody asked for are multiplied by 0, so that NaN comes through
    "no_such_routes": ["depends on other samples", "gate gradient"],
    "local_norm": ["norm over experts"],
    "mean": ["depends on other samples"],
    "empty_mean": ["not finite"],
    "raises": ["crash"],
    "dies": ["crash"],
}
MANY_ROWS = ["even", "uneven", "other samples elsewhere", "NaN in one token"]
FEW_ROWS = ["a rank without tokens", "one token in all"]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(120) as made:
        yield made


def test_a_right_layer_conforms_on_two_ranks(launcher: Launcher) -> None:
    report = check_with(launcher, f"{LAYERS}:right_own", ranks=[2])
    assert report.ok, report.text()
    assert len(report.errors) == 11
    assert all(isinstance(error, float) and error < 1e-5 for error in report.errors.values())
    assert any("the reference is this layer on one rank" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["right_own", "right_same", "bare", "data_parallel"])
def test_right_layers_conform(launcher: Launcher, name: str) -> None:
    report = check_with(launcher, f"{LAYERS}:{name}", ranks=[2, 4])
    assert report.ok, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["allgather", "alltoall", "dedup", "hierarchical", "symmetric"])
def test_our_dispatchers_conform_to_a_plain_loop(launcher: Launcher, name: str) -> None:
    example = LAYERS.parents[3] / "examples" / "conform_dispatchers.py"
    report = check_with(launcher, f"{example}:{name}", ranks=[1, 4])
    assert report.ok, report.text()
    assert (1, "repeated experts") in report.errors
    assert not report.notes  # the reference is a plain loop


@pytest.mark.slow
def test_the_installed_release_of_transformers_conforms() -> None:
    pytest.importorskip("transformers", minversion="5.20")
    example = LAYERS.parents[3] / "examples" / "conform_transformers.py"
    with Launcher(120, ["transformers.models.olmoe.modeling_olmoe"]) as launcher:
        report = check_with(launcher, f"{example}:grouped_mm", ranks=[2])
    assert report.ok, report.text()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_called_what_it_is(launcher: Launcher, name: str, size: int) -> None:
    report = check_with(launcher, f"{LAYERS}:{name}", ranks=[size], only=MANY_ROWS + FEW_ROWS)
    assert sorted(report.classes) == FAULTS[name], report.text()


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_nothing_is_left() -> None:
    with Launcher(20) as launcher:
        report = check_with(launcher, f"{LAYERS}:hangs", ranks=[2], only=FEW_ROWS[:1])
    (finding,) = report.findings
    assert finding.fault.name == "hang"
    assert finding.ranks == (1,)
    assert "in stop" in finding.detail
    assert not _ours()


@pytest.mark.slow
def test_the_command_says_what_is_wrong_and_by_how_much() -> None:
    ended = _run(f"{LAYERS}:times_ranks", "--ranks", "2", "--only", "even", "--json")
    assert ended.returncode == 1, ended.stderr
    said = json.loads(ended.stdout)
    assert said["classes"] == ["scaled"]
    details = {finding["quantity"]: finding["detail"] for finding in said["findings"]}
    assert details == dict.fromkeys(
        ["experts.w_up", "experts.w_down"], "is 2 (the number of ranks) times the correct value"
    )
    assert not _ours()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ("no_such_module:build", "no module 'no_such_module'"),
        (f"{LAYERS}:no_such_name", "has no 'no_such_name'"),
        (f"{LAYERS}:WIDTH", "neither a Layer nor a function"),
    ],
)
def test_what_cannot_be_tried_is_said_in_words(layer: str, words: str) -> None:
    ended = _run(layer)
    assert ended.returncode == 2
    assert words in ended.stderr


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moebius_conform", *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _ours() -> list[psutil.Process]:
    """Returns leftover processes that forked ranks of this test."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if any("moebius_conform.ranks.launch" in word for word in process.info["cmdline"] or ())
        and (process.info["environ"] or {}).get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
        == os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0]
    ]
