"""What ranks tell each other beside tensors: plain values, as JSON in byte tensors of checked sizes.

torch's own collectives of objects unpickle what comes, so whoever gets into a process group can run
code on its ranks. JSON can only be a value. Every rank first tells the size of its text; one that
is beyond the bound is an error before memory is taken for it.

Cost: two collectives, of 8 bytes and of the longest text (padded) per rank.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MAX_BYTES = 256 << 20  # of one rank's text; the largest in use are lists of a checkpoint's chunks


def all_gather_json(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the plain value that each rank of `group` gave, by rank. A collective call.

    Args:
        value: what JSON can say; tuples come back as lists.
        group: with a backend for CPU tensors.

    Raises:
        ValueError: a rank's text is larger than `MAX_BYTES`, or is no JSON; on every rank alike.
    """
    text = _encoded(value)
    sizes = _all_sizes(text, group)
    texts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, _padded(text, max(sizes)), group=group)
    return _decoded(texts, sizes)


def gather_json(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """Returns what each rank of `group` gave, by rank, on the group's first rank; None on others.

    A collective call. Args and errors as of `all_gather_json`; what is no JSON is found on the
    first rank alone.
    """
    text = _encoded(value)
    sizes = _all_sizes(text, group)
    texts = None
    if group.rank() == 0:
        texts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
    dist.gather(_padded(text, max(sizes)), texts, group=group, group_dst=0)
    return None if texts is None else _decoded(texts, sizes)


def _all_sizes(text: Tensor, group: dist.ProcessGroup) -> list[int]:
    """Returns the length of every rank's text, none beyond the bound."""
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([text.numel()]), group=group)
    lengths = [int(size) for size in sizes]
    for rank, length in enumerate(lengths):
        if not 0 < length <= MAX_BYTES:
            raise ValueError(
                f"rank {rank} of group {group.group_desc!r} announced a message of {length} bytes; "
                f"between 1 and {MAX_BYTES} are taken"
            )
    return lengths


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _padded(text: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(text, (0, length - text.numel()))


def _decoded(texts: list[Tensor], sizes: list[int]) -> list[Any]:
    pairs = zip(texts, sizes, strict=True)
    return [json.loads(text[:size].numpy().tobytes()) for text, size in pairs]
