"""Copies a run's checkpoints to a second place in the background.

    <copy_to>/<name of the run folder>/run.json                the run that owns these copies
                                       step_00000050/…         a checkpoint's files, manifest.json last

A copy is complete once it has a manifest.json, so no rename is needed, which object stores lack. A
thread of rank 0 copies one checkpoint at a time, and skips to the newest if several wait. If some may
stay for good (`checkpoint.keep_every`, `keep_best`), it takes the newest and the oldest by turns, and
skips those deleted meanwhile. What keeps a checkpoint keeps its copy. A failed copy is reported and does
not end the run. A run whose newest checkpoint is damaged or missing fetches a copy (recovery.py) and
verifies it like any other.

The run folder and the second place hold the same random number. If they differ, the run does not
start, so it never resumes from another run's copies.

Cost: the bytes of a checkpoint are read once more and sent while training continues.
"""

import json
import logging
import re
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from .checkpoint_folder import CheckpointConfig, discard
from .format import CheckpointError, step_of

logger = logging.getLogger(__name__)

OWNER = "run.json"
MARK = "second_copy.json"  # in the run folder
_NAME = re.compile(r"step_\d{8,}")


@dataclass(frozen=True)
class CopyRecord:
    """The outcome of one copy."""

    step: int
    seconds: float
    num_bytes: int
    error: str | None


class SecondCopy:
    """The second place of one run's checkpoints, as rank 0 sees it."""

    def __init__(self, copy_to: str, run_dir: Path, config: CheckpointConfig) -> None:
        self._run_dir = run_dir
        self.url = f"{copy_to.rstrip('/')}/{run_dir.absolute().name}"
        self._config = config
        self._lock = threading.Lock()
        self._pending: list[Path] = []
        self._takes_newest = True  # of those that wait
        self._thread: threading.Thread | None = None
        self._records: deque[CopyRecord] = deque()
        self.reading: Path | None = None  # the checkpoint being copied, which must stay

    def claim(self) -> None:
        """Claims the second place for this run, or checks that it is this run's.

        Raises:
            CheckpointError: it is another run's, or it is unreachable and this run has not used it.
        """
        mark = self._run_dir / MARK
        known = _run_id(mark.read_bytes()) if mark.exists() else None
        try:
            fs, root = self._place()
            owner = f"{root}/{OWNER}"
            found = _run_id(fs.cat_file(owner)) if fs.exists(owner) else None
            if found is None and known is None:
                known = secrets.token_hex(16)
                mark.write_text(json.dumps({"run": known}) + "\n", encoding="utf-8")
            if found is None:
                fs.makedirs(root, exist_ok=True)
                fs.pipe_file(owner, json.dumps({"run": known}).encode())
        except Exception as error:  # each file system raises its client's own errors
            message = f"checkpoint.copy_to: {self.url} cannot be used ({_words(error)})"
            if known is None:
                raise CheckpointError(f"{message}: check the address and your access") from error
            logger.warning("%s; continuing without it", message)
            return
        if found is not None and found != known:
            raise CheckpointError(
                f"checkpoint.copy_to: {self.url} holds the checkpoints of another run, not of {self._run_dir}: "
                f"choose another place or run folder; or, to resume from them, copy {self.url}/{OWNER} to {mark}"
            )

    def copy_later(self, checkpoint: Path) -> None:
        """Schedules the copy of a committed checkpoint after the current one."""
        with self._lock:
            may_stay = self._config.keep_every or self._config.keep_best
            self._pending = [*(self._pending if may_stay else []), checkpoint]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="second copy", daemon=True)
                self._thread.start()

    def poll(self) -> list[CopyRecord]:
        """Returns the copies that ended since the last call, failed ones included."""
        return [self._records.popleft() for _ in range(len(self._records))]

    def wait(self, timeout_s: float) -> None:
        """Waits for the copies; warns if they are not complete within `timeout_s`."""
        thread = self._thread
        if thread is None:
            return
        thread.join(timeout_s)
        if thread.is_alive():
            logger.warning("%s: the copy was not complete after %.0f s", self.url, timeout_s)

    def steps(self) -> list[int]:
        """Lists the steps of complete copies, newest first.

        Raises:
            CheckpointError: the place is unreachable.
        """
        try:
            fs, root = self._place()
            complete = [
                step_of(name)
                for name in _folders(fs, root)
                if fs.exists(f"{root}/{name}/manifest.json")
            ]
        except Exception as error:
            raise CheckpointError(f"{self.url} cannot be read ({_words(error)})") from error
        return sorted(complete, reverse=True)

    def fetch(self, name: str, out: Path) -> None:
        """Copies the checkpoint `name` into the new folder `out`.

        Raises:
            CheckpointError: the copy cannot be read, or `out` cannot be written.
        """
        discard(out)
        try:
            out.mkdir(parents=True)
            fs, root = self._place()
            for path in fs.ls(f"{root}/{name}", detail=False):
                fs.get_file(path, str(out / str(path).rstrip("/").rpartition("/")[2]))
        except Exception as error:
            discard(out)
            raise CheckpointError(f"{self.url}/{name} cannot be read ({_words(error)})") from error

    def _place(self) -> tuple[Any, str]:
        fs, root = fsspec.core.url_to_fs(self.url)
        fs.invalidate_cache()
        return fs, str(root).rstrip("/")

    def _run(self) -> None:
        while (checkpoint := self._next()) is not None:
            started_s, num_bytes, error = time.monotonic(), 0, None
            try:
                num_bytes = self._copy(checkpoint)
                self._delete_old(checkpoint.name)
            except Exception as cause:  # noqa: BLE001 - reported; training continues
                error = f"{checkpoint.name} was not copied to {self.url}: {_words(cause)}"
                logger.warning("%s", error)
            seconds = time.monotonic() - started_s
            self._records.append(CopyRecord(step_of(checkpoint.name), seconds, num_bytes, error))

    def _next(self) -> Path | None:
        with self._lock:
            self.reading = None
            while self._pending and self.reading is None:
                path = self._pending.pop(-1 if self._takes_newest else 0)
                self._takes_newest = not self._takes_newest
                self.reading = path if path.exists() else None
            if self.reading is None:
                self._thread = None
            return self.reading

    def _copy(self, checkpoint: Path) -> int:
        """Copies the files, manifest.json last; returns their bytes."""
        fs, root = self._place()
        target = f"{root}/{checkpoint.name}"
        if fs.exists(f"{target}/manifest.json"):  # of the same step, before the run went back
            fs.rm_file(f"{target}/manifest.json")
        fs.makedirs(target, exist_ok=True)
        names = sorted(file.name for file in checkpoint.iterdir())
        names.sort(key=lambda name: name == "manifest.json")
        num_bytes = 0
        for name in names:
            size = (checkpoint / name).stat().st_size
            fs.put_file(str(checkpoint / name), f"{target}/{name}")
            if (arrived := fs.info(f"{target}/{name}")["size"]) not in (size, None):
                raise CheckpointError(f"{name} arrived with {arrived} of its {size} bytes")
            num_bytes += size
        return num_bytes

    def _delete_old(self, newest: str) -> None:
        """Deletes copies up to the newest one that nothing keeps."""
        fs, root = self._place()
        past = [name for name in _folders(fs, root) if step_of(name) <= step_of(newest)]
        kept = self._config.why_kept(past, lambda name: fs.cat_file(f"{root}/{name}"))
        for name in past:
            if not kept[name]:
                fs.rm(f"{root}/{name}", recursive=True)


def _folders(fs: Any, root: str) -> list[str]:
    """Lists the names of checkpoints in a place."""
    if not fs.exists(root):
        return []
    names = (str(path).rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False))
    return [name for name in names if _NAME.fullmatch(name)]


def _run_id(content: bytes) -> str:
    """Returns the number in a run.json, or "unreadable", which matches no run."""
    try:
        return str(json.loads(content)["run"])
    except (ValueError, RecursionError, TypeError, KeyError):
        return "unreadable"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
