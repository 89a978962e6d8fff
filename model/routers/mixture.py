"""Mixture of Tokens: without choosing, every expert reads one mixture of a group's tokens (arXiv
2310.15961).

A group holds the same position of M consecutive sequences. A token reads other sequences up to its
own position but never later, so a language model stays causal, while no sequence is independent of
its group context. For tokens x_m of a group,

    L = x Cᵀ                        logits of every token and expert, no bias
    W[m, e] = softmax_m(L[m, e]/τ)  over the tokens, for every expert separately
    y_m = Σ_e W[m, e] · expert_e(Σ_i W[i, e] · x_i)

The same W merges and emits. Every token learns from every expert, and the load is equal and known
in advance. With E = M·m experts of width F/m, a token costs as much as a dense layer of width F.
Mixing adds 6·D·E FLOPs per token: at D = 512, 2 % of the experts' for m = 1 and 37 % for m = 16. W
takes T·E numbers per layer.

A group of one is refused. A softmax over one token is 1 for every expert, so the token would get
the plain sum of all E outputs (for 32 experts at the start, up to 32·√32 = 181 times those of a
group of 32; measured 155).

Padding (model/documents.py) is mixed like any token. Omitting it would shrink the group, down to a
group of one, and make outputs depend on how full the other rows are.

The authors' switches beyond the published layer are off by default. In their current code a
learnable temperature reaches the softmax only in the positive form; here in both.

Legend: B sequences, S positions, T = B·S rows, D their width, G groups of M members, E experts.
"""

from typing import Literal, Self

import torch
from pydantic import Field, PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from ..initialise import Initializer, ones, parameter
from ..layers import router_logits
from ..routing import Mixture, Routing
from .router import Promises, Router, RouterConfig


class TokenMixingConfig(RouterConfig):
    """Describes Mixture of Tokens; everything beyond the group size is off, as published."""

    kind: Literal["mixture_of_tokens"] = "mixture_of_tokens"
    sequences_per_group: PositiveInt = 32
    """Tokens M that are mixed: from as many sequences, or with axis "sequence" from one."""

    temperature: PositiveFloat = 1.0
    """Temperature τ of the mixing weights, or its start if learned."""

    learnable_temperature: Literal["none", "scalar", "per_expert"] = "none"
    """Learns a factor of the temperature: one for all experts, or one each."""

    temperature_form: Literal["direct", "positive"] = "direct"
    """How a learned factor t, starting at 1, applies: τ·t, or τ·exp(t − 1), which stays
    positive.
    """

    separate_emit_temperature: bool = False
    """Learns a separate temperature for emission."""

    emit: Literal["merge", "softmax_over_experts"] = "merge"
    """Weights of emission: those of merging, or a softmax over a token's experts as in Soft MoE."""

    axis: Literal["position", "sequence"] = "position"
    """What is mixed: the same position of several sequences, or neighbours in one sequence, which
    reads the future.
    """

    discrete_evaluation: bool = False
    """Evaluates with only the largest weight, set to 1, to measure the distance from a sparse
    layer.
    """

    evaluation_sequences_per_group: int | None = Field(default=None, gt=0)
    """Size of a group in evaluation; none: as in training."""

    @property
    def promises(self) -> Promises:
        """Returns what this configuration guarantees."""
        by_position = self.axis == "position"
        return Promises(
            causal=by_position, batch_invariant=not by_position, dropless=True, balanced=True
        )

    @property
    def group_sequences(self) -> int:
        """Returns how many sequences are routed together."""
        return self.sequences_per_group if self.axis == "position" else 1

    @property
    def evaluation_group_sequences(self) -> int:
        """Returns how many sequences are routed together in evaluation."""
        return self.members(training=False) if self.axis == "position" else 1

    @property
    def reads_whole_sequences(self) -> bool:
        """Returns whether one position alone cannot be routed."""
        return self.axis == "sequence"

    def check_length(self, sequence_rows: int) -> None:
        """Checks that the router and the length of a sequence fit each other."""
        if self.axis == "position":
            return
        for name in ("sequences_per_group", "evaluation_sequences_per_group"):
            members = getattr(self, name)
            if members is not None and sequence_rows % members:
                raise ValueError(
                    f'router.{name}={members} with axis="sequence" does not divide the '
                    f"{sequence_rows} rows of a sequence: choose a divisor"
                )

    def members(self, *, training: bool) -> int:
        """Returns M: how many rows a group has, in training or in evaluation."""
        return (
            self.sequences_per_group
            if training or self.evaluation_sequences_per_group is None
            else self.evaluation_sequences_per_group
        )

    def active_experts(self, num_experts: int, sequence_rows: int) -> float:
        """Returns the mixtures per row: every expert computes one for a group of M rows."""
        return num_experts / self.sequences_per_group

    def router_flops(self, d_row: int, num_experts: int) -> int:
        """Returns the forward FLOPs for one row: logits, merging and emitting."""
        return 6 * d_row * num_experts

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        for name in ("sequences_per_group", "evaluation_sequences_per_group"):
            if getattr(self, name) == 1:
                raise ValueError(group_of_one(name))
        return self

    @model_validator(mode="after")
    def _check_temperature(self) -> Self:
        if self.separate_emit_temperature and self.learnable_temperature == "none":
            raise ValueError(
                'separate_emit_temperature=True with learnable_temperature="none": no temperature '
                'is learned; choose "scalar" or "per_expert"'
            )
        return self


def group_of_one(name: str) -> str:
    """Explains why groups of one are refused."""
    return (
        f"{name}=1: a softmax over a group of one token is 1 for every expert, so the token would "
        "get the plain sum of all experts' outputs, tens of times too large; use 2 or more (the "
        "published models: 8 to 128)"
    )


class TokenMixingRouter(Router):
    """Mixes the tokens of a group for every expert (Mixture of Tokens, arXiv 2310.15961)."""

    Config = TokenMixingConfig
    config: TokenMixingConfig

    def __init__(
        self, config: TokenMixingConfig, d_row: int, num_experts: int, *, init: Initializer
    ) -> None:
        super().__init__(config, d_row, num_experts, init=init)
        self.weight = parameter(num_experts, d_row, init=init)
        sizes = {"none": None, "scalar": (1,), "per_expert": (num_experts,)}
        size = sizes[config.learnable_temperature]
        self.merge_temperature = None if size is None else parameter(*size, init=ones)
        self.emit_temperature = (
            parameter(*size, init=ones) if size and config.separate_emit_temperature else None
        )

    def forward(self, x_TD: Tensor, *, batch_size: int, real_T: Tensor | None = None) -> Routing:
        """Mixes T sequence-major rows.

        Raises:
            ValueError: the rows do not form whole groups.
        """
        logits_TE = router_logits(x_TD, self.weight)
        rows_GM = self._groups(x_TD.shape[0], batch_size, x_TD.device)
        return Routing(self._mixture(logits_TE[rows_GM], rows_GM), logits_TE[:, None])

    def _groups(self, num_rows: int, batch_size: int, device: torch.device) -> Tensor:
        members = self.config.members(training=self.training)
        if self.config.axis == "position":
            return rows_by_position(num_rows, batch_size, members, device=device)
        return rows_by_neighbourhood(num_rows, batch_size, members, device=device)

    def _mixture(self, logits_GME: Tensor, rows_GM: Tensor) -> Mixture:
        emit_axis = 2 if self.config.emit == "softmax_over_experts" else 1
        shared = emit_axis == 1 and self.emit_temperature is None
        merge_GME = self._weights(logits_GME, self.merge_temperature, axis=1)
        if shared:
            return Mixture(rows_GM, merge_GME, merge_GME, self.num_experts)
        own = self.emit_temperature
        temperature = self.merge_temperature if own is None else own
        emit_GME = self._weights(logits_GME, temperature, axis=emit_axis)
        return Mixture(rows_GM, merge_GME, emit_GME, self.num_experts)

    def _weights(self, logits_GME: Tensor, learned: Tensor | None, *, axis: int) -> Tensor:
        scaled_GME = logits_GME / self.config.temperature
        if learned is not None:
            factor = learned.to(logits_GME.dtype)
            scaled_GME = scaled_GME / (
                factor if self.config.temperature_form == "direct" else (factor - 1).exp()
            )
        weights_GME = scaled_GME.softmax(axis)
        if self.config.discrete_evaluation and not self.training:
            return one_hot_of_largest(weights_GME, axis=axis)
        return weights_GME


def rows_by_position(
    num_rows: int, batch_size: int, members: int, *, device: torch.device
) -> Tensor:
    """Groups rows by position: group (s, j) has position s of sequences j·M … j·M + M − 1; (G, M).

    Raises:
        ValueError: the sequences do not form whole groups.
    """
    if batch_size % members:
        raise ValueError(
            f"{batch_size} sequences are not whole groups of {members}: train with micro-batches "
            f"that are multiples of {members}, and evaluate a single sequence with a group context "
            f"of {members - 1} (evaluation/group_context.py)"
        )
    # Rows are sequence-major, so contiguous cuts would group neighbours of one sequence.
    rows_jMS = torch.arange(num_rows, device=device).view(batch_size // members, members, -1)
    return rows_jMS.permute(2, 0, 1).reshape(-1, members)


def rows_by_neighbourhood(
    num_rows: int, batch_size: int, members: int, *, device: torch.device
) -> Tensor:
    """Cuts every sequence into groups of M neighbouring positions: (G, M).

    Raises:
        ValueError: M does not divide the length of a sequence.
    """
    length = num_rows // batch_size
    if length % members:
        raise ValueError(
            f'axis="sequence" with groups of {members}: {length} positions of a sequence are not '
            "whole groups; choose a divisor"
        )
    return torch.arange(num_rows, device=device).view(-1, members)


def one_hot_of_largest(weights: Tensor, *, axis: int) -> Tensor:
    """Returns 1 at the largest entry along an axis (the first of equals), 0 elsewhere."""
    return torch.zeros_like(weights).scatter_(axis, weights.argmax(axis, keepdim=True), 1.0)
