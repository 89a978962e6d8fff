"""Prepares a job's data while its ranks train, for the supervisor.

One child process prepares (prepare_data.py). Like the ranks, it dies with the supervisor; a restarted
supervisor starts another one, which continues where the last one stopped. A killed child is restarted at most
`max_restarts` times. After a permanent failure the folder is given up (`manifest.give_up`): the ranks
train to the end of the sealed data, save and stop, and the job ends with that cause.

The child never uses CPUs that ranks need. On a cluster, the ranks' CPUs are reserved before its first task,
and each of its tasks takes one CPU of the rest. On one machine it uses the CPUs beyond one per rank at the
lowest priority, or if there are none, one process that runs when ranks are idle.
"""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...data_pipeline.errors import DataError
from ...data_pipeline.manifest import (
    DatasetManifest,
    follow,
    give_up,
    go_on,
    is_prepared,
    read_manifest,
)
from ...plugins import FOLDER
from ...train.config.resize import CONFIG_VARIABLE
from ..job import Launch, python_module
from ..nodes import processes
from ..report.data_progress import EXIT_FAILED, FAILED, last_record
from ..report.tracebacks import last_traceback, read_tail, summarise

if TYPE_CHECKING:  # the supervisor needs no torch
    from ...train.config.run_config import Config

LOG = Path("logs") / "preparation.log"
END_TIMEOUT_S = 10.0
_TAIL_BYTES = 64 * 1024
_MAX_BACKOFF_S = 30.0
# The child needs Ray's variables that say how to reach the cluster, not those meant for Ray's workers.
_OF_THE_CLUSTER = ("RAY_AUTH_", "RAY_TMPDIR", "RAY_USAGE_STATS_", "RAY_DISABLE_IMPORT_WARNING")


class BackgroundData:
    """Prepares the data of a run's configuration in a child process.

    Args:
        launch: of the job; its run folder contains the configuration.
        where: returns the child's arguments that say where tasks run; called once the ranks' CPUs are
            reserved.
    """

    def __init__(self, launch: Launch, where: Callable[[], list[str]]):
        self._launch, self._where = launch, where
        self._run_dir = Path(launch.run_dir)
        config = json.loads((self._run_dir / launch.config_file).read_bytes())
        self.directory = Path(config["data"]["directory"])
        self.start_when: int = config["train"]["start_when"]
        self.failure = ""
        """Why preparation has failed permanently; "": it has not."""
        self._is_told = False  # to the ranks, in the folder
        self._child: subprocess.Popen[bytes] | None = None
        self._manifest: DatasetManifest | None = None
        self._deaths = 0
        self._start_at = 0.0
        self._place: list[str] = []
        self._begun = self._is_complete = self._has_enough = False

    def begin(self) -> None:
        """Starts the child on the first call; raises if the cluster has no room for its tasks."""
        if not self._begun:
            self._begun = True
            go_on(self.directory)
            self._place = self._where()
            self._start()

    def has_enough(self) -> bool:
        """Returns whether enough data is sealed for the ranks to begin."""
        if not self._has_enough:
            manifest = self._read_manifest()
            self._has_enough = manifest is not None and is_enough(manifest, self.start_when)
        return self._has_enough

    def look_after(self) -> str:
        """Restarts a dead child, or gives up; returns news for the journal, or ""."""
        if self.failure and not self._is_told:
            self._tell_failure()
        if self._is_complete or self.failure or not self._begun:
            return ""
        if self._child is None:
            if time.monotonic() >= self._start_at:
                self._start()
            return ""
        code = self._child.poll()
        if code is None:
            return ""
        self._child = None
        return self._has_ended(code)

    def end(self) -> None:
        """Ends the child; another one can continue from what it has made."""
        if self._child is not None:
            below = processes.descendants(self._child.pid)
            self._child.kill()
            self._child.wait()
            processes.end(below, timeout_s=END_TIMEOUT_S)
            self._child = None

    def sealed_words(self) -> str:
        """Describes how much data is sealed."""
        manifest = self._read_manifest()
        if manifest is None:
            return "no segment"
        segments = len(manifest.sealed)
        return f"{segments:,} segment{'s' if segments != 1 else ''} with {manifest.num_tokens('train'):,} tokens"

    def _start(self) -> None:
        (self._run_dir / LOG).parent.mkdir(parents=True, exist_ok=True)
        command = python_module("moebius.cluster.prepare_data", str(self._run_dir))
        with open(self._run_dir / LOG, "ab") as log:
            self._child = subprocess.Popen(
                [*command, *self._place],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self._launch),
                start_new_session=True,  # Ctrl-C must reach only the command, which requests a stop
            )

    def _has_ended(self, code: int) -> str:
        manifest = self._read_manifest()
        if manifest is not None and manifest.complete:
            self._is_complete = True
            return f"the data is complete: {self.sealed_words()}"
        cause = self._cause(code)
        self._deaths += 1
        if code == EXIT_FAILED or self._deaths > self._launch.max_restarts:
            return self._give_up(cause)
        self._start_at = time.monotonic() + min(2.0 ** (self._deaths - 1), _MAX_BACKOFF_S)
        left = self._launch.max_restarts - self._deaths
        return f"data preparation died ({cause}) and is being restarted; {left} restart(s) left"

    def _cause(self, code: int) -> str:
        if code == EXIT_FAILED:
            record = last_record(self._run_dir) or {}
            if record.get("stage") == FAILED:
                return str(record["error"])
        if code < 0:
            return f"killed by signal {-code}"
        error, _ = summarise(last_traceback(read_tail(self._run_dir / LOG, _TAIL_BYTES)))
        return f"exit code {code}: {error or 'no last words'}; see {LOG}"

    def _give_up(self, cause: str) -> str:
        self.failure = cause
        self._tell_failure()
        return (
            f"data preparation failed: {self.failure}. The ranks continue to the end of the "
            "sealed data"
        )

    def _tell_failure(self) -> None:
        with contextlib.suppress(DataError):  # the disk is full: retried at the next look
            give_up(self.directory, self.failure)
            self._is_told = True

    def _read_manifest(self) -> DatasetManifest | None:
        if self._manifest is not None:
            self._manifest = follow(self.directory, self._manifest)
        elif is_prepared(self.directory):
            self._manifest = read_manifest(self.directory)
        return self._manifest


def is_enough(manifest: DatasetManifest, tokens: int) -> bool:
    """Returns whether ranks may start on the sealed data: `tokens` of it, and some of every source."""
    if manifest.complete:
        return True
    if not all(manifest.segments(source.name) for source in manifest.sources):
        return False  # validation reads each source's first segment
    return manifest.num_tokens("train") >= tokens


def prepares_while_training(config: "Config") -> bool:
    """Returns whether a run's data must be prepared beside its ranks, because it is not complete.

    Raises:
        DataError: it cannot be prepared; most mistakes are found before anything starts.
    """
    from ...data_pipeline.make.prepare import look_ahead

    if config.train.start_when is None:
        return False
    return look_ahead(config.prepare, config.data.directory) is None


def workers_beside(num_ranks: int) -> list[str]:
    """Returns the child's arguments on a machine whose CPUs belong to its ranks first."""
    return ["--workers", str(max(1, (os.cpu_count() or 1) - num_ranks))]


def _environment(launch: Launch) -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("RAY_") or key.startswith(_OF_THE_CLUSTER)
    }
    own = {processes.PARENT: str(os.getpid()), CONFIG_VARIABLE: launch.config_file}
    return kept | own | {FOLDER: launch.environment.get(FOLDER, "")}
