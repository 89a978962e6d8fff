"""Writes a checkpoint of tensors in memory: one process, no process group.

For what no run has written, weights that come from elsewhere: any layout loads it like any other.
One tensor at a time is asked for, so that a state need not exist all at once.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from ..layout import MeshConfig, plan_layout
from .format import (
    CheckpointError,
    CheckpointMeta,
    Chunk,
    StoredTensor,
    audit,
    damaged_files,
    open_checkpoint,
    refuse_name_of_another_step,
)
from .reading import dtype_name, storage_metadata
from .writing import SummingWriter, atomic_directory, seal, software_versions

_FILE = "__0_0.distcp"


def write_checkpoint(
    out: Path,
    tensors: Mapping[str, Callable[[], Tensor]],
    *,
    step: int,
    num_experts: Mapping[str, int],
    meta: dict[str, Any],
) -> CheckpointMeta:
    """Writes the checkpoint of a step as one rank would, reads it back, and calls it `out`.

    Args:
        out: appears whole or not at all.
        tensors: by their names in a checkpoint; each is made when it is written.
        step: optimizer steps done.
        num_experts: of the tensors that have experts.
        meta: the caller's; JSON.

    Raises:
        CheckpointError: `out` exists or is called as another step's, or the disk is full or unsound.
    """
    refuse_name_of_another_step(out, step)
    with atomic_directory(out, needed_bytes=0) as temporary:
        writer = SummingWriter(temporary)
        writer.set_up_storage_writer(is_coordinator=True)
        stored, results = _write(tensors, writer, temporary / _FILE)
        writer.finish(Metadata({k: storage_metadata(v) for k, v in stored.items()}), [results])
        layout = plan_layout(MeshConfig(), 1)
        written = CheckpointMeta(
            step=step,
            generation=0,
            layout=layout,
            num_experts=dict(num_experts),
            versions=software_versions(),
            meta=meta,
        )
        seal(temporary, writer.index, written, writer.files.sums)
        found = open_checkpoint(temporary)
        if problems := audit(found) + damaged_files(found, sorted(found.manifest.files)):
            listed = "\n  ".join(problems)
            raise CheckpointError(
                f"{out} does not read as it was written; is the disk sound? Nothing was left of "
                f"it:\n  {listed}"
            )
    return written


def _write(
    tensors: Mapping[str, Callable[[], Tensor]], writer: SummingWriter, file: Path
) -> tuple[dict[str, StoredTensor], list[WriteResult]]:
    """Writes all tensors into one file; returns what they are, and where each one is."""
    stored: dict[str, StoredTensor] = {}
    results: list[WriteResult] = []
    with writer.files.create_stream(file, "wb") as opened:
        stream: Any = opened
        for name, make in tensors.items():
            tensor = make().detach().contiguous()
            start = stream.tell()
            torch.save(tensor.clone(), stream)  # a view would bring its whole storage along
            length = stream.tell() - start
            offsets = (0,) * tensor.ndim
            whole = Chunk(
                offsets=offsets,
                sizes=tuple(tensor.shape),
                file=file.name,
                start=start,
                length=length,
            )
            stored[name] = StoredTensor(
                dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), chunks=[whole]
            )
            place = _StorageInfo(file.name, start, length)
            index = MetadataIndex(name, torch.Size(offsets))
            results.append(WriteResult(index, length, place))
        stream.flush()
        os.fsync(stream.fileno())
    return stored, results
