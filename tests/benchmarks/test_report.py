"""What is measured again is written anew, and what is not stays as it was."""

import json
from pathlib import Path

import pytest

from benchmarks import report


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(report, "environment", lambda: {"commit": "new"})
    return tmp_path


@pytest.mark.parametrize("under", ["", "kills"])
def test_parts_that_are_not_measured_stay_with_what_they_were_measured_on(folder, under):
    old = {"read": [1, 2], "memory": {"tokens": 3}}
    before = {"environment": {"commit": "old"}, "goals": "g", "note": "by hand"}
    before |= {under: old} if under else old
    (folder / "data.json").write_text(json.dumps(before))
    report.save_parts("data", {"read": [4]}, {"goals": "h"}, under=under, folder=folder)
    found = json.loads((folder / "data.json").read_text())
    assert (found[under] if under else found)["read"] == [4]
    assert (found[under] if under else found)["memory"] == {"tokens": 3}
    assert (found["goals"], found["note"]) == ("h", "by hand")
    assert found["measured"].keys() == {"read", "memory"}
    assert found["measured"]["memory"] == {"commit": "old"}
    assert found["measured"]["read"] == found["environment"]
    assert found["environment"]["commit"] == "new"
    first = found["measured"]["read"]
    report.save_parts("data", {"random": 5}, {"goals": "h"}, under=under, folder=folder)
    found = json.loads((folder / "data.json").read_text())
    assert found["measured"]["read"] == first
    assert set(found["measured"]) == {"read", "memory", "random"}


def test_the_first_parts_make_the_file(folder):
    path = report.save_parts("new", {"read": 1}, {"load_average": 2}, under="kills", folder=folder)
    found = json.loads(path.read_text())
    assert found["kills"] == {"read": 1}
    assert set(found) == {"environment", "measured", "load_average", "kills"}
    assert set(found["measured"]) == {"read"}
