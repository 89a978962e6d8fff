"""Records forward passes of a trained model: experts chosen per token, and hidden states.

The rows are those of `moebius eval` in the same micro-batches: evenly spaced over the split, and
the same at every call. A router that routes sequences together therefore sees the same groups, and
the mean loss equals an evaluation's over these rows.

Legend: B rows, S positions, T = B·S tokens, L depth steps, D model width, V vocabulary, E experts
of a layer, N routes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..model.block import Layer
from ..model.config.attention_config import SwitchHeadConfig
from ..model.execution.precision import forward_in, products_dtype
from ..model.layers import wide_dtype
from ..model.transformer import Transformer
from ..train.evaluate import Rows
from ..train.record.route_tap import RoutedCall, tap
from .restore import Restored

ChosenBy = Literal["tokens", "experts", "nobody"]


@dataclass(frozen=True)
class LayerRoutes:
    """Holds the choices of one sparse layer at one depth step: N routes of T tokens to E experts.

    A layer that reads several rows per token (heads of SwitchHead's O, sub-tokens of Multi-Head
    MoE) has the routes of all of them. If experts choose, a token can be without routes. In a
    mixture nobody chooses: every expert reads mixtures of all tokens, and `token_N` is empty.
    """

    layer: str
    """The module's name, as in checkpoints."""
    kind: str
    """feed_forward; value, output or query of attention."""
    member: int
    """The layer's place in the group of shared layers, from 0."""
    depth: int
    """The depth step, from 1."""
    num_experts: int
    """E, those of all heads together."""
    num_heads: int
    """Heads, each of which chooses among its own E ÷ num_heads experts."""
    chosen_by: ChosenBy
    token_N: Tensor
    """int64, 0 … T−1."""
    expert_N: Tensor
    """int64, 0 … E−1."""
    weight_N: Tensor
    """float32, the gate weights."""


@dataclass(frozen=True)
class Trace:
    """Holds routes, hidden states and loss of one pass over rows of tokens."""

    rows: Rows
    routes: tuple[LayerRoutes, ...]
    """One entry per sparse layer and depth step, in call order."""
    hidden_LBSD: Tensor
    """L + 1 states of the residual stream: the embedding, then after every depth step."""
    active_LBS: Tensor
    """bool: False at depth steps that a halted token skips."""
    loss_sum: float
    """Cross-entropy in nats, summed over the targets that count."""

    @property
    def num_targets(self) -> int:
        """Returns how many targets count."""
        return int(self.rows.asked_BS.sum())


def rows_of(tokens_BS: Tensor) -> Rows:
    """Returns rows of tokens that each predict the next; the last token is only a target."""
    everything = torch.ones_like(tokens_BS[:, 1:], dtype=torch.bool)
    return Rows(
        tokens_BS[:, :-1], tokens_BS[:, 1:], everything, everything.cpu(), None, len(tokens_BS)
    )


def check_tokens(tokens_BS: Tensor, model: Transformer, *, at_least: int) -> None:
    """Checks that a tensor holds rows of a model's token ids.

    Raises:
        ValueError: it does not.
    """
    num_ids, shape = len(model.embedding), tuple(tokens_BS.shape)
    are_rows = len(shape) == 2 and shape[0] > 0 and shape[1] >= at_least
    is_whole = not (tokens_BS.is_floating_point() or tokens_BS.dtype == torch.bool)
    if are_rows and is_whole and 0 <= int(tokens_BS.min()) <= int(tokens_BS.max()) < num_ids:
        return
    raise ValueError(
        f"give rows of at least {at_least} token ids, whole numbers below {num_ids}, such as "
        f"torch.tensor([[1, 2, 3]]); this has the shape {shape} and the dtype {tokens_BS.dtype}"
    )


@torch.no_grad()
def trace(restored: Restored, rows: Rows) -> Trace:
    """Runs a model in evaluation mode over rows of tokens and records the pass."""
    model = restored.model
    dtype = products_dtype(restored.config.train.precision)
    with tap(model) as calls, _tap_states(model) as states:
        output = forward_in(
            model,
            dtype,
            rows.tokens_BS,
            targets_BS=rows.targets_BS,
            loss_mask_BS=rows.asked_BS,
            documents=rows.documents,
        )
    num_tokens = rows.tokens_BS.numel()
    return Trace(
        rows=rows,
        routes=tuple(_routes_of(model, call, num_tokens) for call in calls),
        hidden_LBSD=torch.stack(states.hidden),
        active_LBS=torch.stack(states.active),
        loss_sum=float(output.cross_entropy),
    )


@torch.no_grad()
def logits(restored: Restored, tokens_BS: Tensor) -> Tensor:
    """Returns the logits at every position, (B, S, V)."""
    dtype = products_dtype(restored.config.train.precision)
    check_tokens(tokens_BS, restored.model, at_least=1)
    tokens_BS = tokens_BS.to(restored.model.embedding.device)
    return forward_in(restored.model, dtype, tokens_BS).logits_BSV


def _routes_of(model: Transformer, call: RoutedCall, num_tokens: int) -> LayerRoutes:
    """Returns a recorded call with its rows mapped to tokens."""
    routes, attention = call.routes, model.config.attention
    has_heads = isinstance(attention, SwitchHeadConfig) and call.id.kind != "feed_forward"
    chosen_by: ChosenBy = "tokens"
    if routes.per_expert:
        chosen_by = "nobody" if routes.per_source else "experts"
    kept = slice(0) if chosen_by == "nobody" else slice(None)  # a mixture's rows are no tokens
    return LayerRoutes(
        layer=call.id.layer,
        kind=call.id.kind,
        member=int(call.id.layer.split(".")[1]),
        depth=call.id.depth,
        num_experts=routes.num_experts,
        num_heads=attention.num_heads if has_heads else 1,
        chosen_by=chosen_by,
        token_N=routes.source_N[kept] // max(call.num_rows // num_tokens, 1),
        expert_N=routes.expert_N[kept],
        weight_N=routes.weight_N[kept].float(),
    )


@dataclass(frozen=True)
class _States:
    """Collects the residual stream of one pass."""

    hidden: list[Tensor] = field(default_factory=list)
    active: list[Tensor] = field(default_factory=list)


@contextmanager
def _tap_states(model: Transformer) -> Iterator[_States]:
    """Records the states in read-only hooks while the context lasts."""
    states = _States()

    def record(_: Layer, inputs: tuple[Any, ...], output: Any) -> None:
        if not states.hidden:
            states.hidden.append(inputs[0].to(wide_dtype(inputs[0])))
        states.hidden.append(output[0].to(wide_dtype(output[0])))
        unhalted = inputs[1].unhalted
        weight_BS = torch.ones_like(output[0][..., 0]) if unhalted is None else unhalted.weight_BS
        states.active.append(weight_BS > 0)

    hooks = [layer.register_forward_hook(record) for layer in model.group]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
