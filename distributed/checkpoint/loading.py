"""Checkpoints of any layout into the tensors of this one, all or nothing, on all ranks.

Every rank checks a share of the files and reads what it needs; nothing is overwritten before all of
it fits, and nothing that a file says is executed.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from ..local_shard import LocalShard
from ..mesh import Mesh
from .format import (
    CheckpointError,
    CheckpointMeta,
    StoredCheckpoint,
    audit,
    damaged_files,
    open_checkpoint,
    refuse,
)
from .parts import ShardLoadPlanner, TensorShard, misfits
from .reading import SafeReader, dtype_name
from .together import causes, together


def check_for_all(path: Path, group: dist.ProcessGroup, *, reading: int = 0) -> CheckpointMeta:
    """Checks every byte of a checkpoint, each rank a share of the files; returns its meta.

    A collective call; an error is raised on all ranks.

    Args:
        path: the checkpoint.
        group: all ranks.
        reading: another number divides the files among the ranks in another way.

    Raises:
        CorruptCheckpointError: it is damaged; tells all that is wrong with it.
    """
    return together(group, lambda: open_share(path, group.rank() + reading, group.size()).meta)


def open_share(path: Path, part: int, parts: int) -> StoredCheckpoint:
    """Opens a checkpoint and checks that it holds everything, and the bytes of a part of its files.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    stored = open_checkpoint(path)
    share = sorted(stored.manifest.files)[part % parts :: parts]
    refuse(path, audit(stored) + damaged_files(stored, share))
    return stored


def load(
    path: Path,
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, LocalShard] = MappingProxyType({}),
    *,
    mesh: Mesh | None = None,
    check_bytes: bool = True,
    allow_unexpected: bool = False,
) -> dict[str, Any]:
    """Fills `tensors` in place from a checkpoint of any layout; returns the meta saved with it.

    `shards` has this rank's shard of each; tensors without one are whole. Without a mesh nothing
    is communicated; with one it is a collective call, and an error is raised on all ranks. Nothing
    is overwritten unless everything fits: names, shapes, dtypes, every element once, and (with
    `check_bytes`) the checksum of every file. `allow_unexpected` lets the checkpoint hold more than
    is asked for (weights without the optimizer's state).

    Safe on files of unknown origin: JSON and torch's weights_only loader are all that reads them.
    """
    group = None if mesh is None else mesh.world_group
    rank, world_size = (0, 1) if mesh is None else (mesh.rank, mesh.layout.world_size)

    def check() -> StoredCheckpoint:
        if check_bytes:
            stored = open_share(path, rank, world_size)
        else:
            stored = open_checkpoint(path)
            refuse(path, audit(stored))
        if unlike := _differences(stored, tensors, shards, allow_unexpected):
            listed = "\n  ".join(unlike)
            raise CheckpointError(f"{path} does not fit what is asked for:\n  {listed}")
        return stored

    stored = together(group, check)
    state = {
        name: TensorShard(tensor.detach(), shards[name]) if name in shards else tensor.detach()
        for name, tensor in tensors.items()
    }
    _read_into(state, stored, group)
    return stored.meta.meta


def _differences(
    stored: StoredCheckpoint,
    tensors: Mapping[str, Tensor],
    shards: Mapping[str, LocalShard],
    allow_unexpected: bool,
) -> list[str]:
    """Spells where the checkpoint and what is asked for do not fit, one text for each misfit."""
    found = stored.index.tensors
    problems = [f"missing in the checkpoint: {name}" for name in tensors if name not in found]
    if not allow_unexpected:
        problems += [
            f"in the checkpoint but not asked for: {name}" for name in found if name not in tensors
        ]
    problems += [
        text for name, shard in shards.items() for text in misfits(name, tensors[name], shard)
    ]
    for name, tensor in tensors.items():
        if name not in found:
            continue
        shape = shards[name].global_shape if name in shards else tuple(tensor.shape)
        if found[name].shape != shape:
            problems.append(
                f"{name}: shape {list(found[name].shape)} in the checkpoint, {list(shape)} here"
            )
        elif found[name].dtype != dtype_name(tensor.dtype):
            problems.append(
                f"{name}: {found[name].dtype} in the checkpoint, {dtype_name(tensor.dtype)} here"
            )
    return problems


def _read_into(
    state: dict[str, Any], stored: StoredCheckpoint, group: dist.ProcessGroup | None
) -> None:
    """Fills the tensors of `state`, each rank those that it needs.

    DCP's own collectives unpickle, so it must not know of ranks.
    """
    rank = 0 if group is None else group.rank()

    def read() -> None:
        planner = ShardLoadPlanner(flatten_state_dict=False)
        try:
            with warnings.catch_warnings():  # it warns that a world of one is one
                warnings.filterwarnings("ignore", message="torch.distributed is")
                dcp_load(state, storage_reader=SafeReader(stored), planner=planner, no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(
                f"rank {rank}: {stored.path} cannot be read: {causes(error)}"
            ) from None

    together(group, read)
