"""Runs every test of the failure matrix and prints the matrix with the outcomes (`make chaos`).

    python -m tests.chaos.report [PYTEST OPTIONS]

The faults are the lines "| F1 | injected | expected |" of docs/measured.md; `@pytest.mark.fault("F1")`
marks a test that shows one. Exit code 0: every test passed, or was skipped with a reason.
"""

import ast
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "measured.md"
TIMEOUT_S = 900  # per test: the longest takes a minute on two idle cores
PASSED, SKIPPED, NOT_RUN, FAILED = SEVERITY = ("passed", "skipped", "not run", "failed")


def main() -> int:
    """Runs the tests and prints the table; returns the exit code."""
    junit = ROOT / "build" / "chaos" / "matrix.xml"
    junit.parent.mkdir(parents=True, exist_ok=True)
    marked = marked_tests()
    tests = sorted({test for tests in marked.values() for test in tests})
    command = [sys.executable, "-m", "pytest", "-m", "slow or not slow", f"--timeout={TIMEOUT_S}"]
    ended = subprocess.run([*command, f"--junitxml={junit}", *sys.argv[1:], *tests], cwd=ROOT)
    outcomes = read_outcomes(junit)
    table = Table("id", "injected", "tests", "outcome", box=SIMPLE)
    shown = {fault: worst(tests, outcomes) for fault, tests in marked.items()}
    for fault, injected in faults().items():
        names = [test.removeprefix("tests/").replace(".py::test_", ": ") for test in marked[fault]]
        table.add_row(fault, *map(Text, (injected, "\n".join(names), shown[fault])))
    Console().print(table)
    return 0 if NOT_RUN not in shown.values() and ended.returncode == 0 else 1


def faults() -> dict[str, str]:
    """Returns what is injected, by the fault's number."""
    return dict(re.findall(r"^\| ([FN]\d+) \| ([^|]+) \|", PAGE.read_text("utf-8"), re.MULTILINE))


def marked_tests() -> dict[str, list[str]]:
    """Returns the node ids of the tests that show a fault, without parameters."""
    found: dict[str, list[str]] = {fault: [] for fault in faults()}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(file.read_text("utf-8")).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    for fault in map(ast.literal_eval, mark.args):
                        found[fault].append(f"{file.relative_to(ROOT)}::{node.name}")
    return found


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


def worst(tests: list[str], outcomes: Mapping[str, str]) -> str:
    """Returns the worst outcome of a fault's tests."""
    return max((outcomes.get(test, NOT_RUN) for test in tests), key=SEVERITY.index)


if __name__ == "__main__":
    sys.exit(main())
