"""What every test shares: one thread per process, reproducible examples, kernels that are compiled
already, and a session that leaves no process behind.

The guard: each process that a test starts inherits a mark in its environment, so an orphan is found
as well as a child (/proc/*/environ). What still lives when the last test is done is shown with its
command line, ended, and the session fails. The fork server of world.py is let off: it serves the
whole session and ends with this process.
"""

import contextlib
import os
import secrets
import signal
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from moebius.kernels.avx512 import build as avx512_library

SESSION_MARK = "MOEBIUS_TEST_SESSION"
LEAVE_S = 5.0  # how long a process that is on its way out may take
LEFT_BEHIND = pytest.StashKey[dict[int, str]]()

settings.register_profile("house", deadline=None, derandomize="CI" in os.environ, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("house")
    torch.set_num_threads(1)  # the machine's cores belong to the ranks that tests start
    # torch's store asks the name server who 127.0.0.1 is, at every connection. One that does not
    # answer costs 5 s each time; here it has a second, in this process and in all that it starts.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    os.environ[SESSION_MARK] = secrets.token_hex(8)
    if avx512_library.reason_against(torch.float32) is None:
        avx512_library.load_library()  # ranks that compiled it each for itself would be late


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    deadline = time.monotonic() + LEAVE_S
    while (left := _left_behind()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    session.config.stash[LEFT_BEHIND] = left
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if left := config.stash.get(LEFT_BEHIND, {}):
        terminalreporter.section("processes left behind by the tests", red=True, bold=True)
        for pid, command in left.items():
            terminalreporter.line(f"{pid}  {command}")
        terminalreporter.line(
            "the session fails: whoever starts a process ends it (they have been killed now)"
        )


def _left_behind() -> dict[int, str]:
    """Living processes of this session but this one and multiprocessing's own two: pid -> command
    line.
    """
    fork_server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    own = {os.getpid(), fork_server._forkserver_pid, tracker._pid}
    mark = f"{SESSION_MARK}={os.environ[SESSION_MARK]}".encode()
    left = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0") and int(entry.name) not in own:
                left[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                )
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or another user's
    return left
