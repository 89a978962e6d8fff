"""Identifies a model's banks of experts, and what each of them chose in one pass.

A bank is one sparse layer: the feed-forward of a group member, or the experts of V or O in its
attention. It serves several depth steps with the same experts, so choices at different depth steps
can be compared only within a bank. MoMHA chooses experts of Q and O together, so they are one bank.

A choice is a route of a counted token. If a layer reads several rows per token (heads of
SwitchHead's O, sub-tokens of Multi-Head MoE), their choices are the token's. If experts choose
their rows, a token can have none.

Legend: T tokens that count, E experts of a bank, N routes, R repeats of a bank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

import moebius

FEED_FORWARD = "feed_forward"
KINDS = (FEED_FORWARD, "value", "output", "attention")


@dataclass(frozen=True)
class Bank:
    """Describes one bank of experts."""

    layer: str  # the module's name
    kind: str  # feed_forward; value or output of SwitchHead; attention: Q and O of MoMHA
    member: int  # of the group, from 0
    depths: tuple[int, ...]  # the depth steps that it serves, from 1
    num_experts: int  # of all heads
    num_heads: int  # each of which chooses among its own experts
    chosen_by: str  # tokens, experts or nobody

    @property
    def num_repeats(self) -> int:
        """Returns R: the number of depth steps that share these experts."""
        return len(self.depths)


def member_name(member: int) -> str:
    """Returns a letter for a member of the group, as in "ABAB": A, B, …, Z, 27, 28, …"""
    return chr(ord("A") + member) if member < 26 else str(member + 1)


def banks_of(routes: Sequence[moebius.LayerRoutes], attention: str) -> tuple[Bank, ...]:
    """Returns a model's banks: feed-forwards first, then attention's.

    Args:
        routes: of one pass.
        attention: the kind of the model's attention.
    """
    by_layer: dict[str, list[moebius.LayerRoutes]] = {}
    for each in routes:
        if attention != "momha" or each.kind != "query":  # chosen together with `output`
            by_layer.setdefault(each.layer, []).append(each)
    found = [_bank(layer, passes, attention) for layer, passes in by_layer.items()]
    return tuple(sorted(found, key=lambda bank: (KINDS.index(bank.kind), bank.member)))


def _bank(layer: str, passes: Sequence[moebius.LayerRoutes], attention: str) -> Bank:
    first = passes[0]
    joint = attention == "momha" and first.kind == "output"
    return Bank(
        layer=layer,
        kind="attention" if joint else first.kind,
        member=first.member,
        depths=tuple(each.depth for each in passes),
        num_experts=first.num_experts,
        num_heads=first.num_heads,
        chosen_by=first.chosen_by,
    )


@dataclass(frozen=True)
class Choices:
    """Holds one bank's choices at one depth step for the counted tokens of a pass."""

    token_N: Tensor  # int64, 0 … T−1
    expert_N: Tensor  # int64
    weight_N: Tensor  # float32: the gate weights
    num_tokens: int  # T
    num_experts: int  # E

    @cached_property
    def chosen_TE(self) -> Tensor:
        """Returns which experts serve which token: (T, E) bool."""
        chosen = torch.zeros(
            self.num_tokens * self.num_experts, dtype=torch.bool, device=self.expert_N.device
        )
        chosen[self.token_N * self.num_experts + self.expert_N] = True
        return chosen.view(self.num_tokens, self.num_experts)


def choices_of(routes: moebius.LayerRoutes, counted_T: Tensor) -> Choices:
    """Returns one layer's choices at one depth step, for counted tokens only."""
    kept_N = counted_T[routes.token_N]
    number_T = counted_T.cumsum(0) - 1  # of a token among those that count
    return Choices(
        token_N=number_T[routes.token_N[kept_N]],
        expert_N=routes.expert_N[kept_N],
        weight_N=routes.weight_N[kept_N],
        num_tokens=int(counted_T.sum()),
        num_experts=routes.num_experts,
    )
