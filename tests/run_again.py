"""Runs the tests that have just failed once more, alone: `python -m tests.run_again ARGS of pytest`.

Hundreds of tests kill and freeze processes while three others compute beside them, on machines whose
speed is not ours to choose. What fails there and passes alone is no proof that a change is wrong, so
it does not stop one; but it is a fault, of the test or of the code, and is printed as one. Many
failures at once are no such accident, and are not tried again.
"""

import json
import sys
from pathlib import Path

import pytest

_CACHE = Path(".pytest_cache/v/cache/lastfailed")  # of the folder that pytest ran in

_MOST = 5


class _Passed:
    """Notes which tests passed."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.names.append(report.nodeid)


def main(arguments: list[str]) -> int:
    """Returns pytest's exit code for the failed tests alone; 1 where they are too many."""
    try:
        failed = sorted(json.loads(_CACHE.read_text()))
    except (OSError, ValueError):
        return 1  # it did not fail in a test
    if not 0 < len(failed) <= _MOST:
        return 1
    passed = _Passed()
    code = pytest.main([*arguments, *failed], plugins=[passed])
    for name in passed.names:
        print(f"FLAKY: {name} failed beside others, and passed alone: this is to be mended")
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
