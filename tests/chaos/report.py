"""Runs every test of the failure matrix and prints the matrix with the outcomes (`make chaos`).

    python -m tests.chaos.report [PYTEST OPTIONS]

Exit code 0: every test passed, or was skipped with a reason. Rows without a test are shown, and do not fail.
"""

import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.chaos.matrix import MATRIX, NETWORK, Fault

ROOT = Path(__file__).resolve().parents[2]
LINES = (*MATRIX, *NETWORK)
TIMEOUT_S = 900  # per test: the longest takes a minute on two idle cores
PASSED, SKIPPED, UNTESTED, NOT_RUN, FAILED = "passed", "skipped", "no test", "not run", "failed"
SEVERITY = (PASSED, SKIPPED, UNTESTED, NOT_RUN, FAILED)


def main() -> int:
    """Runs the tests and prints the table; returns the exit code."""
    junit = ROOT / "build" / "chaos" / "matrix.xml"
    junit.parent.mkdir(parents=True, exist_ok=True)
    tests = sorted({test for fault in LINES for test in fault.tests})
    command = [sys.executable, "-m", "pytest", "-m", "slow or not slow", f"--timeout={TIMEOUT_S}"]
    ended = subprocess.run([*command, f"--junitxml={junit}", *sys.argv[1:], *tests], cwd=ROOT)
    outcomes = read_outcomes(junit)
    table = Table("id", "injected", "expected", "outcome", box=SIMPLE)
    for fault in LINES:
        expected = fault.expected + (f"\nnot tested: {fault.missing}" if fault.missing else "")
        row = (fault.injected, expected, judge(fault, outcomes))
        table.add_row(fault.id, *map(Text, row))
    Console().print(table)
    is_complete = all(judge(fault, outcomes) != NOT_RUN for fault in LINES)
    return 0 if is_complete and ended.returncode == 0 else 1


def read_outcomes(junit: Path) -> dict[str, str]:
    """Returns the worst outcome of each test, by its node id without parameters."""
    found: dict[str, str] = {}
    for case in ET.parse(junit).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        test = f"{file}::{case.get('name', '').partition('[')[0]}"
        tags = {child.tag for child in case}
        failed = FAILED if tags & {"failure", "error"} else PASSED
        outcome = SKIPPED if "skipped" in tags else failed
        found[test] = max(found.get(test, PASSED), outcome, key=SEVERITY.index)
    return found


def judge(fault: Fault, outcomes: Mapping[str, str]) -> str:
    """Returns the worst outcome of a fault's tests."""
    own = [outcomes.get(test, NOT_RUN) for test in fault.tests]
    return max(own, key=SEVERITY.index, default=UNTESTED)


if __name__ == "__main__":
    sys.exit(main())
