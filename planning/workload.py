"""Reduces a model to its demands per token: weights, FLOPs, kept bytes and routes.

Weights and FLOPs come from model/cost.py. Kept bytes are counted: forward passes on the meta device
at three lengths show, in their linear part, what autograd keeps per token. (The constant part is
copies of weights. The quadratic part is attention scores, which a fused kernel does not keep.) This
takes about 0.02 s per depth step.

Legend: R repeats of a layer group, H heads, E experts (of one head), K chosen.
"""

from collections import Counter
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..distributed.parallelize import expert_names
from ..kernels.reference import columns_of
from ..model.block import Layer
from ..model.config.attention_config import AttentionConfig, MoMHAConfig, SwitchHeadConfig
from ..model.config.feed_forward_config import ExpertsConfig
from ..model.config.model_config import ModelConfig
from ..model.cost import count_parameters, forward_flops
from ..model.execution.precision import forward_in
from ..model.execution.roles import roles_of
from ..model.experts import ExpertLinears
from ..model.moe import SparseFeedForward, SparseLayer
from ..model.routers.mixture import TokenMixingConfig
from ..model.routers.soft import SlotMixingConfig
from ..model.routers.transition import TransitionConfig
from ..model.transformer import Transformer

# Sent with a row, per route: expert, row, target (int32) and gate weight (float32).
ROUTE_BYTES = 16
KEPT_PER_ROUTE = 36  # source, expert, target and order (int64) and the gate weight (float32)

# What a bank's use costs the host, in other operations: from MoEUT's steps beside dense models' on
# an H200 (benchmarks/results/step_gpu.json).
ROUTED_LAUNCHES = 39

_MIXING = (TokenMixingConfig, SlotMixingConfig, TransitionConfig)

# What one sent row stands for: a token (or sub-token) with all its routes, one head, or one route.
Unit = Literal["row", "head", "route"]


@dataclass(frozen=True)
class Bank:
    """Describes one bank of experts and what one token asks of it per use."""

    kind: str  # feed_forward, value, output, query
    router: str  # several banks may share one
    num_experts: int  # E, of one head
    top_k: float  # K, of one head
    d_in: int
    d_out: int
    weights_per_expert: float  # that enter products; a route costs twice as many FLOPs
    kept_columns: int  # of the hidden row, kept for the backward pass
    heads: int = 1  # H: each chooses among its own E
    rows: float = 1.0  # choosing rows per token: sub-tokens, or a mixture's rows
    source: Unit = "row"  # sent to the experts
    target: Unit = "row"  # sent back
    group_limit: tuple[int, int] | None = None  # (groups of experts, groups that may be chosen)
    balanced: bool = False  # by construction
    route_bytes: float = ROUTE_BYTES

    @property
    def total_experts(self) -> int:
        """Returns the experts of all heads."""
        return self.heads * self.num_experts

    def fullest(self, num_ranks: int) -> int:
        """Returns the experts of the first rank, which holds one more if they do not divide."""
        return -(-self.total_experts // num_ranks)

    @property
    def routes(self) -> float:
        """Returns the routes per token and use."""
        return self.rows * self.heads * self.top_k

    @property
    def flops(self) -> float:
        """Returns the FLOPs of a forward pass per token and use."""
        return 2 * self.routes * self.weights_per_expert

    def units(self, unit: Unit) -> float:
        """Returns the rows of that kind per token."""
        return {"row": self.rows, "head": self.rows * self.heads, "route": self.routes}[unit]


@dataclass(frozen=True)
class Member:
    """Describes a layer of the group that repeats."""

    dense_parameters: float
    banks: tuple[Bank, ...]
    copies: int = 1  # layers of the group that are like this one
    repeats: int = 1  # applications of each of them in a pass

    def expert_parameters(self, ep: int = 1) -> float:
        """Returns the weights of its banks on the fullest of `ep` ranks."""
        return sum(bank.fullest(ep) * bank.weights_per_expert for bank in self.banks)


@dataclass(frozen=True)
class MuonWork:
    """Describes what Muon updates beside all experts, and the work of making it all orthogonal."""

    matrices: float
    weights: float
    flops: float
    expert_flops: float  # of all experts


@dataclass(frozen=True)
class Workload:
    """Describes a model by its cost in time, memory and traffic, per token except for weights."""

    members: tuple[Member, ...]
    root_parameters: float  # embedding, read-out, and what belongs to no layer
    dense_flops: float  # forward, of everything but the routed experts
    saved_bytes: float  # kept for the backward pass, without what the banks keep
    d_model: int
    vocab_size: int
    precision: str  # of the products
    launches: float = 0.0  # operations that the host launches in a forward pass
    odd_flops: tuple[float, ...] = ()  # of the dense ones, with one or two odd widths
    muon: MuonWork | None = None  # None: AdamW updates all weights

    @property
    def bytes_per_element(self) -> int:
        """Returns the bytes per element of rows, and of weights in products."""
        return 2 if self.precision == "bfloat16" else 4

    @property
    def num_layers(self) -> int:
        """Returns the number of depth steps."""
        return sum(member.repeats * member.copies for member in self.members)

    @property
    def repeats(self) -> int:
        """Returns R: how often a pass applies the layers of the core."""
        return max(member.repeats for member in self.members)

    @cached_property
    def uses(self) -> tuple[tuple[Bank, int], ...]:
        """Returns every bank and how often a pass uses it."""
        found: dict[Bank, int] = {}
        for member in self.members:
            for bank in member.banks:
                found[bank] = found.get(bank, 0) + member.copies * member.repeats
        return tuple(found.items())

    @cached_property
    def forward_flops(self) -> float:
        """Returns the FLOPs of a forward pass per token, routed experts included."""
        return self.dense_flops + sum(uses * bank.flops for bank, uses in self.uses)

    @cached_property
    def dense_parameters(self) -> float:
        """Returns the weights of everything but the banks."""
        return self.root_parameters + sum(
            member.copies * member.dense_parameters for member in self.members
        )

    def expert_parameters(self, ep: int = 1) -> float:
        """Returns the weights of all banks on the fullest of `ep` ranks."""
        return sum(member.copies * member.expert_parameters(ep) for member in self.members)


@lru_cache(maxsize=64)
def describe(config: ModelConfig, *, seq_len: int, precision: str = "bfloat16") -> Workload:
    """Returns the workload of a model in sequences of `seq_len` tokens."""
    with torch.device("meta"):
        model = Transformer(_without_limit(config, 3 * seq_len), backend="segments")
    layers = [cast(Layer, layer) for layer in model.group]
    repeats = Counter(step.member for step in config.schedule)
    alike = Counter(
        _member(config, layer, seq_len, repeats[member]) for member, layer in enumerate(layers)
    )
    members = tuple(replace(member, copies=copies) for member, copies in alike.items())
    root = count_parameters(config, seq_len).total - sum(map(_numel, layers))
    plain = Workload(members, root, 0.0, 0.0, config.d_model, config.vocab_size, precision)
    kept = sum(uses * kept_by_bank(bank, plain.bytes_per_element) for bank, uses in plain.uses)
    saved_bytes, seen = _count(model, config.group_sequences, seq_len, precision)
    tokens = config.group_sequences * seq_len
    return replace(
        plain,
        dense_flops=forward_flops(config, seq_len).forward - plain.forward_flops,
        saved_bytes=saved_bytes - kept,
        launches=seen.count + ROUTED_LAUNCHES * sum(uses for _, uses in plain.uses),
        odd_flops=tuple(flops / tokens for flops in seen.flops[1:]),
    )


def with_muon(work: Workload, config: ModelConfig, *, steps: int, routers: bool) -> Workload:
    """Returns the workload of a model whose matrices Muon updates, in `steps` iterations."""
    with torch.device("meta"):
        model = Transformer(config, backend="segments")
    experts, muon = expert_names(model), MuonWork(0, 0.0, 0.0, 0.0)
    for name, role in roles_of(model).items():
        if role.is_muons(routers=routers):
            shape = model.get_parameter(name).shape
            outputs, inputs = shape[:-3:-1] if role.kind == "bank" else shape[-2:]
            m, n = sorted((outputs // role.maps, inputs))
            flops = 4.0 * steps * shape[:-2].numel() * role.maps * m * m * n
            more = (0, 0.0, 0.0, flops) if name in experts else (1, shape.numel(), flops, 0.0)
            muon = MuonWork(*map(sum, zip(astuple(muon), more, strict=True)))
    return replace(work, muon=muon)


def _without_limit(config: ModelConfig, length: int) -> ModelConfig:
    """Returns the model with enough learned positions, if it learns them."""
    learned = config.attention.max_positions
    if learned is None:
        return config
    return config.changed({"attention.positions.max_positions": max(learned, length)})


def blocks_of_heads(bank: Bank, num_groups: int, group: int) -> list[float]:
    """Returns how many experts of every head lie in one of `num_groups` equal contiguous blocks."""
    size = bank.total_experts / num_groups
    first, last = group * size, (group + 1) * size
    starts = (head * bank.num_experts for head in range(bank.heads))
    return [max(0.0, min(last, start + bank.num_experts) - max(first, start)) for start in starts]


def kept_by_bank(bank: Bank, bytes_per_element: int) -> float:
    """Returns the bytes of a token's routes that the kernels keep for the backward pass.

    These are hidden rows and indices on the rank that serves the routes.
    """
    return bank.routes * (bank.kept_columns * bytes_per_element + KEPT_PER_ROUTE)


def _count(
    model: Transformer, num_sequences: int, seq_len: int, precision: str
) -> tuple[float, "_Launches"]:
    """Returns the bytes that autograd keeps per additional token, and the operations of a pass.

    The bytes are extrapolated from sequences once, twice and three times as long.
    """
    shape = (num_sequences, seq_len)
    with _Launches() as launches:
        first = _saved(model, shape, precision)
    second, third = (_saved(model, (num_sequences, n * seq_len), precision) for n in (2, 3))
    quadratic = (third - 2 * second + first) / 2
    return (second - first - 3 * quadratic) / seq_len / num_sequences, launches


class _Launches(TorchDispatchMode):
    """Counts operations that launch (no views), and FLOPs by a product's widths that are odd: a
    row of them is no multiple of 16 bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count, self.flops = 0, [0.0, 0.0, 0.0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        self.count += not any(
            entry.alias_info is not None and not entry.alias_info.is_write for entry in returns
        )
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            rows, (width, columns) = args[-2], args[-1].shape
            odd = sum(size * rows.itemsize % 16 > 0 for size in (width, columns))
            self.flops[odd] += 2.0 * rows.numel() * columns
        return func(*args, **(kwargs or {}))


def _saved(model: Transformer, shape: tuple[int, int], precision: str) -> float:
    """Returns the bytes of all storages that a forward pass keeps, without parameters."""
    # Holding the storages keeps torch from reusing their numbers.
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage
        return tensor

    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    keeping = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.device("meta"), keeping:
        forward_in(model, getattr(torch, precision), torch.zeros(shape, dtype=torch.int64))
    return sum(storage.nbytes() for number, storage in kept.items() if number not in parameters)


def _member(config: ModelConfig, layer: Layer, seq_len: int, repeats: int) -> Member:
    banks = tuple(
        _linear_bank(config.attention, name, cast(ExpertLinears, module.experts))
        for name, module in layer.attention.named_children()
        if isinstance(module, SparseLayer)
    )
    if isinstance(layer.feed_forward, SparseFeedForward):
        assert config.experts is not None
        d_row = config.d_model // config.experts.sub_tokens
        banks += (_feed_forward_bank(config.experts, layer.feed_forward, d_row, seq_len),)
    experts = sum(_numel(module) for module in layer.modules() if isinstance(module, SparseLayer))
    return Member(_numel(layer) - experts, banks, repeats=repeats)


def _feed_forward_bank(
    config: ExpertsConfig, layer: SparseFeedForward, d_row: int, seq_len: int
) -> Bank:
    router, active = config.router, config.experts_per_row(seq_len)
    mixes = isinstance(router, _MIXING)  # sends mixtures, each to one expert, instead of rows
    groups = (getattr(router, "num_groups", 1), getattr(router, "kept_groups", 1))
    columns = columns_of(config.d_expert, config.activation)
    return Bank(
        "feed_forward",
        "feed_forward",
        config.num_experts,
        1.0 if mixes else active,
        d_row,
        d_row,
        _numel(layer.sparse) / config.num_experts,
        columns,
        rows=config.sub_tokens * (active if mixes else 1.0),
        group_limit=groups if groups[0] > 1 else None,
        balanced=router.promises.balanced,
    )


def _linear_bank(config: AttentionConfig, name: str, experts: ExpertLinears) -> Bank:
    assert isinstance(config, SwitchHeadConfig | MoMHAConfig)
    _, d_in, d_out = experts.weight.shape
    momha = isinstance(config, MoMHAConfig)
    narrow: Unit = "route" if momha else "head"  # on the heads' side of the projection
    return Bank(
        name,
        "attention" if momha else name,
        config.num_experts,
        config.top_k,
        d_in,
        d_out,
        d_in * d_out,
        d_out if d_out <= d_in else 0,
        heads=1 if momha else config.num_heads,
        source=narrow if name == "output" else "row",
        target="row" if name == "output" else narrow,
    )


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
