"""How a checkpoint's files are written: summed on the way, synced, and in a directory that is there
whole or not at all.

What stands in the files says files.py. Cost: one pass over the bytes, since the
checksums are taken while writing.
"""

import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from .format import (
    SUM_BYTES,
    CheckpointError,
    CheckpointManifest,
    CheckpointMeta,
    Chunk,
    FileSum,
    Index,
    StoredTensor,
    blake2b,
    digest_of_sums,
)
from .reading import dtype_name

logger = logging.getLogger(__name__)

_LOCK_NAME = "lock"

# The tensors' files ------------------------------------------------------------------------------


class _SummedFile(io.FileIO):
    """A file whose checksum is taken while it is written, and that remembers why it failed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "wb")
        self._digest = hashlib.blake2b(digest_size=SUM_BYTES)
        self._num_bytes = 0
        self.failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Writes bytes and adds them to the checksum."""
        try:
            written = super().write(data)
        except OSError as error:
            self.failure = OSError(error.errno, error.strerror, str(self.name))
            raise
        self._digest.update(memoryview(data).cast("B")[:written])
        self._num_bytes += written
        return written

    def sum(self) -> FileSum:
        """Returns the size and the checksum of what was written."""
        return FileSum(num_bytes=self._num_bytes, blake2b=self._digest.hexdigest())


class _SummingFiles(FileSystem):
    """DCP's file system, which takes the checksum of each file that it writes."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            raise AssertionError(f"a writer writes, it was asked for mode {mode!r}")
        file = _SummedFile(path)
        try:
            with io.BufferedWriter(file, buffer_size=2**20) as stream:
                yield stream
        except Exception:
            if file.failure is not None:  # torch.save says "unexpected pos" when the disk is full
                raise file.failure from None
            raise
        self.sums[Path(path).name] = file.sum()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class SummingWriter(FileSystemWriter):
    """DCP's writer: one file per rank, synced, with checksums, without the machine's path in it.

    After the save `files.sums` has this rank's checksums, and `index` on rank 0 says where
    everything is.
    """

    def __init__(self, path: Path) -> None:
        # Copying ahead would touch the first GPU from this thread; the staged tensors are in main
        # memory already.
        super().__init__(path, per_thread_copy_ahead=0)
        self.files = _SummingFiles()
        self.fs = self.files
        self.index = Index(tensors={})

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.index = _index_of(
            metadata, {result.index: result.storage_data for part in results for result in part}
        )

    def storage_meta(self) -> None:
        return None


def _index_of(metadata: Metadata, places: Mapping[MetadataIndex, Any]) -> Index:
    tensors = {}
    for name, stored in metadata.state_dict_metadata.items():
        tensor = cast(TensorStorageMetadata, stored)  # `write_plan` has refused all else
        chunks = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            chunks.append(
                Chunk(
                    offsets=tuple(chunk.offsets),
                    sizes=tuple(chunk.sizes),
                    file=place.relative_path,
                    start=place.offset,
                    length=place.length,
                )
            )
        tensors[name] = StoredTensor(
            dtype=dtype_name(tensor.properties.dtype), shape=tuple(tensor.size), chunks=chunks
        )
    return Index(tensors=tensors)


# Small files, and a directory that is there whole or not at all ---------------------------------


@contextmanager
def atomic_directory(out: Path, *, needed_bytes: int) -> Iterator[Path]:
    """Yields a new directory to fill, and calls it `out` when all went well; else removes it.

    Until then it is `out`.part.tmp, which one process at a time may write: it holds the lock in
    there. What a process left there that was killed is removed, and a warning says so.

    Raises:
        CheckpointError: `out` exists, another process writes it, its disk has less than
            `needed_bytes` left, or a file in it cannot be written; or it is there, whole, but its
            name could not be synced. An OSError about a file elsewhere is raised as it is.
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
            sync_directory(part)
            _rename_to_new(part, out)
    _sync_name(out)


def refuse_existing(out: Path) -> None:
    """Refuses a name that exists, even a link to nothing.

    Raises:
        CheckpointError: there is something of that name.
    """
    if os.path.lexists(out):
        raise CheckpointError(
            f"{out} exists already and is not overwritten: choose another name, or remove it first"
        )


@contextmanager
def _blamed_on(out: Path, *, within: Path | None = None) -> Iterator[None]:
    """Turns an OSError into a CheckpointError about `out`.

    With `within`, only if it is about a file in there, or about none.
    """
    try:
        yield
    except OSError as error:
        is_elsewhere = error.filename and within and within not in Path(error.filename).parents
        if is_elsewhere:
            raise
        raise CheckpointError(
            f"{out} could not be written: {error.strerror or error} ({error.filename or out}); "
            "nothing was left there"
        ) from error


def _sync_name(out: Path) -> None:
    """Writes the name of a complete `out` to the disk.

    `out` is not taken back if that fails: whoever wants it has it.
    """
    try:
        sync_directory(out.parent)
    except OSError as error:
        raise CheckpointError(
            f"{out} is complete, but its name may not survive a power cut: "
            f"{error.strerror or error} ({out.parent})"
        ) from error


def _refuse_small_disk(out: Path, needed_bytes: int) -> None:
    if (free_bytes := shutil.disk_usage(out.parent).free) < needed_bytes:
        raise CheckpointError(
            f"{out}: needs {needed_bytes / 2**20:,.0f} MiB, but its disk has "
            f"{free_bytes / 2**20:,.0f} MiB left; nothing was written"
        )


def _locked(part: Path, out: Path) -> io.FileIO:
    """Makes the directory `part` and returns its lock file, locked until it is closed.

    A directory without a lock file is somebody's own, and stays as it is.
    """
    is_new = not part.exists()
    part.mkdir(exist_ok=True)
    try:
        lock = _opened_lock(part / _LOCK_NAME, is_new=is_new)
    except OSError as error:
        raise CheckpointError(
            f"{part} is being written by another process, or was left by one that was killed and "
            f"cannot be told from one that lives ({error.strerror}): remove it if nothing writes "
            f"{out}, or choose another name"
        ) from error
    if is_new:
        return lock
    with lock:
        logger.warning("%s was left by a process that was killed; it is removed", part)
        discard(part)
    part.mkdir()
    return _opened_lock(part / _LOCK_NAME, is_new=True)


def _opened_lock(path: Path, *, is_new: bool) -> io.FileIO:
    """Opens a lock file and locks it. A new one will do where the file system has no locks.

    Raises:
        OSError: another process holds it, it is gone, or that cannot be told.
    """
    file = io.FileIO(path, "x" if is_new else "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            raise FileNotFoundError(errno.ENOENT, "its lock was replaced", str(path))
    except OSError as error:
        if not is_new or isinstance(error, BlockingIOError):
            file.close()
            raise
    return file


def discard(path: Path) -> None:
    """Deletes a directory, or what is left of it; warns if it cannot.

    Its own writer may be deleting it too.
    """
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s could not be deleted; it holds nothing that is needed", path)


def _rename_to_new(path: Path, out: Path) -> None:
    """Renames a directory to a name that must not exist."""
    refuse_existing(out)
    try:
        path.rename(out)
    except OSError:
        refuse_existing(out)  # it came between that look and the rename
        raise


def seal(path: Path, index: Index, meta: CheckpointMeta, sums: Mapping[str, FileSum]) -> int:
    """Writes the small files beside the tensors' files, whose checksums are `sums`.

    Returns:
        The bytes of all files but the manifest.
    """
    all_sums = dict(sums)
    for name, record in {"index.json": index, "meta.json": meta}.items():
        all_sums[name] = write_synced(path / name, record.model_dump_json())
    manifest = CheckpointManifest(format=1, files=all_sums, digest=digest_of_sums(all_sums))
    write_synced(path / "manifest.json", manifest.model_dump_json(indent=1))
    sync_directory(path)
    return sum(found.num_bytes for found in all_sums.values())


def drop_cached(path: Path) -> None:
    """Asks the system to forget the files of a directory, so that reading them asks the disk.

    They must be synced. Where the system knows no such request it does nothing, and reading back
    may read memory.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Writes a directory's names to the disk (fsync): after that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, content: str | bytes) -> FileSum:
    """Writes a text or bytes to a file and to the disk (fsync); returns its size and checksum."""
    data = content.encode() if isinstance(content, str) else content
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(num_bytes=len(data), blake2b=blake2b(data))


# What stands in meta.json ------------------------------------------------------------------------


def encoded(meta: dict[str, Any]) -> str:
    """Returns the caller's values as JSON.

    Raises:
        CheckpointError: they are no JSON.
    """
    try:
        return json.dumps(meta)
    except TypeError as error:
        raise CheckpointError(
            f"meta must be JSON: {error}; tensors belong among the tensors"
        ) from error


def software_versions() -> dict[str, str]:
    """Returns by what software a checkpoint is written."""
    try:
        own = version("moebius")
    except PackageNotFoundError:
        own = "unknown"
    return {"moebius": own, "torch": torch.__version__, "python": platform.python_version()}
