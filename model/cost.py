"""What a model costs: its parameters, and its FLOPs per token by formula.

A multiply-accumulate is two FLOPs. Only matrix products count, as in torch's FlopCounterMode, which
agrees with `forward_flops` exactly. Attention counts all S × S scores, masked or not, because the
plain product computes them all. The backward pass has two products for each forward one, so
training costs three times the forward pass. Recomputation is not counted.

Capacities and halting are ignored: the formula serves every row, which gives an upper bound. A
transition costs what it does while mixing. Over the peak of the GPUs, training's FLOPs give the MFU (model
FLOPs utilisation, PaLM, arXiv 2204.02311): drawn loops count with their mean.

Parameters are counted on a model built on the meta device, which takes milliseconds and no memory.

Legend: S positions, D model width, W heads × their channels, F hidden width of an expert, E
experts, K of them chosen.
"""

from dataclasses import dataclass, fields, replace
from typing import cast

import torch
from torch import nn

from ..kernels.reference import columns_of
from .block import Layer
from .config.attention_config import (
    DenseAttentionConfig,
    MLAConfig,
    MoMHAConfig,
    SwitchHeadConfig,
)
from .config.feed_forward_config import ExpertsConfig
from .config.model_config import ModelConfig
from .loops.depth import shares_of_depths
from .moe import SparseFeedForward, SparseLayer
from .transformer import Transformer

# FLOP/s of dense products in bfloat16, and in float32 without TF32, by the driver's name: those of
# planning/hardware.py, which has the sources. Cards with PCIe and parts of a GPU are slower.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": (312e12, 19.5e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 19.5e12),
    "NVIDIA H100 80GB HBM3": (989e12, 67e12),
    "NVIDIA H200": (989e12, 67e12),
    "NVIDIA B200": (2.25e15, 80e12),
    "NVIDIA GB200": (2.25e15, 80e12),
}


@dataclass(frozen=True)
class Parameters:
    """Counts a model's parameters.

    Active parameters serve one token in one pass over the distinct layers: everything dense (with
    the whole embedding table, as in published figures) and one token's experts. Further repeats may
    choose others.
    """

    total: int
    in_layers: int  # of the distinct layers, including the halting gate
    active: int


@dataclass(frozen=True)
class Flops:
    """Counts the FLOPs of one token in one forward pass, by part."""

    attention_projections: float = 0  # Q, K, V, O, dense or by experts
    attention_scores: float = 0  # scores, and the weighted sums of values
    feed_forward: float = 0  # routed and shared experts, and dense layers
    sub_tokens: float = 0  # head and merge maps of Multi-Head MoE
    # routers of feed-forward and attention, merging and emitting of mixtures, halting
    routing: float = 0
    injection: float = 0  # the input of every loop
    read_out: float = 0
    # not parts: what the loss reads of loops before the last, what the backward pass leaves out, and
    # what drawn numbers of loops add to training on average
    earlier_reads: float = 0
    no_gradient: float = 0
    drawn_depths: float = 0

    @property
    def forward(self) -> float:
        """Returns the FLOPs of the forward pass in evaluation, all parts together."""
        parts = [field.name for field in fields(self)][:-3]
        return sum(getattr(self, part) for part in parts)

    @property
    def training(self) -> float:
        """Returns the FLOPs of the forward and the backward pass, the mean over drawn depths."""
        return 3 * (self.forward + self.earlier_reads) - self.no_gradient + self.drawn_depths

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            *(getattr(self, field.name) + getattr(other, field.name) for field in fields(self))
        )


@dataclass(frozen=True)
class Size:
    """Counts the parameters, FLOPs and tokens of a run, without allocating its model."""

    parameters: Parameters
    flops: Flops
    """FLOPs of one token: `.forward`, and `.training` with the backward pass."""
    tokens: int
    """Tokens of the whole run."""

    @property
    def training_flops(self) -> float:
        """Returns the FLOPs of the whole run, forward and backward."""
        return self.flops.training * self.tokens


def count_parameters(config: ModelConfig, seq_len: int) -> Parameters:
    """Counts the model's parameters; Soft MoE's active ones depend on the sequence length."""
    with torch.device("meta"):
        model = Transformer(config)
    parts = model.group, model.loops, model.halting
    in_layers = sum(_numel(part) for part in parts if part is not None)
    idle = sum(_idle(config, cast(Layer, layer), seq_len) for layer in model.group)
    total = _numel(model)
    return Parameters(total, in_layers, round(total - idle))


def forward_flops(config: ModelConfig, seq_len: int) -> Flops:
    """Computes the FLOPs of one token by formula, in sequences of `seq_len` positions."""
    found = _at_depth(config, seq_len)
    shares = shares_of_depths(config.loops.depth, config.num_repeats)
    mean = sum(
        share * _at_depth(config.with_loops(loops), seq_len).training
        for loops, share in shares.items()
    )
    return replace(found, drawn_depths=mean - found.training)


def _at_depth(config: ModelConfig, seq_len: int) -> Flops:
    """Computes the FLOPs of one token with R loops."""
    schedule = config.schedule
    sparse = None if config.experts is None else _experts(config, config.experts, seq_len)
    layers = [
        _attention(config, seq_len)
        + (sparse if sparse and config.has_experts(step.member) else _dense(config))
        for step in schedule
    ]
    parts = [*layers, _injection(config), _earlier_reads(config, layers)]
    first = config.loops.depth.first_with_gradient(config.num_repeats)
    parts += [
        Flops(no_gradient=2 * layer.forward)
        for layer, step in zip(layers, schedule, strict=True)
        if step.loop is not None and step.loop < first
    ]
    if config.halting is not None:
        parts += [Flops(routing=2 * config.d_model * (config.d_model + 2))] * (len(layers) - 1)
    return sum(parts, Flops(read_out=2 * config.d_model * config.vocab_size))


def is_upper_bound(config: ModelConfig) -> bool:
    """Returns whether some tokens may cost less: refused by an expert, or halted."""
    return config.halting is not None or (
        config.experts is not None and config.experts.router.may_serve_fewer
    )


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _idle(config: ModelConfig, layer: Layer, seq_len: int) -> float:
    """Counts the parameters of experts that do not serve one token."""
    idle, attention, experts = 0.0, config.attention, config.experts
    for bank in layer.attention.modules():
        if isinstance(bank, SparseLayer) and isinstance(attention, SwitchHeadConfig | MoMHAConfig):
            idle += (1 - attention.top_k / attention.num_experts) * _numel(bank)
    if isinstance(layer.feed_forward, SparseFeedForward) and experts is not None:
        served = experts.sub_tokens * experts.experts_per_row(seq_len)
        share = min(1.0, served / experts.num_experts)
        idle += (1 - share) * _numel(layer.feed_forward.sparse)
    return idle


def _attention(config: ModelConfig, seq_len: int) -> Flops:
    attention, d_model = config.attention, config.d_model
    width = attention.num_heads * attention.d_head
    projection, scores = 2 * d_model * width, 4 * seq_len * width
    if isinstance(attention, MoMHAConfig):
        # K and V are dense; the router has two layers; every expert has its own scores
        relative = 2 * width * attention.max_distance
        return Flops(
            attention_projections=2 * (1 + attention.top_k) * projection,
            attention_scores=attention.top_k * (scores + relative),
            routing=2 * d_model * (d_model + attention.num_experts),
        )
    if isinstance(attention, SwitchHeadConfig) and attention.has_experts:  # Q and K are dense
        return Flops(
            attention_projections=2 * (1 + attention.top_k) * projection,
            attention_scores=scores,
            routing=2 * 2 * d_model * attention.expert_count,
        )
    if isinstance(attention, MLAConfig):
        return _latent_attention(attention, d_model, seq_len)
    if isinstance(attention, DenseAttentionConfig):
        shared = attention.kv_heads / attention.num_heads  # of keys and values
        sink = int(attention.sinks)  # one more key, and one more channel for its score
        scores = 2 * (seq_len + sink) * (2 * width + sink * attention.num_heads)
        return Flops(attention_projections=2 * (1 + shared) * projection, attention_scores=scores)
    gates = 2 * d_model * attention.num_heads if attention.kind == "switchhead" else 0
    return Flops(attention_projections=4 * projection, attention_scores=scores, routing=gates)


def _latent_attention(attention: MLAConfig, d_model: int, seq_len: int) -> Flops:
    heads, rank = attention.num_heads, attention.q_rank
    of_query = heads * (attention.d_head + attention.d_rotary)
    of_value = heads * attention.d_value
    maps = d_model * of_query if rank is None else rank * (d_model + of_query)
    maps += d_model * (attention.kv_rank + attention.d_rotary)
    maps += attention.kv_rank * (heads * attention.d_head + of_value) + of_value * d_model
    return Flops(
        attention_projections=2 * maps, attention_scores=2 * seq_len * (of_query + of_value)
    )


def _injection(config: ModelConfig) -> Flops:
    """Computes the FLOPs of reading e once, and of what a loop, or the coda, does to the state."""
    loops, product = config.loops, 2 * config.d_model**2
    if loops.inject == "decay":
        return Flops(injection=2 * product)
    if loops.inject != "linear":
        return Flops()
    first = loops.depth.first_with_gradient(config.num_repeats)
    state_is_given = first > 0 or loops.start != "embedding"  # and its gradient is not wanted
    return Flops(
        injection=(1 + config.num_repeats) * product,
        no_gradient=(2 * first + state_is_given) * product,
    )


def _earlier_reads(config: ModelConfig, layers: list[Flops]) -> Flops:
    """Computes the FLOPs of reading loops before the last one, and of the exit gate."""
    loops, d_model = config.loops, config.d_model
    each = 2 * d_model * config.vocab_size + (2 * d_model**2 if loops.inject == "decay" else 0)
    each += sum(layer.forward for layer in layers[len(layers) - loops.coda :])
    found = (len(loops.read_loops(config.num_repeats)) - 1) * each
    if loops.exit_entropy is None:
        return Flops(earlier_reads=found)
    # the last loop takes what is left, and its gate has no gradient
    gates = 2 * d_model * config.num_repeats
    return Flops(earlier_reads=found + gates, no_gradient=2 * 2 * d_model)


def _dense(config: ModelConfig) -> Flops:
    dense = config.feed_forward
    return Flops(feed_forward=_mlp(dense.activation, config.d_model, dense.d_feed_forward))


def _experts(config: ModelConfig, experts: ExpertsConfig, seq_len: int) -> Flops:
    """Computes the FLOPs of a feed-forward with experts, whose rows are tokens or sub-tokens."""
    rows, d_row = experts.sub_tokens, config.d_model // experts.sub_tokens
    expert = _mlp(experts.activation, d_row, experts.d_expert)
    routed = rows * experts.experts_per_row(seq_len) * expert
    shared = _mlp(experts.activation, config.d_model, experts.d_shared)
    shared += 2 * config.d_model * experts.shared_gate
    # In peri-layernorm, router and experts read different rows, so the head map runs twice.
    maps = 0 if rows == 1 else 3 if config.norm == "peri" else 2
    return Flops(
        feed_forward=routed + shared,
        sub_tokens=maps * 2 * config.d_model**2,
        routing=rows * experts.router.router_flops(d_row, experts.num_experts),
    )


def _mlp(activation: str, d_row: int, width: int) -> int:
    return 2 * d_row * (columns_of(width, activation) + width)
