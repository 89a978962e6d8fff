"""Which banks of experts a model chooses among, and what each of them chose in one pass.

A bank is one sparse layer: the feed-forward of a group member, or the experts of V or of O in its
attention. Its weights serve several depth steps, and its experts are the same ones at all of them:
only within a bank can choices at different depth steps be compared. MoMHA's experts of Q and of O
are chosen together, so they are one bank here.

A choice is a route of a counted token. A layer may read several rows per token (the heads of
SwitchHead's O, the sub-tokens of Multi-Head MoE): their choices are the token's. Where experts
choose their rows the routes say which experts took a token, and that may be none. Mixtures have
routes of their slots only, and none of tokens.

Legend: T tokens that count, E experts of a bank, N routes, R repeats of a bank.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.transformer import Transformer
from moebius.train.record.route_tap import depths_of, sparse_layers
from moebius.train.record.routed_call import RoutedCall, kind_of

FEED_FORWARD = "feed_forward"
KINDS = (FEED_FORWARD, "value", "output", "attention")
ChosenBy = Literal["tokens", "experts", "nobody"]


@dataclass(frozen=True)
class Bank:
    """Describes one bank of experts."""

    layer: str  # the module's name
    kind: str  # feed_forward; value or output of SwitchHead; attention: Q and O of MoMHA
    member: int  # of the group, from 0
    depths: tuple[int, ...]  # the depth steps that it serves, from 1
    num_experts: int  # of all heads
    num_heads: int = 1  # each of which chooses among its own experts

    @property
    def num_repeats(self) -> int:
        """Returns R: how many depth steps share these experts."""
        return len(self.depths)


def member_name(member: int) -> str:
    """Returns a letter for a member of the group, as in "ABAB": A, B, …, Z, 27, 28, …"""
    return chr(ord("A") + member) if member < 26 else str(member + 1)


def banks_of(model: Transformer) -> tuple[Bank, ...]:
    """Returns the banks of a model: first the feed-forwards, then those of attention."""
    attention = model.config.attention
    heads = attention.num_heads if isinstance(attention, SwitchHeadConfig) else 1
    found = []
    for name, layer in sparse_layers(model):
        kind = kind_of(name)
        if attention.kind == "momha" and kind == "query":
            continue  # chosen together with `output`, which has the gates
        if attention.kind == "momha" and kind == "output":
            kind = "attention"
        found.append(
            Bank(
                layer=name,
                kind=kind,
                member=int(name.split(".")[1]),
                depths=tuple(depths_of(model, name)),
                num_experts=len(next(layer.experts.parameters())),
                num_heads=1 if kind == FEED_FORWARD else heads,
            )
        )
    return tuple(sorted(found, key=lambda bank: (KINDS.index(bank.kind), bank.member)))


@dataclass(frozen=True)
class Choices:
    """Holds what one bank chose at one depth step for the tokens of a pass that count."""

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


def choices_of(call: RoutedCall, counted_T: Tensor) -> Choices:
    """Returns the choices of one recorded call, of tokens that count alone.

    Args:
        call: of a bank with routes of tokens.
        counted_T: bool, of all tokens of the pass.

    Raises:
        ValueError: the call's rows are not rows of these tokens.
    """
    rows_per_token = call.num_rows // max(len(counted_T), 1)
    if not rows_per_token or rows_per_token * len(counted_T) != call.num_rows:
        raise ValueError(
            f"{call.id}: {call.num_rows} rows do not belong to {len(counted_T)} tokens"
        )
    token_N = call.routes.source_N // rows_per_token
    kept_N = counted_T[token_N]
    number_T = counted_T.cumsum(0) - 1  # of a token among those that count
    return Choices(
        token_N=number_T[token_N[kept_N]],
        expert_N=call.routes.expert_N[kept_N],
        weight_N=call.routes.weight_N[kept_N].float(),
        num_tokens=int(counted_T.sum()),
        num_experts=call.routes.num_experts,
    )


def chosen_by(call: RoutedCall) -> ChosenBy:
    """Returns who chose in a recorded call: tokens their experts, experts their tokens, or nobody.

    Nobody chooses in a mixture, whose rows are slots that stand by expert.
    """
    if not call.routes.per_expert:
        return "tokens"
    return "nobody" if call.routes.per_source else "experts"
