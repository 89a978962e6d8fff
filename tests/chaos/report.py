"""Runs every test of the failure matrix and prints the matrix with what came out (`make chaos`).

    python -m tests.chaos.report [PYTEST OPTIONS]

The table is saved as build/chaos/matrix.json. Exit code 0: every test passed, or was skipped with a
reason. What no test shows is in the table too, and is no failure.
"""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.chaos.matrix import MATRIX, Fault
from tests.chaos.network_matrix import NETWORK
from tests.chaos.recoveries import RECOVERY

ROOT = Path(__file__).resolve().parents[2]
LINES = (*MATRIX, *NETWORK)
OUT = ROOT / "build" / "chaos"
TIMEOUT_S = 900  # of a test: the longest needs a minute on two cores with nothing else to do
PASSED, FAILED, SKIPPED, NOT_RUN, UNTESTED = "passed", "failed", "skipped", "not run", "no test"
_COLOURS = {PASSED: "green", FAILED: "red", NOT_RUN: "red", SKIPPED: "yellow", UNTESTED: "yellow"}


@dataclass(frozen=True)
class Result:
    """What became of all cases of one test."""

    outcome: str
    seconds: float = 0.0
    recovery_s: float | None = None


@dataclass(frozen=True)
class Line:
    """One line of the matrix, as it came out."""

    id: str
    injected: str
    expected: str
    outcome: str
    recovery_s: float | None
    missing: str
    tests: Mapping[str, Result]


def main() -> int:
    """Runs the tests and shows the table; returns the exit code."""
    OUT.mkdir(parents=True, exist_ok=True)
    junit = OUT / "matrix.xml"
    junit.unlink(missing_ok=True)
    tests = sorted({test for fault in LINES for test in fault.tests})
    command = [sys.executable, "-m", "pytest", "-p", f"{__package__}.recoveries"]
    command += ["-m", "slow or not slow", f"--timeout={TIMEOUT_S}", f"--junitxml={junit}"]
    ended = subprocess.run([*command, *sys.argv[1:], *tests], cwd=ROOT)
    results = read_results(junit) if junit.exists() else {}
    lines = [judge(fault, results) for fault in LINES]
    (OUT / "matrix.json").write_text(json.dumps([asdict(line) for line in lines], indent=1))
    Console().print(table_of(lines))
    is_good = all(line.outcome in (PASSED, SKIPPED, UNTESTED) for line in lines)
    return 0 if is_good and ended.returncode == 0 else 1


def read_results(junit: Path) -> dict[str, Result]:
    """Returns what became of each test, by its node id without parameters."""
    cases: dict[str, list[ET.Element]] = {}
    for case in ET.parse(junit).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        name = case.get("name", "").partition("[")[0]
        cases.setdefault(f"{file}::{name}", []).append(case)
    return {test: _result_of(found) for test, found in cases.items()}


def _result_of(cases: Iterable[ET.Element]) -> Result:
    outcomes = [_outcome_of(case) for case in cases]
    told = [
        float(entry.get("value", "nan"))
        for case in cases
        for entry in case.iter("property")
        if entry.get("name") == RECOVERY
    ]
    seconds = sum(float(case.get("time", 0)) for case in cases)
    return Result(_worst(outcomes), round(seconds, 1), max(told, default=None))


def _outcome_of(case: ET.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return FAILED
    return SKIPPED if case.find("skipped") is not None else PASSED


def _worst(outcomes: Iterable[str]) -> str:
    found = set(outcomes)
    return next(one for one in (FAILED, NOT_RUN, SKIPPED, PASSED) if one in found)


def judge(fault: Fault, results: Mapping[str, Result]) -> Line:
    """Returns a line of the matrix, as its tests came out."""
    own = {test: results.get(test, Result(NOT_RUN)) for test in fault.tests}
    outcome = _worst(result.outcome for result in own.values()) if own else UNTESTED
    recoveries = [one.recovery_s for one in own.values() if one.recovery_s is not None]
    return Line(
        fault.id,
        fault.injected,
        fault.expected,
        outcome,
        max(recoveries, default=None),
        fault.missing,
        own,
    )


def table_of(lines: Iterable[Line]) -> Table:
    """Returns the matrix as a table for people."""
    table = Table("id", "injected", "what must follow", "outcome", "recovery", "tests", box=SIMPLE)
    for line in lines:
        recovery = "" if line.recovery_s is None else f"{line.recovery_s:.1f} s"
        outcome = Text(line.outcome, style=_COLOURS[line.outcome])
        number = f"{len(line.tests)} in {sum(one.seconds for one in line.tests.values()):.0f} s"
        expected = Text(line.expected)
        if line.missing:
            expected.append(f"\nnot shown: {line.missing}", style="yellow")
        table.add_row(line.id, Text(line.injected), expected, outcome, recovery, number)
    return table


if __name__ == "__main__":
    sys.exit(main())
