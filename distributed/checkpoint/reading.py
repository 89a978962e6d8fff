"""The bytes of a checkpoint's tensors, read without executing anything that stands in them."""

import io
import itertools
import os
import pickle
import struct

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from .format import Chunk, CorruptCheckpointError, StoredCheckpoint, StoredTensor

# What torch.load raises on bytes that are no tensor: from its zip reader, its unpickler, and what
# calls those with nonsense.
_DECODING_ERRORS = (
    RuntimeError,
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    OverflowError,
)


def read_tensor(stored: StoredCheckpoint, name: str) -> Tensor:
    """Reads one whole tensor, to the CPU, chunk by chunk."""
    tensor = stored.index.tensors[name]
    if [chunk.sizes for chunk in tensor.chunks] == [tensor.shape]:
        return _read_chunk(stored, name, tensor.chunks[0]).contiguous()
    whole = torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype))
    for chunk in tensor.chunks:
        part = whole
        for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            part = part.narrow(dim, start, size)
        part.copy_(_read_chunk(stored, name, chunk))
    return whole


def _read_chunk(stored: StoredCheckpoint, name: str, chunk: Chunk) -> Tensor:
    path, dtype = stored.path / chunk.file, dtype_named(stored.index.tensors[name].dtype)
    try:
        with open(path, "rb") as file:
            file.seek(chunk.start)
            data = file.read(chunk.length)
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) != chunk.length:
        raise CorruptCheckpointError(
            f"{path} at byte {chunk.start}: has {len(data)} of the {chunk.length} bytes that "
            "index.json promises"
        )
    try:
        tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except _DECODING_ERRORS as error:
        # torch has no error of its own for that; the file may well be whole
        if "can't allocate memory" in str(error):
            raise
        raise CorruptCheckpointError(
            f"{path} at byte {chunk.start}: holds no tensor ({error})"
        ) from error
    expected = (chunk.sizes, dtype)
    if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != expected:
        raise CorruptCheckpointError(
            f"{path} at byte {chunk.start}: not the tensor that index.json promises"
        )
    return tensor


class SafeReader(StorageReader):
    """A reader for DCP that can execute nothing.

    It reads index.json instead of the pickle `.metadata`, and tensors with weights_only.
    """

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored
        self.checkpoint_id = str(stored.path)
        self._chunks = {
            MetadataIndex(name, chunk.offsets): chunk
            for name, tensor in stored.index.tensors.items()
            for chunk in tensor.chunks
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: one object reads one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accepts everything: the checkpoint was opened before."""
        return True

    def read_metadata(self) -> Metadata:
        """Returns the index, as DCP describes it."""
        return Metadata(
            {name: storage_metadata(tensor) for name, tensor in self._stored.index.tensors.items()}
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Does nothing: the index is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keeps the plan of this rank as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Keeps the plans of all ranks as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads what the plan asks for, in the order of the files, each chunk once."""
        items = sorted(plan.items, key=lambda item: self._place(item.storage_index))
        for index, wanted in itertools.groupby(items, key=lambda item: item.storage_index):
            # Once: moved experts are many slices of one chunk.
            chunk = _read_chunk(self._stored, index.fqn, self._chunks[index])
            for item in wanted:
                part = chunk
                for dim, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    part = part.narrow(dim, start, length)
                target = planner.resolve_tensor(item)
                target.copy_(part)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, index: MetadataIndex) -> tuple[str, int]:
        return self._chunks[index].file, self._chunks[index].start


def storage_metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    """Describes a stored tensor in DCP's words."""
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
        for chunk in tensor.chunks
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype_named(tensor.dtype)), torch.Size(tensor.shape), chunks
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a type as index.json spells it: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Returns the type that index.json spells "float32"."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"index.json: {name!r} is no dtype")
    return dtype
