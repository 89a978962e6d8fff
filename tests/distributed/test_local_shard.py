"""What ranks hold of a tensor: together everything once, each at its place."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moebius.distributed.local_shard import Box, Held, block, held_of, hold, narrowed, whole


def gathered(shape, parts):
    """The whole tensor from every rank's (held, memory); and how often each element came."""
    out, counts = torch.full(shape, -1.0), torch.zeros(shape)
    for held, memory in parts:
        for box, view in zip(
            (box for box in held.boxes if box.is_first), held.first_boxes(memory), strict=True
        ):
            at = tuple(
                slice(start, start + size)
                for start, size in zip(box.offsets, box.sizes, strict=True)
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
        held = block(value.shape, 0, start, end - start, ranks_per_copy=ep, has_experts=True)
        memory = value[start:end]
        length = -(-memory.shape[dim] // efsdp)
        for index in range(efsdp):
            first = min(index * length, memory.shape[dim])
            count = min(length, memory.shape[dim] - first)
            share = narrowed(held, dim, first, count, ranks_per_copy=ep * efsdp)
            parts.append((share, memory.narrow(dim, first, count)))
    found, counts = gathered(value.shape, parts)
    assert torch.equal(found, value)
    assert (counts == 1).all()
    assert {held.ranks_per_copy for held, _ in parts} == {ep * efsdp}


def test_experts_in_any_order_of_slots_and_more_than_once():
    value = torch.arange(8.0).view(4, 2)
    first = Held((4, 2), (Box((3, 0), (1, 2), (0, 0)), Box((0, 0), (1, 2), (1, 0))), 2, True)
    second = Held(
        (4, 2), (Box((0, 0), (1, 2), (2, 0), is_first=False), Box((1, 0), (2, 2), (0, 0))), 2, True
    )  # expert 0 is on both
    memories = value[[3, 0]], value[[1, 2, 0]]
    found, counts = gathered(value.shape, [(first, memories[0]), (second, memories[1])])
    assert torch.equal(found, value)
    assert (counts == 1).all()
    assert torch.equal(first.boxes[0].cut(value), value[3:])
    share = narrowed(
        second, 0, 1, 2, ranks_per_copy=4
    )  # FSDP leaves this rank the last two of its three slots
    assert [(box.offsets[0], box.sizes[0], box.local[0], box.is_first) for box in share.boxes] == [
        (0, 1, 1, False),
        (2, 1, 0, True),
    ]


def test_a_parameter_without_a_note_is_whole():
    parameter = torch.nn.Parameter(torch.zeros(3, 2))
    assert held_of(parameter) == whole((3, 2))
    assert held_of(parameter).copy_of(5) == 5
    hold(parameter, block((6, 2), 0, 3, 3, ranks_per_copy=2, has_experts=True))
    assert held_of(parameter).copy_of(5) == 2
