"""Route lists over ranks, and their expected sends, computed by loops over Python numbers."""

from dataclasses import replace

import torch
from torch import Tensor

from moebius.kernels.calls import Addresses, PackedSends, RowPairs, SendCounts
from moebius.kernels.sends import UnpackedSends

# Tokens, source rows and target rows of a token, routes of a token, experts, ranks.
CASES = {
    "tokens": (40, 1, 1, 3, 8, 4),
    "into heads": (30, 1, 4, 8, 12, 3),
    "from heads": (30, 4, 1, 8, 12, 3),
    "more than a block": (700, 1, 1, 2, 16, 5),
    "one rank": (9, 1, 1, 2, 4, 1),
    "one token": (1, 1, 1, 1, 3, 3),
    "more ranks than tokens": (2, 1, 2, 2, 3, 15),
    "no token": (0, 1, 1, 2, 4, 2),
}
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


def addresses(name: str, *, shuffled: bool = False) -> Addresses:
    """Returns the routes of a case; `shuffled` reorders them and drops a third."""
    tokens, sources, targets, per_token, experts, ranks = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    token_N = torch.arange(tokens).repeat_interleave(per_token)
    row_N = torch.arange(per_token).repeat(tokens)
    # Most routes go to few experts, so that some ranks get none.
    expert_N = (torch.rand(len(token_N), generator=generator) ** 2 * experts).long()
    source_N = token_N * sources + row_N * sources // per_token
    target_N = token_N * targets + row_N * targets // per_token
    into_sources = sources == targets
    if shuffled:
        index_n = torch.randperm(len(token_N), generator=generator)[: len(token_N) * 2 // 3]
        source_N, target_N, expert_N = source_N[index_n], target_N[index_n], expert_N[index_n]
    return Addresses(
        source_N,
        source_N if into_sources else target_N,
        expert_N,
        torch.randint(0, ranks, (experts,), generator=generator).int(),
        torch.arange(experts).int() % 7,
        tokens * sources,
        tokens * targets,
        ranks,
        into_sources=into_sources,
    )


def weights(to: Addresses, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a gate weight for every route, a NaN among them."""
    weight_N = torch.rand(len(to.expert_N), generator=torch.Generator().manual_seed(1), dtype=dtype)
    weight_N[:1] = torch.nan
    return weight_N


def check_sends(to: Addresses, counts: SendCounts, packed: PackedSends, weight_N: Tensor) -> None:
    """Compares what was counted and written down with loops over the routes."""
    source, target, expert, rank, slot = (
        each.tolist() for each in (to.source_N, to.target_N, to.expert_N, to.rank_E, to.slot_E)
    )
    destination = [rank[each] for each in expert]
    routes = [[n for n, v in enumerate(destination) if v == own] for own in range(to.num_ranks)]
    rows = [sorted({source[n] for n in own}) for own in routes]
    targets = [sorted({target[n] for n in own}) for own in routes]
    assert counts.counts_P3.dtype is torch.int64
    assert counts.counts_P3.T.tolist() == [[*map(len, each)] for each in (rows, routes, targets)]
    assert counts.destination_N.tolist() == destination

    order = [n for own in routes for n in own]
    assert packed.place_N.tolist() == [order.index(n) for n in range(len(source))]
    numbers_N4 = packed.metadata_N4.view(_INTEGER[weight_N.dtype])
    assert numbers_N4[:, :3].tolist() == [
        [
            slot[expert[n]],
            rows[destination[n]].index(source[n]),
            targets[destination[n]].index(target[n]),
        ]
        for n in order
    ]
    assert torch.equal(numbers_N4[:, 3], weight_N.view(numbers_N4.dtype)[order])
    _check_pairs(packed.sources, rows, to.num_sources)
    assert (packed.targets is None) == to.into_sources
    _check_pairs(packed.targets or packed.sources, targets, to.num_targets)


def check_received(came: UnpackedSends, metadata_R4: Tensor, received_P3: Tensor) -> None:
    """Compares what was read with a loop over the sources."""
    integers = metadata_R4.view(_INTEGER[metadata_R4.dtype]).tolist()
    wanted, first_row, first_target = list[tuple[int, int, int]](), 0, 0
    for rows, routes, targets in received_P3.tolist():
        for slot, row, target, _ in integers[len(wanted) : len(wanted) + routes]:
            wanted.append((first_row + row, slot, first_target + target))
        first_row, first_target = first_row + rows, first_target + targets
    found = zip(came.source_R.tolist(), came.slot_R.tolist(), came.target_R.tolist(), strict=True)
    assert list(found) == wanted
    torch.testing.assert_close(came.weight_R, metadata_R4[:, 3], rtol=0, atol=0, equal_nan=True)


def with_wrong(to: Addresses, what: str) -> Addresses:
    """Returns the same routes with a fifth route out of range."""
    wrong_N = getattr(to, what).clone()
    wrong_N[4] = 10**6 if what == "expert_N" else -1
    return replace(to, **{what: wrong_N}, into_sources=False)


def _check_pairs(pairs: RowPairs, rows: list[list[int]], num_rows: int) -> None:
    """Compares with the rows that go to each rank."""
    listed = [(v, u) for v, own in enumerate(rows) for u in own]
    pairs = pairs.first(len(listed))
    by_row = sorted(range(len(listed)), key=lambda i: listed[i][::-1])
    assert pairs.row_N.tolist() == [u for _, u in listed]
    assert pairs.by_row_N.tolist() == by_row
    assert pairs.first_U.tolist() == [sum(u < row for _, u in listed) for row in range(num_rows)]
