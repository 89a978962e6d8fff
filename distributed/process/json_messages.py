"""Exchanges plain values between ranks as JSON in byte tensors of checked sizes.

torch's object collectives unpickle what they receive, so anyone in a process group could run code on
its ranks. Every rank first announces the size of its text; an oversized one is refused before memory
is allocated.

Cost: two collectives, of 8 bytes and of the longest text (padded) per rank.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MAX_BYTES = 256 << 20  # of one rank's text; the largest are lists of a checkpoint's chunks


def all_gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns every rank's value, by rank. Collective.

    Args:
        value: a JSON value; tuples arrive as lists.
        group: a group with a backend for CPU tensors.

    Raises:
        ValueError: on every rank: a text is larger than `MAX_BYTES`, or not JSON.
    """
    text = _encoded(value)
    sizes = _all_sizes(text, group)
    texts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, _padded(text, max(sizes)), group=group)
    return _decoded(texts, sizes)


def gather_json(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """Returns every rank's value on the group's first rank, None on others. Collective.

    Arguments and errors are those of `all_gather_json`, but only the first rank detects invalid JSON.
    """
    text = _encoded(value)
    sizes = _all_sizes(text, group)
    texts = None
    if group.rank() == 0:
        texts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
    dist.gather(_padded(text, max(sizes)), texts, group=group, group_dst=0)
    return None if texts is None else _decoded(texts, sizes)


def _all_sizes(text: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Returns the length of every rank's text, after checking the bound."""
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([text.numel()]), group=group)
    lengths = [int(size) for size in sizes]
    for rank, length in enumerate(lengths):
        if not 0 < length <= MAX_BYTES:
            raise ValueError(
                f"rank {rank} of group {group.group_desc!r} announced a message of {length} bytes; "
                f"messages must have 1 to {MAX_BYTES}"
            )
    return lengths


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _padded(text: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(text, (0, length - text.numel()))


def _decoded(texts: list[Tensor], sizes: list[int]) -> list[Any]:
    pairs = zip(texts, sizes, strict=True)
    return [json.loads(text[:size].numpy().tobytes()) for text, size in pairs]
