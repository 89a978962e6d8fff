"""Preparing a job's data while its ranks train: the supervision's side of it.

One child process prepares (prepare_data.py). It belongs to the supervision as the ranks do: it dies with
it, and a restarted supervision starts another, which goes on where the last one was. When it is
killed it is started again, at most `max_restarts` times. When it fails for good, the folder is given
up (`data_pipeline/growth.py`): the ranks train to the end of what is sealed, save and stop, and the
job ends with that cause.

Which CPUs it may use: never those that ranks need. On a cluster the ranks' CPUs are reserved before
the first task of the preparation starts, and its tasks take one CPU each of what is left. On one
machine it has the CPUs beyond one per rank, at the lowest priority; where none is left it has one
process, which at that priority takes what the ranks leave idle.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...data_pipeline.errors import DataError
from ...data_pipeline.growth import give_up, go_on
from ...data_pipeline.manifest import DatasetManifest, follow, is_prepared, read_manifest
from ...own_parts import FOLDER
from ...train.config.start_when import StartWhen
from ..job import Launch
from ..nodes import processes
from ..report.data_progress import EXIT_FAILED, FAILED, last_record
from ..report.tracebacks import last_traceback, read_tail, summarise

if TYPE_CHECKING:  # the supervisor needs no torch
    from ...train.config.run_config import Config

LOG = Path("logs") / "preparation.log"
END_TIMEOUT_S = 10.0
_TAIL_BYTES = 64 * 1024
_MAX_BACKOFF_S = 30.0
# What Ray sets for its workers is not for this child; how to reach the cluster is.
_OF_THE_CLUSTER = ("RAY_AUTH_", "RAY_TMPDIR", "RAY_USAGE_STATS_", "RAY_DISABLE_IMPORT_WARNING")


class BackgroundData:
    """Prepares the data of a run folder's configuration in a child process, for the supervision.

    Args:
        launch: of the job; its run folder holds config.json.
        where: returns the process's arguments that say where tasks run; called once the ranks'
            CPUs are reserved.
    """

    def __init__(self, launch: Launch, where: Callable[[], list[str]]):
        self._launch, self._where = launch, where
        self._run_dir = Path(launch.run_dir)
        config = json.loads((self._run_dir / "config.json").read_bytes())
        self.directory = Path(config["data"]["directory"])
        self.start_when = StartWhen.model_validate(config["train"]["start_when"])
        self.failure = ""
        """Why the preparation has failed for good; "": it has not."""
        self.must_end_ranks = False
        """Whether it has failed, and the ranks cannot find that out by themselves."""
        self._child: subprocess.Popen[bytes] | None = None
        self._manifest: DatasetManifest | None = None
        self._deaths = 0
        self._start_at = 0.0
        self._place: list[str] = []
        self._begun = self._is_complete = self._has_enough = False

    def begin(self) -> None:
        """Starts the child, the first time that it is called.

        What says where tasks run may raise: it has no room for them.
        """
        if not self._begun:
            self._begun = True
            go_on(self.directory)
            self._place = self._where()
            self._start()

    def has_enough(self) -> bool:
        """Returns whether so much is sealed that the ranks may begin."""
        if not self._has_enough:
            manifest = self._read_manifest()
            self._has_enough = manifest is not None and self.start_when.is_met(manifest)
        return self._has_enough

    def look_after(self) -> str:
        """Looks after the child; returns what people should know of, or ""."""
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
        """Ends the child; what it has made stays, and another one can go on there."""
        if self._child is not None:
            below = processes.descendants(self._child.pid)
            self._child.kill()
            self._child.wait()
            processes.end(below, timeout_s=END_TIMEOUT_S)
            self._child = None

    def sealed_words(self) -> str:
        """Returns how much is sealed."""
        manifest = self._read_manifest()
        if manifest is None:
            return "no segment"
        segments = len(manifest.sealed)
        return f"{segments:,} segment{'s' if segments != 1 else ''} with {manifest.num_tokens('train'):,} tokens"

    def _start(self) -> None:
        (self._run_dir / LOG).parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "moebius.cluster.prepare_data", str(self._run_dir)]
        with open(self._run_dir / LOG, "ab") as log:
            self._child = subprocess.Popen(
                [*command, *self._place],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment() | {FOLDER: self._launch.environment.get(FOLDER, "")},
                start_new_session=True,  # Ctrl-C is for the command line, which asks for a stop
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
        try:
            give_up(self.directory, cause)
        except DataError as error:  # a full disk has no room for this either
            self.failure += f"; and {error}"
            self.must_end_ranks = True
        return (
            f"data preparation failed: {self.failure}. The ranks continue to the end of the "
            "sealed data"
        )

    def _read_manifest(self) -> DatasetManifest | None:
        if self._manifest is not None:
            self._manifest = follow(self.directory, self._manifest)
        elif is_prepared(self.directory):
            self._manifest = read_manifest(self.directory)
        return self._manifest


def prepares_beside(config: "Config") -> bool:
    """Returns whether a run's data is to be prepared beside its ranks: it is not there yet.

    Raises:
        DataError: it cannot be prepared; most mistakes are found before anything is started.
    """
    from ...data_pipeline.make.prepare import look_ahead

    if config.train.start_when is None:
        return False
    return look_ahead(config.prepare, config.data.directory) is None


def workers_beside(num_ranks: int) -> list[str]:
    """Returns where data is prepared on a machine whose CPUs are first of all for its ranks."""
    return ["--workers", str(max(1, (os.cpu_count() or 1) - num_ranks))]


def _environment() -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("RAY_") or key.startswith(_OF_THE_CLUSTER)
    }
    return kept | {processes.PARENT: str(os.getpid())}
