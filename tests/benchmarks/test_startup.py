"""The benchmark of start-up times measures what it names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.startup import ROOT, Case, Start, measure, summarise

MEASURE = """
import json, sys
from pathlib import Path
from benchmarks.startup import ROOT, cases, measure, write_run
measured = {case.name: case for case in cases(write_run(Path(sys.argv[1]) / "run", 1000))}
names = ("python", "moebius status", "moebius logs", "moebius stop", "moebius watch")
print(json.dumps({name: vars(measure(measured[name], ROOT.parent)) for name in names}))
assert "torch" not in sys.modules, "its memory would be counted as that of what is measured"
"""


def test_every_command_of_the_benchmark_answers(tmp_path: Path) -> None:
    asked = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name, start in json.loads(asked.stdout).items():
        assert 0 < start["processor_s"] < 60, name
        assert 5 < start["peak_mib"] < 100, name  # torch alone takes more


def test_a_case_that_fails_is_not_measured(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended with exit code 3"):
        measure(Case("broken", "raise SystemExit(3)"), tmp_path)


def test_the_least_and_the_median() -> None:
    starts = [Start(0.3, 0.2, 10.0), Start(0.1, 0.1, 12.0), Start(0.9, 0.6, 11.0)]
    assert summarise(starts) == {
        "wall_s": {"min": 0.1, "median": 0.3},
        "processor_s": {"min": 0.1, "median": 0.2},
        "peak_mib": {"min": 10.0, "median": 11.0},
    }
