"""Shared by all tests: one thread per process, reproducible examples, compiled kernels, and no
process left behind.

The guard: every process that a test starts inherits a mark in its environment, so orphans are found
as well as children (/proc/*/environ). Processes alive after the last test are listed with their
command lines and killed, and the session fails. The fork server of world.py is exempt: it serves
the whole session and ends with this process.

With `pytest -n 2` every worker is such a session with its own mark, and reports to the first
process. That one checks again after the workers have ended, because a crashed worker reports
nothing.
"""

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import row_order
import torch
from hypothesis import settings
from shared import shared_folder

from moebius.cli.main import main
from moebius.kernels.cpu import library

SESSION_MARK = "MOEBIUS_TEST_SESSION"
LEAVE_S = 5.0  # how long a process that is on its way out may take
TESTS = Path(__file__).parent
CHEAP = ("benchmarks", "cli", "data_pipeline", "evaluation", "model", "planning")  # no long files
LEFT_BEHIND = pytest.StashKey[dict[int, str]]()

settings.register_profile("house", deadline=None, derandomize="CI" in os.environ, print_blob=True)


@dataclass(frozen=True)
class Answer:
    """Holds what a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Returns everything printed, with line breaks folded."""
        return " ".join((self.out + self.err).split())


@pytest.fixture
def moebius(capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs a command line in this process: `moebius("status", run_dir).code`."""

    def run(*words: object) -> Answer:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capfd.readouterr()
        answer = Answer(int(ended.value.code or 0), out, err)
        assert "Traceback" not in answer.err, answer.err
        return answer

    return run


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands print as in a terminal of 80 columns without colours."""
    for name, value in {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "80", "LINES": "25"}.items():
        monkeypatch.setenv(name, value)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("house")
    torch.set_num_threads(1)  # the machine's cores belong to the ranks that tests start
    row_order.install_if_wanted()
    # torch's store asks the name server who 127.0.0.1 is, at every connection. One that does not
    # answer costs 5 s each time; here it has a second, in this process and in all that it starts.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    config.stash[LEFT_BEHIND] = {}
    # pytest-xdist started this process; the environment does not tell, because a session inside a
    # test inherits it. A worker's mark begins with its parent's.
    worker = getattr(config, "workerinput", None)
    parent = f"{os.environ[SESSION_MARK]}-" if worker else ""
    os.environ[SESSION_MARK] = parent + secrets.token_hex(8)
    library.loaded()  # ranks that waited for the compiler would be late


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks most cases of the tests marked `sample(N)`: N remain, spread over all; 2N more are slow,
    and the others nightly. Of the tests marked `quick(N)` N of those that remain stay; the others are
    slow.
    """
    for kept, group in _cases(items, "sample"):
        fast = _spread(kept, len(group))
        others = [item for place, item in enumerate(group) if place not in fast]
        slow = _spread(2 * kept, len(others))
        for place, item in enumerate(others):
            item.add_marker(pytest.mark.slow if place in slow else pytest.mark.nightly)
    for kept, group in _cases(items, "quick"):
        left = [
            item for item in group if not any(map(item.get_closest_marker, ("slow", "nightly")))
        ]
        fast = _spread(kept, len(left))
        for place, item in enumerate(left):
            if place not in fast:
                item.add_marker(pytest.mark.slow)
    if cases := int(os.environ.get("MOEBIUS_TEST_CASES", 0)):
        limit_slow_cases(items, cases)
    # The last files run while other workers have nothing left to do, so these are the cheap ones.
    items.sort(key=lambda item: item.path.relative_to(TESTS.parent).parts[1] in CHEAP)


def limit_slow_cases(items: list[pytest.Item], cases: int) -> None:
    """Leaves so many slow cases of every test, spread over all; the others become nightly."""
    groups: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("nightly"):
            groups.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for group in groups.values():
        kept = _spread(cases, len(group))
        for place, item in enumerate(group):
            if place not in kept:
                item.add_marker(pytest.mark.nightly)


def _cases(items: list[pytest.Item], kind: str) -> Iterable[tuple[int, list[pytest.Item]]]:
    """Returns the cases of every test marked `kind(N)`, with N."""
    groups: dict[tuple[Path, str, int], list[pytest.Item]] = {}
    for item in items:
        if marker := item.get_closest_marker(kind):
            key = (item.path, item.name.partition("[")[0], marker.args[0])
            groups.setdefault(key, []).append(item)
    return [(kept, group) for (*_, kept), group in groups.items()]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_shared"):
        shared_folder()  # skips where there is none


def _spread(chosen: int, total: int) -> set[int]:
    """Returns places spread evenly over 0 … total − 1, all of them if there are no more."""
    if chosen >= total:
        return set(range(total))
    return {round((place + 0.5) * total / chosen - 0.5) for place in range(chosen)}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    deadline = time.monotonic() + LEAVE_S
    while (left := _left_behind()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    session.config.stash[LEFT_BEHIND] |= left
    config: Any = session.config  # pytest-xdist's own attributes are in no type
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_behind"] = session.config.stash[LEFT_BEHIND]
    if session.config.stash[LEFT_BEHIND]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collects what a worker found at its end; a crashed worker has no output."""
    node.config.stash[LEFT_BEHIND] |= getattr(node, "workeroutput", {}).get("left_behind", {})


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
    """Returns this session's living processes except this one and multiprocessing's two: pid ->
    command line.
    """
    fork_server: Any = forkserver._forkserver
    tracker: Any = resource_tracker._resource_tracker
    own = {os.getpid(), fork_server._forkserver_pid, tracker._pid}
    mark = f"{SESSION_MARK}={os.environ[SESSION_MARK]}".encode()
    left = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) not in own and mark in (entry / "environ").read_bytes():
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                left[int(entry.name)] = command.decode().strip()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone meanwhile, or another user's
    return left
