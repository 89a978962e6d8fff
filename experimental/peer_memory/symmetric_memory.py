"""Memory of a device that the devices of a group read, as torch's symmetric memory gives it.

For GPUs that reach each other's memory (NVLink). It has never run on one: written against torch
2.11 to 2.13, and what stands above it is tested with files that processes share
(tests/shared_files.py).
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class PeerMemory(Protocol):
    """Equally long memory of every rank of a group, which all of them can read."""

    @property
    def memories(self) -> list[Tensor]:
        """Returns every rank's as this one sees it, uint8."""
        ...

    @property
    def address_P(self) -> Tensor:
        """Returns where they are, int64, on the device."""
        ...

    def meet(self) -> None:
        """Lets everything that any rank wrote before be seen by all after. In the order of the
        device's stream; the host need not wait.
        """
        ...


class SymmetricMemory:
    """Torch's, for CUDA."""

    def __init__(
        self, num_bytes: int, group: dist.ProcessGroup, device: torch.device, timeout_s: float
    ) -> None:
        from torch.distributed import _symmetric_memory

        # What the others still read from memory that this replaces must be read before they let go
        # of it, which they do after the rendezvous.
        torch.cuda.synchronize(device)
        own = _symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        self._handle = _symmetric_memory.rendezvous(own, group)
        self._timeout_ms = int(timeout_s * 1000)
        self.memories: list[Tensor] = [
            self._handle.get_buffer(rank, (num_bytes,), torch.uint8)
            for rank in range(self._handle.world_size)
        ]
        addresses = [memory.data_ptr() for memory in self.memories]
        self.address_P = torch.tensor(addresses, dtype=torch.int64, device=device)

    def meet(self) -> None:
        """Meets on the device: a rank that does not come within the time aborts the kernel."""
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)
