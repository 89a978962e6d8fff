"""Nonsense in files and on the command line is refused clearly or read correctly."""

import collections
from pathlib import Path

import pytest
from fuzz_inputs import fuzz

from moebius.cluster.report.json_lines import is_believed


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (0, 300),
        *(pytest.param(10_000 + 2_500 * n, 2_500, marks=pytest.mark.nightly) for n in range(4)),
    ],
)
def test_nonsense_is_refused_or_read_rightly(
    seed: int, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcomes = fuzz(seed, count)
    assert sum(outcomes.values()) == count
    kinds = collections.Counter[str]()
    for outcome, number in outcomes.items():
        kinds[outcome.partition(":")[0]] += number
    assert len(kinds) == 6
    assert min(kinds.values()) >= count // 6
    for surface in ("toml", "override", "config"):  # nonsense is nonsense, and not all of it is
        assert outcomes[f"{surface}: refused"] > 0
        assert outcomes[f"{surface}: accepted"] > 0
    assert outcomes["command: exit 0"] > 0
    assert outcomes["checkpoint: refused"] > 0


DETAILS = {"root_cause": {"summary": "killed", "rank": 1, "new": [1]}, "step": None}
ENTRY = {"state": "RUNNING", "time": 1, "generation": 2, "reason": "", "details": DETAILS}
TRAIN = {"kind": "train", "step": 1, "loss": "nan", "tokens_per_s": 10}


@pytest.mark.parametrize(
    ("line", "believed"),
    [
        (ENTRY, True),
        (ENTRY | {"details": {"step": "x"}}, False),
        (ENTRY | {"state": ["RUNNING"]}, False),
        (ENTRY | {"time": 1e300}, False),
        (ENTRY | {"generation": True}, False),
        (TRAIN, True),
        (TRAIN | {"loss": None}, False),
        (TRAIN | {"expert_load": [[1.0]], "max_violation": [0.0]}, False),
        ({"kind": "eval", "step": "3", "loss": 1.0}, False),
        ({"kind": "of a later version", "step": [1]}, True),
        ({"kind": "something later", "time": "noon"}, False),
        ({"kind": 7}, False),
        ({"no": "kind"}, True),
    ],
)
def test_lines_are_believed_if_all_they_say_can_be(line: dict[str, object], believed: bool) -> None:
    assert is_believed(line) == believed
