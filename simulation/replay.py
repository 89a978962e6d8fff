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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..model.routing import Routes, slot_routes
from ..train.record.route_tap import CallId, RoutedCall
from ..train.record.route_trace import RecordedRank
from .recorded_routes import read_rank


def replay(steps: dict[int, list[Path]], num_ranks: int) -> Iterator[list[RoutedCall]]:
    """Yields every recorded call of every step, dealt out to so many ranks: one entry per rank.

    Args:
        steps: by step, the files of all recorded ranks.
        num_ranks: the ranks now.

    Raises:
        ValueError: a file is damaged, or the ranks did not record the same calls.
    """
    for step, files in sorted(steps.items()):
        recorded = [read_rank(path) for path in files]
        for calls in _side_by_side(recorded, step):
            micro_batch = calls[0].id.micro_batch
            yield deal(calls, [rank.tokens[micro_batch] for rank in recorded], num_ranks)


def _side_by_side(recorded: Sequence[RecordedRank], step: int) -> Iterator[tuple[RoutedCall, ...]]:
    """Yields the calls that the recorded ranks made together."""
    for calls in zip(*(rank.calls for rank in recorded), strict=False):
        different: set[tuple[CallId, int]] = {(call.id, call.routes.num_experts) for call in calls}
        if len(different) > 1:
            named = [
                f"{call_id} ({call_id.layer}, {experts} experts)"
                for call_id, experts in sorted(different)
            ]
            raise ValueError(f"step {step}: its ranks recorded different calls: {named}")
        yield calls
    counts = [len(rank.calls) for rank in recorded]
    if len(set(counts)) > 1:
        raise ValueError(f"step {step}: its ranks recorded {counts} calls")


def deal(calls: Sequence[RoutedCall], tokens: Sequence[int], num_ranks: int) -> list[RoutedCall]:
    """Returns what every one of `num_ranks` ranks routes, where tokens are cut evenly among them.

    Args:
        calls: of every recorded rank, the same pass through the same layer.
        tokens: of every recorded rank, in that micro-batch.
        num_ranks: the ranks now.

    Raises:
        ValueError: routes lead from one token to another, or the rows are not of the tokens.
    """
    if calls[0].routes.per_expert:
        return _deal_slots(calls, num_ranks)
    joined = _join(calls, tokens)
    ends = cut(joined.num_tokens, num_ranks)
    rank_N = np.searchsorted(ends[1:], joined.token_N.numpy(), side="right")
    dealt = []
    for rank in range(num_ranks):
        first, end = int(ends[rank]), int(ends[rank + 1])
        mine_N = torch.from_numpy(rank_N == rank)
        routes = _own_routes(joined, mine_N, first, end)
        num_rows = (end - first) * joined.rows_per_token
        dealt.append(replace(calls[0], routes=routes, num_rows=num_rows))
    return dealt


def cut(count: int, num_parts: int) -> np.ndarray:
    """Returns the ends of nearly equal stretches of `count` things, 0 first."""
    return np.arange(num_parts + 1) * count // num_parts


@dataclass(frozen=True)
class _Joined:
    """All recorded ranks' routes, rows and tokens numbered on from rank to rank."""

    token_N: Tensor
    source_N: Tensor
    target_N: Tensor
    expert_N: Tensor
    num_tokens: int
    rows_per_token: int
    targets_per_token: int
    num_experts: int
    per_source: int
    per_target: int


def _join(calls: Sequence[RoutedCall], tokens: Sequence[int]) -> _Joined:
    rows_per_token = _per_token([call.num_rows for call in calls], tokens)
    targets_per_token = _per_token([call.routes.num_targets for call in calls], tokens)
    first_tokens = np.cumsum([0, *tokens[:-1]]).tolist()
    sources, targets = [], []
    for call, first in zip(calls, first_tokens, strict=True):
        sources.append(call.routes.source_N + first * rows_per_token)
        targets.append(call.routes.target_N + first * targets_per_token)
    source_N, target_N = torch.cat(sources), torch.cat(targets)
    token_N = source_N // rows_per_token
    if (token_N != target_N // targets_per_token).any():
        raise ValueError(
            f"{calls[0].id.layer}: a recorded route leads from one token to another; it cannot be "
            "dealt out"
        )
    rules = {(call.routes.per_source, call.routes.per_target) for call in calls}
    per_source, per_target = rules.pop() if len(rules) == 1 else (0, 0)
    return _Joined(
        token_N,
        source_N,
        target_N,
        torch.cat([call.routes.expert_N for call in calls]),
        sum(tokens),
        rows_per_token,
        targets_per_token,
        calls[0].routes.num_experts,
        per_source,
        per_target,
    )


def _per_token(rows: Sequence[int], tokens: Sequence[int]) -> int:
    each = {count / length for count, length in zip(rows, tokens, strict=True) if length}
    if len(each) != 1 or not (found := each.pop()).is_integer() or found < 1:
        raise ValueError(f"{list(rows)} recorded rows do not belong to {list(tokens)} tokens")
    return int(found)


def _own_routes(joined: _Joined, mine_N: Tensor, first: int, end: int) -> Routes:
    """Returns the routes of the tokens `first` … `end`, rows numbered from the first of them."""
    expert_N = joined.expert_N[mine_N]
    return Routes(
        joined.source_N[mine_N] - first * joined.rows_per_token,
        expert_N,
        torch.ones(len(expert_N)),
        joined.target_N[mine_N] - first * joined.targets_per_token,
        joined.num_experts,
        (end - first) * joined.targets_per_token,
        joined.per_source,
        joined.per_target,
    )


def _deal_slots(calls: Sequence[RoutedCall], num_ranks: int) -> list[RoutedCall]:
    """Gives every route a row of its own: so such routes travel, whichever rows they read."""
    experts = calls[0].routes.num_experts
    ends = cut(sum(call.routes.per_expert for call in calls), num_ranks)
    shares: list[int] = np.diff(ends).tolist()
    alike = len(set(shares)) == 1 and shares[0] > 0
    dealt = []
    for share in shares:
        num_rows = experts * share
        if alike:
            routes = slot_routes(num_rows, num_experts=experts, device=torch.device("cpu"))
        else:
            routes = _uneven_slots(experts, share)
        dealt.append(replace(calls[0], routes=routes, num_rows=num_rows))
    return dealt


def _uneven_slots(experts: int, share: int) -> Routes:
    """Returns routes of one rank where the shares differ: none knows the others' counts."""
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
