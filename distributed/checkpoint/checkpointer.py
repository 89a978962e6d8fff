"""Saves checkpoints in the background and commits each with one rename; any layout can read them.

A checkpoint is a torch.distributed.checkpoint directory with global names and whole shapes, experts
as [E, ...]; format.py describes its files. A `LocalShard` (local_shard.py) describes which part of a
tensor a rank stores.

Saving:
  1. the ranks compare their tensors' names, shapes and dtypes;
  2. each rank copies its part into persistent buffers: training waits only for this;
  3. in a thread, over their own process group, the ranks write `step_00000050.g3.tmp` and compute
     checksums;
  4. rank 0 checks that its generation is still current, and renames the directory;
  5. rank 0 deletes old checkpoints.
If anything fails on any rank, the temporary directory is deleted, earlier checkpoints stay, and all
ranks raise the same error at the next `save` or `wait`.

Cost: one copy of each tensor is staged and written. A rank stages about 1/world of the dense state and
1/replicas of its experts, once in memory and once per save.
"""

import heapq
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..local_shard import LocalShard, whole_shard
from ..mesh import Mesh
from ..process.json_messages import gather_json
from ..process.process import Process
from .checkpoint_folder import (
    CheckpointConfig,
    CheckpointFolder,
    DamagedCheckpoint,
    discard,
    publish,
)
from .format import (
    CheckpointError,
    CheckpointMeta,
    CorruptCheckpointError,
    FileSum,
    Index,
    SaveFailedError,
    StaleGenerationError,
    blake2b,
    step_name,
    without_advice,
)
from .loading import dtype_name, open_share
from .recovery import WholeCheckpoint, newest_whole
from .second_copy import CopyRecord, SecondCopy
from .together import causes, gathered, together
from .writing import drop_cached, merged, seal, software_versions, write_tensors

logger = logging.getLogger(__name__)
T = TypeVar("T")

# How long a rank may wait for another's disk; a dead rank is noticed at once.
_WRITE_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class SaveRecord:
    """The outcome of one save."""

    step: int
    path: Path
    seconds: float  # from the call of `save` to the commit
    blocked_s: float  # the duration of `save`, for which training waited
    verify_s: float  # the part of `seconds` spent reading back
    num_bytes: int  # of all ranks
    error: str | None


# Saving -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """One save, ready to be written."""

    step: int
    # this rank's part in the staging buffers
    tensors: list[tuple[str, Tensor, LocalShard]]
    num_experts: dict[str, int]
    meta: dict[str, Any]
    started_s: float  # time.monotonic() when `save` was called
    blocked_s: float


# name -> global shape, dtype, ranks per copy, experts?
Signature = dict[str, tuple[tuple[int, ...], str, int, bool]]


class Checkpointer:
    """Saves checkpoints of one run in the background, one at a time. Its creation is collective.

    Call `wait` before the process ends.

    Args:
        directory: the folder of checkpoints; unfinished ones of dead generations are removed.
        config: which ones stay, and what a failed save means.
        mesh: the ranks.
        process: this rank.
        generation: this process's generation.
        generation_file: the supervisor's fence; if it exists, only the generation in it commits.
        second: receives a copy of each checkpoint.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        *,
        mesh: Mesh,
        process: Process,
        generation: int,
        generation_file: Path | None,
        second: SecondCopy | None = None,
    ) -> None:
        self._folder = CheckpointFolder(directory, config, generation, generation_file)
        self._on_failure = config.on_failure
        self._second = second
        self._rank = process.rank
        self._device = process.device
        self._layout = mesh.layout
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._records: deque[SaveRecord] = deque()
        timeout = timedelta(seconds=max(process.timeout_s, _WRITE_TIMEOUT_S))
        # apart from training's own collectives, and on the CPU
        group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")
        assert isinstance(group, dist.ProcessGroup), "a group of all ranks has this rank in it"
        self._group = group
        self.on_rank_0(self._prepare)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        shards: Mapping[str, LocalShard],
        meta: dict[str, Any],
    ) -> None:
        """Copies `tensors` and writes the copy in the background. Collective.

        Waits for the previous save and raises its error. All ranks must give the same names.

        Args:
            step: optimizer steps done.
            tensors: this rank's tensors by name.
            shards: this rank's shards; tensors without one are whole and the same on every rank.
            meta: JSON values; rank 0's are saved.
        """
        started_s = time.monotonic()
        self._join()
        if isinstance(self._failure, StaleGenerationError):
            raise self._failure
        if self._failure is not None and self._on_failure == "stop":
            self._failure, failure = None, self._failure
            raise SaveFailedError(str(failure)) from failure
        signature, encoded_meta = together(
            self._group, lambda: (_signature(tensors, shards), json.dumps(meta))
        )
        self._compare(signature)
        job = _Job(
            step=step,
            tensors=self._stage(signature, tensors, shards),
            num_experts={
                name: shape[0]
                for name, (shape, *_, has_experts) in signature.items()
                if has_experts
            },
            meta=json.loads(encoded_meta),
            started_s=started_s,
            blocked_s=time.monotonic() - started_s,
        )
        self._thread = threading.Thread(
            target=self._run, args=(job,), name=f"checkpoint-{step}", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits for the pending save.

        Raises:
            CheckpointError: the last save failed; raised once, on every rank.
        """
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def must_stop(self) -> bool:
        """Returns whether the next `save` will raise a failed save's error; ranks may differ for a while."""
        return self._failure is not None and self._on_failure == "stop"

    def newest_whole(self) -> WholeCheckpoint | None:
        """Returns the checkpoint to resume from (recovery.py), after the pending save. Collective."""
        self._join()
        return newest_whole(self._folder.path, self._group, self._second)

    def adopt(self, found: WholeCheckpoint) -> list[DamagedCheckpoint]:
        """Sets damaged checkpoints aside and publishes a fetched one. Collective.

        Returns:
            The damaged checkpoints, on rank 0 with their new paths.
        """
        renamed = list(found.damaged)

        def rename() -> None:
            renamed[:] = self._folder.set_aside(found.damaged)
            if found.fetched_for is not None:
                publish(found.path, found.fetched_for)

        self.on_rank_0(rename)
        return renamed

    def wait_for_copies(self, timeout_s: float) -> None:
        """Waits on rank 0 for the copies to the second place; never raises."""
        if self._second:
            self._second.wait(timeout_s)

    def poll_copies(self) -> list[CopyRecord]:
        """Returns the copies that ended since the last call."""
        return self._second.poll() if self._second else []

    def _prepare(self) -> None:
        self._folder.prepare()
        if self._second:
            self._second.claim()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def poll(self) -> list[SaveRecord]:
        """Returns the saves that ended since the last call, failed ones included; never waits."""
        return [self._records.popleft() for _ in range(len(self._records))]

    def _stage(
        self, signature: Signature, tensors: Mapping[str, Tensor], shards: Mapping[str, LocalShard]
    ) -> list[tuple[str, Tensor, LocalShard]]:
        """Copies the tensors that this rank writes into its buffers and returns these."""
        owners = owners_of(signature, self._layout.world_size)
        mine = [
            name
            for name, (_, _, ranks_per_copy, _) in signature.items()
            if owners[name] == self._rank // ranks_per_copy
        ]
        for name in mine:
            source, buffer = tensors[name].detach(), self._buffers.get(name)
            if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
                buffer = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(source, non_blocking=True)
        if any(tensors[name].is_cuda for name in mine):
            torch.cuda.current_stream().synchronize()
        buffers = [(name, self._buffers[name]) for name in mine]
        return [(name, each, shards.get(name) or whole_shard(each.shape)) for name, each in buffers]

    def _compare(self, signature: Signature) -> None:
        """Checks that all ranks hold the same names, shapes and dtypes, first by checksum. Collective."""
        digest = blake2b(json.dumps(signature, sort_keys=True).encode())
        if len(set(gathered(self._group, lambda: digest))) == 1:
            return
        first, *others = gathered(self._group, lambda: signature)
        for rank, other in enumerate(others, start=1):
            unlike = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            if unlike:
                raise CheckpointError(
                    f"ranks hold different tensors: {unlike[0]!r} is "
                    f"{first.get(unlike[0], 'absent')} on rank 0 and "
                    f"{other.get(unlike[0], 'absent')} on rank {rank} ({len(unlike)} differ in "
                    "all); every rank must save the same names, shapes and dtypes"
                )

    # In the background ---------------------------------------------------------------------------

    def _run(self, job: _Job) -> None:
        """Writes and commits one save, in a thread, and records the outcome."""
        final = self._folder.path / step_name(job.step)
        temporary = final.with_name(f"{final.name}.g{self._folder.generation}.tmp")
        num_bytes, verify_s, error, failure = 0, 0.0, None, None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a new thread starts on GPU 0
        try:
            num_bytes = self._write(job, temporary)
            verify_s = self._read_back(temporary)
            self.on_rank_0(lambda: self._commit(job.step, temporary, final))
        except Exception as cause:  # noqa: BLE001 - `wait` raises it
            kind = type(cause) if isinstance(cause, CheckpointError) else CheckpointError
            error = (
                f"the checkpoint of step {job.step} was not saved: {causes(cause)}; "
                f"{self._folder.what_remains()}"
            )
            failure = kind(error)
            if self._rank == 0:
                discard(temporary)
                logger.error("%s", error)
        self._failure = failure
        seconds = time.monotonic() - job.started_s
        self._records.append(
            SaveRecord(job.step, final, seconds, job.blocked_s, verify_s, num_bytes, error)
        )

    def _write(self, job: _Job, temporary: Path) -> int:
        """Writes this rank's part, and on rank 0 the small files; returns the checkpoint's bytes."""
        self.on_rank_0(lambda: self._folder.make_temporary(temporary))
        file = temporary / f"__{self._rank}_0.distcp"

        def write() -> tuple[Index, FileSum]:
            try:
                return write_tensors(file, job.tensors)
            except Exception as error:
                raise CheckpointError(f"rank {self._rank}: {causes(error)}") from error

        index, file_sum = together(self._group, write)
        written = {"file": file.name, "index": index.model_dump(), "sum": file_sum.model_dump()}
        by_rank = gather_json(written, self._group)

        def describe() -> int:
            assert by_rank is not None, "gathered on rank 0"
            sums = {each["file"]: FileSum(**each["sum"]) for each in by_rank}
            index = merged(Index.model_validate(each["index"]) for each in by_rank)
            return self._seal(job, temporary, index, sums)

        return self.on_rank_0(describe) or 0

    def _seal(self, job: _Job, temporary: Path, index: Index, sums: dict[str, FileSum]) -> int:
        """Writes the small files on rank 0; returns the checkpoint's bytes."""
        files = {name: temporary / name for name in sums}
        if unseen := [
            name
            for name, file in files.items()
            if not (file.is_file() and file.stat().st_size == sums[name].num_bytes)
        ]:
            raise CheckpointError(
                f"rank 0 does not see {unseen[0]} ({len(unseen)} such files) as its rank wrote it: the run folder "
                "must be the same shared folder on all nodes"
            )
        meta = CheckpointMeta(
            step=job.step,
            generation=self._folder.generation,
            layout=self._layout,
            num_experts=job.num_experts,
            versions=software_versions(),
            meta=job.meta,
        )
        return seal(temporary, index, meta, sums)

    def _read_back(self, temporary: Path) -> float:
        """Verifies on the disk what the next rank has written; returns the seconds taken.

        Raises:
            CheckpointError: on all ranks: a byte differs from what was written.
        """
        started_s = time.monotonic()

        def check() -> None:
            drop_cached(temporary)
            try:
                open_share(temporary, self._rank + 1, self._layout.world_size)
            except CorruptCheckpointError as error:
                raise CheckpointError(
                    "it reads back differently from what was written; is the disk faulty? "
                    + without_advice(str(error))
                ) from error

        together(self._group, check)
        return time.monotonic() - started_s

    def _commit(self, step: int, temporary: Path, final: Path) -> None:
        """Publishes a checkpoint on rank 0 and deletes old ones."""
        self._folder.refuse_if_stale()
        publish(temporary, final)
        if self._second:
            self._second.copy_later(final)
        self._folder.delete_old(step, spare=self._second.reading if self._second else None)

    def on_rank_0(self, act: Callable[[], T]) -> T | None:
        """Calls `act` on rank 0; all ranks get its result or error. Collective."""
        return gathered(self._group, lambda: act() if self._rank == 0 else None)[0]


def owners_of(signature: Signature, world_size: int) -> dict[str, int]:
    """Returns which copy of every tensor is written, the same on every rank.

    Assigns the largest tensors first, to the ranks with the least bytes so far. Tensors with more
    ranks per copy come before all others, so that the ranks of a smaller copy have equal loads. For
    10,240 ranks and 1,000 tensors it takes 30 ms per save.
    """
    owners: dict[str, int] = {}
    sizes = {name: _num_bytes(shape, dtype) for name, (shape, dtype, *_) in signature.items()}
    least = [(0.0, 0)]  # a heap of every copy's load per rank, and its first rank
    before = world_size
    for name in sorted(signature, key=lambda name: (-signature[name][2], -sizes[name], name)):
        ranks_per_copy = signature[name][2]
        if ranks_per_copy != before:
            least = [
                (load, rank)
                for load, first in least
                for rank in range(first, first + before, ranks_per_copy)
            ]
            heapq.heapify(least)
            before = ranks_per_copy
        load, first = least[0]
        heapq.heapreplace(least, (load + sizes[name] / ranks_per_copy, first))
        owners[name] = first // ranks_per_copy
    return owners


def _signature(tensors: Mapping[str, Tensor], shards: Mapping[str, LocalShard]) -> Signature:
    signature: Signature = {}
    for name, tensor in tensors.items():
        part = shards.get(name) or whole_shard(tensor.shape)
        dtype = dtype_name(tensor.dtype)
        signature[name] = (part.global_shape, dtype, part.ranks_per_copy, part.has_experts)
    return signature


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * getattr(torch, dtype).itemsize
