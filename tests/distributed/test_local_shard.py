"""The ranks' shards of a tensor together hold every element once, at its place."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moebius.distributed.local_shard import (
    block_shard,
    narrowed_shard,
)


def gathered(shape, parts):
    """The whole tensor from every rank's (held, memory); and how often each element came."""
    out, counts = torch.full(shape, -1.0), torch.zeros(shape)
    for shard, memory in parts:
        for slice_, view in zip(
            (slice_ for slice_ in shard.slices if slice_.is_first),
            shard.first_views(memory),
            strict=True,
        ):
            at = tuple(
                slice(start, start + size)
                for start, size in zip(slice_.offsets, slice_.sizes, strict=True)
            )
            out[at] = view
            counts[at] += 1
    return out, counts


@given(
    experts=st.integers(1, 9),
    rows=st.integers(1, 9),
    ep=st.integers(1, 4),
    efsdp=st.integers(1, 4),
    dim=st.integers(0, 1),
)
def test_blocks_of_experts_cut_again_along_any_dim_are_everything_once(
    experts, rows, ep, efsdp, dim
):
    value = torch.arange(float(experts * rows * 2)).view(experts, rows, 2)
    parts = []
    for place in range(ep):
        start, end = place * experts // ep, (place + 1) * experts // ep
        shard = block_shard(value.shape, 0, start, end - start, ranks_per_copy=ep, has_experts=True)
        memory = value[start:end]
        length = -(-memory.shape[dim] // efsdp)
        for index in range(efsdp):
            first = min(index * length, memory.shape[dim])
            count = min(length, memory.shape[dim] - first)
            share = narrowed_shard(shard, dim, first, count, ranks_per_copy=ep * efsdp)
            parts.append((share, memory.narrow(dim, first, count)))
    found, counts = gathered(value.shape, parts)
    assert torch.equal(found, value)
    assert (counts == 1).all()
    assert {shard.ranks_per_copy for shard, _ in parts} == {ep * efsdp}
