"""Nonsense in files and on the command line is refused in clear words, or read rightly."""

import collections
import json

import pytest
from fuzz_inputs import fuzz

from moebius.cluster.report.line_checks import is_believed


def _check(seed: int, count: int) -> None:
    wrong, outcomes = fuzz(seed, count)
    assert not wrong, "\n".join(f"case {each.case}, {each.surface}:\n{each.what}" for each in wrong)
    assert sum(outcomes.values()) == count
    kinds = collections.Counter[str]()
    for outcome, number in outcomes.items():
        kinds[outcome.partition(":")[0]] += number
    assert len(kinds) == 6
    assert min(kinds.values()) >= count // 6
    for outcome in ("refused", "accepted"):  # nonsense is nonsense, and not all of it is
        for surface in ("toml", "override", "config"):
            assert outcomes[f"{surface}: {outcome}"] > 0
    assert outcomes["command: exit 0"] > 0
    assert outcomes["checkpoint: refused"] > 0


def test_three_hundred_cases() -> None:
    _check(0, 300)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_cases(part: int) -> None:
    _check(10_000 + 2_500 * part, 2_500)


@pytest.mark.parametrize(
    "line",
    [
        {"state": "RUNNING", "time": 1.0, "generation": 1, "reason": "", "details": {"step": "x"}},
        {"state": ["RUNNING"], "time": 1.0, "generation": 1, "reason": "", "details": {}},
        {"state": "RUNNING", "time": 1e300, "generation": 1, "reason": "", "details": {}},
        {"state": "RUNNING", "time": 1.0, "generation": True, "reason": "", "details": {}},
        {"kind": "train", "step": 1, "loss": None},
        {"kind": "train", "step": 1, "loss": 1.0, "expert_load": [[1.0]], "max_violation": [0.0]},
        {"kind": "eval", "step": "3", "loss": 1.0},
        {"kind": "something later", "time": "noon"},
        {"kind": 7},
    ],
)
def test_lines_that_are_not_believed(line: dict[str, object]) -> None:
    assert not is_believed(line)


def test_lines_that_are_believed() -> None:
    cause = {"summary": "killed", "rank": 1, "exit_code": -9, "unheard of": [1]}
    for line in (
        {
            "state": "RECOVERING",
            "time": 1,
            "generation": 2,
            "reason": "",
            "details": {"root_cause": cause, "step": None},
        },
        {"kind": "train", "step": 1, "loss": "nan", "tokens_per_s": 10},
        {"kind": "of a later version", "step": [1]},
        {"no": "kind"},
    ):
        assert is_believed(json.loads(json.dumps(line)))
