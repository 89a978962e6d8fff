"""Measures memory: what autograd keeps for the backward pass, and the peak of a piece of work."""

import ctypes
import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # of proc(5): the peak of resident memory becomes what is resident now


def saved_bytes(forward: Callable[[], Tensor], *, beside: Iterable[Tensor]) -> tuple[Tensor, int]:
    """Returns the result, and the bytes of all storages saved for the backward pass, each counted
    once.

    Args:
        beside: tensors whose storages do not count, such as weights.
    """
    ignored = {tensor.untyped_storage().data_ptr() for tensor in beside} | {0}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(kept.values())


def peak_bytes(work: Callable[[], Any], device: torch.device) -> int | None:
    """Returns the most memory that `work` needed on top of what was in use; None if unreadable.

    On a GPU this is torch's allocated memory. On a CPU it is the process's resident memory,
    including libraries' own; freed memory is returned to the system first, as it would hide new
    use. Exact to some MiB.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not _can_reset():
        work()
        return None
    before = _resident("VmRSS")
    work()
    return max(0, _resident("VmHWM") - before)


def _can_reset() -> bool:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def _resident(name: str) -> int:
    [line] = (line for line in _STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
