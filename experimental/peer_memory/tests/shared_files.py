"""Files that processes of one machine share, in place of memory that GPUs read of each other."""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from experimental.peer_memory.peer_outbox import PeerOutbox
from moebius.distributed.dispatch.exchange import gathered


class SharedFiles:
    """Memory of every rank of a group, poisoned; to meet is a barrier."""

    def __init__(self, num_bytes: int, group: dist.ProcessGroup) -> None:
        number = int.from_bytes(os.urandom(6))
        names = gathered(torch.tensor([number]), group).flatten().tolist()
        paths = [Path(tempfile.gettempdir()) / f"moebius-peers-{name:x}" for name in names]
        own = paths[group.rank()]
        own.write_bytes(b"\xff" * num_bytes)
        self._group = group
        self.meet()
        self.memories: list[Tensor] = [
            torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
            for path in paths
        ]
        self.meet()
        own.unlink()
        self.address_P = torch.tensor([memory.data_ptr() for memory in self.memories])

    def meet(self) -> None:
        """Waits for all ranks."""
        dist.barrier(self._group)


def open_files(group: dist.ProcessGroup, *, row_bytes: int = 1 << 20) -> PeerOutbox:
    """Returns this rank's messages through files. Collective."""
    return PeerOutbox(
        lambda num_bytes: SharedFiles(num_bytes, group),
        dist.get_process_group_ranks(group),
        group.rank(),
        routes=4,
        row_bytes=row_bytes,
    )


def to_nearest(rows_MD: Tensor, by_row_M: Tensor, first_U: Tensor) -> Tensor:
    """Sums as GPUs have them: in float32, rounded to nearest, ties to even. On CPUs `embedding_bag`
    rounds ties of bfloat16 upwards.
    """
    last_U = torch.cat((first_U[1:], first_U.new_tensor([len(by_row_M)])))
    row_M = torch.arange(len(first_U)).repeat_interleave(last_U - first_U)
    wide = torch.float64 if rows_MD.dtype is torch.float64 else torch.float32
    sums_UD = torch.zeros(len(first_U), rows_MD.shape[1], dtype=wide)
    return sums_UD.index_add_(0, row_M, rows_MD[by_row_M].to(wide)).to(rows_MD.dtype)
