"""Keeps tests on a GPU from costing each other, in sessions of pytest-xdist.

A test that breaks its process's CUDA context ends that worker, and a new one runs the others. What
fails is printed at once, so a session that is stopped has said it. Test modules name this plugin.
"""

import os
from collections.abc import Generator

import pytest
import torch

from benchmarks.gpu.attempt import is_broken

_BROKEN = 70  # exit code


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, None, None]:
    """Ends a worker whose CUDA context is broken."""
    if "PYTEST_XDIST_WORKER" in os.environ and is_broken():
        os._exit(_BROKEN)  # the test's own report has been sent
    yield


class _Printer:
    def __init__(self, reporter: pytest.TerminalReporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Prints a failure's first and last line, in which Triton's compiler gives the reason."""
        if report.failed:
            lines = report.longreprtext.splitlines()
            said = [line for line in lines if line.startswith("E  ")] or lines[-1:]
            words = " … ".join(line.strip() for line in (said[0], *said[1:][-1:]))
            self._reporter.write_line(f"\nFAILED {report.nodeid}: {words}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Prints failures in the process that reports, if there is a GPU."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and torch.cuda.is_available():
        config.pluginmanager.register(_Printer(reporter))
