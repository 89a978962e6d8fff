"""Looks into passes of a trained model: which experts its tokens chose, and its hidden states.

The rows of `trace_rows` are those of `moebius eval`, in the same micro-batches: evenly spaced over the
split, the same at every call. So a router that routes sequences together sees the same groups, and the
mean loss is the one that an evaluation of these rows reports.

Legend: B rows, S positions, T = B·S tokens, L depth steps, D model width, V vocabulary, E experts of a
layer, N routes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..data_pipeline.read.corruption import open_fetcher
from ..data_pipeline.read.loader import validation_batches
from ..model.config.attention_config import SwitchHeadConfig
from ..model.documents import Documents
from ..model.execution.precision import forward_in, products_dtype
from ..model.layers import wide_dtype
from ..model.transformer import Layer, Transformer
from ..train.micro_batches import document_use
from ..train.record.route_tap import tap
from ..train.record.routed_call import RoutedCall
from .restore import Restored

ChosenBy = Literal["tokens", "experts", "nobody"]


@dataclass(frozen=True)
class LayerRoutes:
    """Holds what one sparse layer chose at one depth step: N routes of T tokens to E experts.

    A layer that reads several rows of a token (the heads of SwitchHead's O, the sub-tokens of
    Multi-Head MoE) has the routes of all of them. Where experts choose, a token may have no route. In
    a mixture nobody chooses: every expert reads mixtures of all tokens, and `token_N` is empty.
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
    """How many heads choose among their own E ÷ num_heads experts."""
    chosen_by: ChosenBy
    token_N: Tensor
    """int64, 0 … T−1."""
    expert_N: Tensor
    """int64, 0 … E−1."""
    weight_N: Tensor
    """float32, the gate weights."""


@dataclass(frozen=True)
class Trace:
    """Holds one pass over rows of tokens: its routes, its hidden states, its loss."""

    tokens_BS: Tensor
    """int64, the tokens that the model read."""
    counted_BS: Tensor
    """bool: False for padding, and for rows that only fill up the last micro-batch."""
    routes: tuple[LayerRoutes, ...]
    """One entry per sparse layer and depth step, in the order of the calls."""
    hidden_LBSD: Tensor
    """L + 1 states of the residual stream: the embedding, then the state after every depth step."""
    active_LBS: Tensor
    """bool: False at depth steps that a halted token skips."""
    loss_sum: float = float("nan")
    """Cross-entropy in nats, summed over the targets that count; nan where there are no targets."""
    num_targets: int = 0


@torch.no_grad()
def trace(restored: Restored, tokens_BS: Tensor) -> Trace:
    """Runs a model over rows of tokens and returns what happened inside."""
    tokens_BS = tokens_BS.to(restored.model.embedding.device)
    counted_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
    return _traced(restored, tokens_BS, counted_BS)


@torch.no_grad()
def logits(restored: Restored, tokens_BS: Tensor) -> Tensor:
    """Returns the logits at every position that a model reads, (B, S, V)."""
    dtype = products_dtype(restored.config.train.precision)
    tokens_BS = tokens_BS.to(restored.model.embedding.device)
    return forward_in(restored.model, dtype, tokens_BS).logits_BSV


@torch.no_grad()
def trace_rows(
    restored: Restored, *, split: str = "validation", max_rows: int | None = None
) -> Iterator[Trace]:
    """Yields a trace of every micro-batch of a split.

    Memory does not grow with the number of rows: keep what you need of a trace, and let it go.

    Args:
        restored: a model in evaluation mode, with its run's configuration.
        split: train or validation.
        max_rows: how many rows at most, evenly spaced; None: all.

    Raises:
        ValueError: the data cannot be read, or the split is shorter than one row.
    """
    config, device = restored.config, restored.model.embedding.device
    use = document_use(config)
    group = config.model.evaluation_group_sequences
    for batch in validation_batches(
        Path(config.data.directory),
        split=split,
        seq_len=config.data.seq_len,
        batch_size=-(-config.train.micro_batch // group) * group,
        sequences_per_group=group,
        rank=0,
        num_ranks=1,
        max_rows=max_rows,
        document_ids=config.data.gives_document_ids,
        fetch=open_fetcher(config.data),
    ):
        valid_B = torch.from_numpy(batch.valid)
        mask_BS, documents = use.read(batch.loss_mask, batch.document_ids, device)
        inputs_BS, targets_BS = use.split(torch.from_numpy(batch.tokens).to(device))
        asked_BS = valid_B[:, None].expand(inputs_BS.shape)
        if mask_BS is not None:
            asked_BS = asked_BS & mask_BS
        counted_BS = valid_B.to(device)[:, None].expand(inputs_BS.shape)
        if documents is not None and documents.real_BS is not None:
            counted_BS = counted_BS & documents.real_BS
        yield _traced(
            restored,
            inputs_BS,
            counted_BS,
            documents=documents,
            targets_BS=targets_BS,
            loss_mask_BS=asked_BS,
        )


def _traced(
    restored: Restored,
    tokens_BS: Tensor,
    counted_BS: Tensor,
    *,
    documents: Documents | None = None,
    targets_BS: Tensor | None = None,
    loss_mask_BS: Tensor | None = None,
) -> Trace:
    model = restored.model
    dtype = products_dtype(restored.config.train.precision)
    with tap(model) as calls, _tap_states(model) as states:
        output = forward_in(
            model,
            dtype,
            tokens_BS,
            targets_BS=targets_BS,
            loss_mask_BS=loss_mask_BS,
            documents=documents,
        )
    found = Trace(
        tokens_BS=tokens_BS,
        counted_BS=counted_BS,
        routes=tuple(_routes_of(model, call, tokens_BS.numel()) for call in calls),
        hidden_LBSD=torch.stack(states.hidden),
        active_LBS=torch.stack(states.active),
    )
    if loss_mask_BS is None:
        return found
    return replace(found, loss_sum=float(output.cross_entropy), num_targets=int(loss_mask_BS.sum()))


def _routes_of(model: Transformer, call: RoutedCall, num_tokens: int) -> LayerRoutes:
    """Returns a recorded call with its rows made tokens."""
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
    """Collects the states while the context lasts, by hooks that only look."""
    states = _States()

    def record(_: Layer, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        if not states.hidden:
            states.hidden.append(inputs[0].to(wide_dtype(inputs[0])))
        states.hidden.append(output[0].to(wide_dtype(output[0])))
        unhalted = named.get("unhalted")
        weight_BS = torch.ones_like(output[0][..., 0]) if unhalted is None else unhalted.weight_BS
        states.active.append(weight_BS > 0)

    hooks = [layer.register_forward_hook(record, with_kwargs=True) for layer in model.group]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
