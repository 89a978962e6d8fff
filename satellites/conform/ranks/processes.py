"""Controls the process that forks ranks from outside: starts it, sends jobs, and ends its session."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .job import Job


class LaunchError(RuntimeError):
    """Reports that the process that forks ranks ended by itself."""


class Launcher:
    """Runs jobs inside a context; afterwards no process of its session remains."""

    def __init__(self, limit_s: float, preload: Sequence[str] = ()) -> None:
        environment = {**os.environ, "PYTHONPATH": _path(), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.launch", str(limit_s), *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        process = self._process
        with contextlib.suppress(ProcessLookupError):  # it has ended, and no rank of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def run(self, job: Job) -> dict[str, Any]:
        """Runs a job's ranks and returns how they ended, in the form of `launch.Outcome`.

        Raises:
            LaunchError: the process that forks them has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(job.text() + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise LaunchError(f"no ranks: {sys.executable} ended with {self._process.wait()}")
        return json.loads(line)


def _path() -> str:
    """Returns this process's module path, without the checkout that contains the package.

    A program started in the checkout has its root on the path. Folders there share names with other
    packages: transformers would import one instead of Hugging Face's `kernels`.
    """
    package = Path(__file__).resolve().parents[1]
    is_installed = package.name == __name__.partition(".")[0]
    checkout = None if is_installed else package.parents[1]
    entries = [entry or os.getcwd() for entry in sys.path]
    return os.pathsep.join(entry for entry in entries if Path(entry).resolve() != checkout)
