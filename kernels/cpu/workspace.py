"""Memory for rows that live within one call: on CPUs reused from call to call, grown where needed.

The first touch of a fresh page costs ten times what writing to a known one does, and a call's rows
are tens of megabytes. A GPU's allocator reuses what it was given back, so there it is an ordinary
allocation.
"""

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

_held = threading.local()  # ranks may be threads


def workspace(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Returns uninitialised memory of that shape, in the dtype and on the device of `like`.

    The next call with that name gets the same memory.
    """
    if like.device.type != "cpu":
        return like.new_empty(shape)
    held: dict[str, Tensor] = _held.__dict__
    size = math.prod(shape) * like.element_size()
    block = held.get(name)
    if block is None or block.numel() < size:
        held.pop(name, None)
        block = held[name] = torch.empty(size, dtype=torch.uint8)
    return block[:size].view(like.dtype).view(*shape)
