"""Recorded routes, dealt out anew: the tokens of one step on any number of ranks.

The micro-batches that the recorded ranks ran side by side make one pass: their tokens, in the order
of ranks, are cut into as many nearly equal stretches as there are ranks now. A token takes all its
routes with it, those of its heads and sub-tokens too, and so sits on the same rank in every layer.
On as many ranks as were recorded every rank gets what it had.

Mixtures and expert choice have equally many routes for every expert, whatever the tokens: each rank
gets its share of them.

Legend: T tokens, U source rows, N routes, P ranks now.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..model.routing import Routes, slot_routes
from ..train.routing.trace import RecordedCall, RecordedRank, read_rank


@dataclass(frozen=True)
class DealtCall:
    """One pass through one layer on the ranks of now."""

    step: int
    call: RecordedCall  # of the first recorded rank: the layer and its sizes
    routes: list[Routes]  # of every rank, with gate weights of 1
    num_rows: list[int]


def replay(steps: dict[int, list[Path]], num_ranks: int) -> Iterator[DealtCall]:
    """Every call of every step, in order.

    Raises:
        ValueError: a file is damaged, or the ranks did not record the same calls.
    """
    for step, files in sorted(steps.items()):
        recorded = [read_rank(path) for path in files]
        for calls in _side_by_side(recorded, step):
            tokens = [
                rank.tokens[call.micro_batch] for rank, call in zip(recorded, calls, strict=True)
            ]
            routes, rows = deal(calls, tokens, num_ranks)
            yield DealtCall(step, calls[0], routes, rows)


def _side_by_side(
    recorded: Sequence[RecordedRank], step: int
) -> Iterator[tuple[RecordedCall, ...]]:
    """The calls that the ranks made together."""
    for calls in zip(*(rank.calls for rank in recorded), strict=False):
        places = {(call.micro_batch, call.layer, call.depth, call.num_experts) for call in calls}
        if len(places) > 1:
            raise ValueError(f"step {step}: its ranks recorded different calls: {sorted(places)}")
        yield calls
    if len({len(rank.calls) for rank in recorded}) > 1:
        raise ValueError(
            f"step {step}: its ranks recorded {[len(rank.calls) for rank in recorded]} calls"
        )


def deal(
    calls: Sequence[RecordedCall], tokens: Sequence[int], num_ranks: int
) -> tuple[list[Routes], list[int]]:
    """The routes of every rank, and how many source rows it has.

    Args:
        calls: of every recorded rank, the same pass through the same layer.
        tokens: of every recorded rank.

    Raises:
        ValueError: routes lead from one token to another, or the rows are not of the tokens.
    """
    if calls[0].per_expert:
        return _deal_slots(calls, num_ranks)
    joined = _join(calls, tokens)
    ends = cut(joined.num_tokens, num_ranks)
    rank_N = np.searchsorted(ends[1:], joined.token_N, side="right")
    routes = [
        _own_routes(joined, rank_N == rank, ends[rank], ends[rank + 1]) for rank in range(num_ranks)
    ]
    return routes, [int(length) * joined.rows_per_token for length in np.diff(ends)]


def cut(count: int, num_parts: int) -> np.ndarray:
    """The ends of nearly equal stretches, 0 first."""
    return np.arange(num_parts + 1) * count // num_parts


@dataclass(frozen=True)
class _Joined:
    """All recorded ranks' routes, rows numbered on."""

    token_N: np.ndarray
    source_N: np.ndarray
    target_N: np.ndarray
    expert_N: np.ndarray
    num_tokens: int
    rows_per_token: int
    targets_per_token: int
    num_experts: int
    per_source: int
    per_target: int


def _join(calls: Sequence[RecordedCall], tokens: Sequence[int]) -> _Joined:
    first = calls[0]
    rows, targets = (
        _per_token([getattr(call, name) for call in calls], tokens)
        for name in ("num_rows", "num_targets")
    )
    before = np.cumsum([0, *tokens[:-1]])
    sources = [_sources(call) + begin * rows for call, begin in zip(calls, before, strict=True)]
    ends = [_targets(call) + begin * targets for call, begin in zip(calls, before, strict=True)]
    source_N, target_N = np.concatenate(sources), np.concatenate(ends)
    if (source_N // rows != target_N // targets).any():
        raise ValueError(
            f"{first.layer}: a recorded route leads from one token to another; it cannot be dealt "
            "out"
        )
    rules = {(call.per_source, call.per_target) for call in calls}
    per_source, per_target = rules.pop() if len(rules) == 1 else (0, 0)
    return _Joined(
        source_N // rows,
        source_N,
        target_N,
        np.concatenate([call.expert_N for call in calls]),
        sum(tokens),
        rows,
        targets,
        first.num_experts,
        per_source,
        per_target,
    )


def _per_token(rows: Sequence[int], tokens: Sequence[int]) -> int:
    each = {count / length for count, length in zip(rows, tokens, strict=True) if length}
    if len(each) != 1 or not (found := each.pop()).is_integer() or found < 1:
        raise ValueError(f"{list(rows)} recorded rows do not belong to {list(tokens)} tokens")
    return int(found)


def _sources(call: RecordedCall) -> np.ndarray:
    return np.arange(call.num_routes) // call.per_source if call.has_rule else call.source_N


def _targets(call: RecordedCall) -> np.ndarray:
    return np.arange(call.num_routes) // call.per_target if call.has_rule else call.target_N


def _own_routes(joined: _Joined, mine_N: np.ndarray, begin: int, end: int) -> Routes:
    """Those of the tokens `begin` … `end`, rows numbered from the first of them."""
    source, target, expert = (
        torch.from_numpy(values[mine_N])
        for values in (joined.source_N, joined.target_N, joined.expert_N)
    )
    return Routes(
        source - int(begin) * joined.rows_per_token,
        expert,
        torch.ones(len(expert)),
        target - int(begin) * joined.targets_per_token,
        joined.num_experts,
        int(end - begin) * joined.targets_per_token,
        joined.per_source,
        joined.per_target,
    )


def _deal_slots(calls: Sequence[RecordedCall], num_ranks: int) -> tuple[list[Routes], list[int]]:
    """A row of its own for every route: that is how such routes travel, whichever rows they read."""
    experts = calls[0].num_experts
    shares = np.diff(cut(sum(call.per_expert for call in calls), num_ranks)).tolist()
    if len(set(shares)) == 1 and shares[0]:
        routes = [
            slot_routes(experts * share, num_experts=experts, device=torch.device("cpu"))
            for share in shares
        ]
    else:
        routes = [_uneven_slots(experts, share) for share in shares]
    return routes, [experts * share for share in shares]


def _uneven_slots(experts: int, share: int) -> Routes:
    """Where the ranks' shares differ no rank knows the others'."""
    row_N = torch.arange(experts * share)
    expert_N = torch.arange(experts).repeat_interleave(share)
    return Routes(
        row_N,
        expert_N,
        torch.ones(len(row_N)),
        row_N,
        experts,
        len(row_N),
        per_source=1,
        per_target=1,
    )
