"""What is measured again is written anew, and what is not stays as it was."""

import json
from pathlib import Path

import pytest

from benchmarks import report


@pytest.mark.parametrize("under", ["", "kills"])
def test_parts_that_are_not_measured_stay_with_what_they_were_measured_on(
    under: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "environment", lambda: {"commit": "new"})
    old = {"read": [1, 2], "memory": {"tokens": 3}}
    before = {"environment": {"commit": "old"}, "goals": "g", "note": "by hand"}
    before |= {under: old} if under else old
    (tmp_path / "data.json").write_text(json.dumps(before))
    report.save_parts("data", {"read": [4]}, {"goals": "h"}, under=under, folder=tmp_path)
    report.save_parts("data", {"random": 5}, {"goals": "h"}, under=under, folder=tmp_path)
    found = json.loads((tmp_path / "data.json").read_text())
    parts = found[under] if under else found
    assert (parts["read"], parts["memory"], parts["random"]) == ([4], {"tokens": 3}, 5)
    assert (found["goals"], found["note"]) == ("h", "by hand")
    assert found["measured"].keys() == {"read", "memory", "random"}
    assert found["measured"]["memory"] == {"commit": "old"}
    assert found["measured"]["read"] == found["environment"]


def test_a_kill_while_a_file_is_written_leaves_the_former(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = report.write_json(tmp_path / "figures.json", {"ms": 1})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        report.write_json(path, {"ms": 2})
    assert json.loads(path.read_text()) == {"ms": 1}
