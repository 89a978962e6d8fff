"""Creates directories atomically, and writes checkpoints outside of a run."""

import errno
import io
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ...data_pipeline.files import lock_file, sync
from ..layout import MeshConfig, plan_layout
from ..local_shard import whole_shard
from .checkpoint_folder import discard
from .format import CheckpointError, CheckpointMeta, damaged_files, open_checkpoint, step_name
from .writing import seal, software_versions, write_tensors

logger = logging.getLogger(__name__)

_LOCK_NAME = "lock"
_FILE = "__0_0.distcp"


def write_checkpoint(
    out: Path,
    tensors: Mapping[str, Callable[[], Tensor]],
    *,
    step: int,
    num_experts: Mapping[str, int],
    meta: dict[str, Any],
) -> CheckpointMeta:
    """Writes a checkpoint as a single rank would, and verifies it.

    Args:
        out: the checkpoint's directory, created atomically.
        tensors: functions that create the tensors, by name; each is called when it is written.
        step: optimizer steps done.
        num_experts: number of experts by name, for tensors with experts.
        meta: the caller's JSON values.

    Raises:
        CheckpointError: `out` exists or names another step, or the disk is full or faulty.
    """
    refuse_name_of_another_step(out, step)
    made = ((name, make().contiguous()) for name, make in tensors.items())
    with atomic_directory(out, needed_bytes=0) as temporary:
        index, file_sum = write_tensors(
            temporary / _FILE, ((name, each, whole_shard(each.shape)) for name, each in made)
        )
        written = CheckpointMeta(
            step=step,
            generation=0,
            layout=plan_layout(MeshConfig(), 1),
            num_experts=dict(num_experts),
            versions=software_versions(),
            meta=meta,
        )
        seal(temporary, index, written, {_FILE: file_sum})
        found = open_checkpoint(temporary)
        if problems := damaged_files(found, sorted(found.manifest.files)):
            listed = "\n  ".join(problems)
            raise CheckpointError(
                f"{out} reads back differently from what was written; is the disk faulty? It was removed:"
                f"\n  {listed}"
            )
    return written


def refuse_name_of_another_step(path: Path, step: int | None) -> None:
    """Refuses a directory whose name a run would take for another step's checkpoint.

    Args:
        path: the directory.
        step: the step of its checkpoint; None if it is not a checkpoint.

    Raises:
        CheckpointError: the name is that of another step.
    """
    if re.fullmatch(r"step_\d+", path.name) is None or (
        step is not None and path.name == step_name(step)
    ):
        return
    if step is None:
        raise CheckpointError(
            f"{path}: only a checkpoint may be called step_<number>; choose another name"
        )
    raise CheckpointError(
        f"{path}: the checkpoint is of step {step}, and runs find checkpoints by name: call it "
        f"{step_name(step)}, or a name that does not look like another step"
    )


@contextmanager
def atomic_directory(out: Path, *, needed_bytes: int) -> Iterator[Path]:
    """Yields a new directory to fill, renames it to `out` on success, and removes it on failure.

    The temporary directory is `out`.part.tmp, which holds a lock for its single writer. Leftovers of a
    killed process are removed with a warning.

    Raises:
        CheckpointError: `out` exists, another process writes it, its disk has less than
            `needed_bytes` free, or a file in it cannot be written; or `out` is complete, but its name
            could not be synced. An OSError about a file elsewhere propagates unchanged.
    """
    refuse_existing(out)
    part = out.with_name(f"{out.name}.part.tmp")
    with ExitStack() as stack:
        with _blamed_on(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            _refuse_small_disk(out, needed_bytes)
            lock = stack.enter_context(_locked(part, out))
            stack.callback(discard, part)
        with _blamed_on(out, within=part):
            yield part
        with _blamed_on(out):
            os.unlink(lock.name)
            sync(part)
            _rename_to_new(part, out)
    _sync_name(out)


def refuse_existing(out: Path) -> None:
    """Refuses a path that exists, even a dangling link.

    Raises:
        CheckpointError: the path exists.
    """
    if os.path.lexists(out):
        raise CheckpointError(
            f"{out} exists already and is not overwritten: choose another name, or remove it first"
        )


@contextmanager
def _blamed_on(out: Path, *, within: Path | None = None) -> Iterator[None]:
    """Turns an OSError into a CheckpointError about `out`, unless its file is outside `within`."""
    try:
        yield
    except OSError as error:
        is_elsewhere = error.filename and within and within not in Path(error.filename).parents
        if is_elsewhere:
            raise
        raise CheckpointError(
            f"{out} could not be written: {error.strerror or error} ({error.filename or out}); "
            "it was removed"
        ) from error


def _sync_name(out: Path) -> None:
    """Syncs the name of a complete `out`; a failure does not remove it."""
    try:
        sync(out.parent)
    except OSError as error:
        raise CheckpointError(
            f"{out} is complete, but its name may not survive a power cut: "
            f"{error.strerror or error} ({out.parent})"
        ) from error


def _refuse_small_disk(out: Path, needed_bytes: int) -> None:
    if (free_bytes := shutil.disk_usage(out.parent).free) < needed_bytes:
        raise CheckpointError(
            # rounded apart, so that they always differ
            f"{out}: needs {-(-needed_bytes // 2**20):,} MiB, but its disk has {free_bytes // 2**20:,} MiB "
            "free; nothing was written"
        )


def _locked(part: Path, out: Path) -> io.FileIO:
    """Creates the directory `part` and returns its lock file, locked until it is closed.

    A directory without a lock file belongs to someone else and stays unchanged.
    """
    is_new = not part.exists()
    part.mkdir(exist_ok=True)
    try:
        lock = _opened_lock(part / _LOCK_NAME, is_new=is_new)
    except OSError as error:
        raise CheckpointError(
            f"{part} is being written by another process, or was left by a killed one "
            f"({error.strerror}): remove it if nothing writes {out}, or choose another name"
        ) from error
    if is_new:
        return lock
    with lock:
        logger.warning("%s was left by a killed process; removing it", part)
        discard(part)
    part.mkdir()
    return _opened_lock(part / _LOCK_NAME, is_new=True)


def _opened_lock(path: Path, *, is_new: bool) -> io.FileIO:
    """Opens and locks a lock file; a new one suffices if the file system has no locks.

    Raises:
        OSError: another process holds it, it is gone, or its state is unknown.
    """
    try:
        return lock_file(path, "x" if is_new else "r+")
    except BlockingIOError:
        raise
    except OSError as error:
        if not is_new or error.errno == errno.EEXIST:
            raise
    return io.FileIO(path)


def _rename_to_new(path: Path, out: Path) -> None:
    """Renames a directory to a path that must not exist."""
    refuse_existing(out)
    try:
        path.rename(out)
    except OSError:
        refuse_existing(out)  # it appeared between the check and the rename
        raise
