"""What `moebius simulate` is asked: a model or a recorded run, made into calls for the simulated ranks.

A model routes tokens (random ones, or a trained run's validation text): every rank's micro-batch goes through the whole model on
one rank, and what every sparse layer got, how it was routed and what came out is what the simulated ranks must carry and
reproduce. A recorded run gives the routes alone; rows and gate weights are then drawn, for they do not decide what travels.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..data_pipeline.loader import RowReader
from ..data_pipeline.shards import TokenStore
from ..distributed.layout import MeshConfig, check_experts, plan_layout
from ..distributed.simulate import Cluster, RoutedCall
from ..model.config import ModelConfig
from ..model.initialise import draw, initialise
from ..model.moe import SparseLayer
from ..model.precision import cast_weights, forward_in
from ..model.routing import Routes
from ..model.transformer import Transformer
from .config import Config
from .routing_replay import DealtCall, replay
from .routing_tap import TappedCall, sparse_layers, tap
from .state import seed_micro_batch

DEFAULT_RANKS = 8
DEFAULT_TOKENS = 64
_NODE = 8  # ranks of a node, unless told otherwise

Bank = Callable[[str], nn.Module]
Tokens = Callable[[int, int], Tensor]  # (step, rank) → (B, S)


@dataclass(frozen=True)
class Ranks:
    """How the ranks are asked for; None: as the configuration or the defaults say."""

    ep: int | None = None
    world_size: int | None = None
    ranks_per_node: int | None = None
    dispatcher: str | None = None
    overlap_chunks: int | None = None


def make_cluster(config: Config, asked: Ranks) -> Cluster:
    """The simulated ranks: `asked`, else what `mesh` says, else 8 of one EP group, 8 to a node.

    Raises:
        ValueError: the sizes do not fit each other or the model's experts.
    """
    for name, value in (
        ("--ep", asked.ep),
        ("--world-size", asked.world_size),
        ("--ranks-per-node", asked.ranks_per_node),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} {value}: at least 1")
    mesh = config.mesh
    ep = asked.ep or (mesh.ep if mesh.ep > 1 else min(DEFAULT_RANKS, asked.world_size or DEFAULT_RANKS))
    dp_shard = mesh.dp_shard if mesh.dp_shard and mesh.dp_shard % ep == 0 else None
    layout = plan_layout(MeshConfig(ep=ep, dp_shard=dp_shard), asked.world_size or dp_shard or ep)
    check_experts(layout, _experts(config.model))
    world = layout.world_size
    return Cluster(
        layout, asked.dispatcher or mesh.dispatcher, asked.overlap_chunks or mesh.overlap_chunks,
        asked.ranks_per_node or (_NODE if world % _NODE == 0 else world),
    )  # fmt: skip


def _experts(model: ModelConfig) -> dict[str, int]:
    counts = model.expert_counts()
    if not counts:
        raise ValueError("the model has no experts: there is nothing to route")
    return counts


# A model's own routing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    """What the ranks' tokens are."""

    tokens: Tokens
    steps: int
    seed: int


def random_tokens(config: Config, *, tokens_per_rank: int, seed: int) -> Tokens:
    """Uniform over the vocabulary.

    Raises:
        ValueError: the router cannot take sequences of that length.
    """
    batch, length = batch_shape(config, tokens_per_rank)

    def make(step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 2**40 + step * 2**20 + rank)
        return torch.randint(config.model.vocab_size, (batch, length), generator=generator)

    return make


def text_tokens(config: Config, *, tokens_per_rank: int, num_ranks: int) -> Tokens:
    """The validation rows of a run's data, one after another, from the beginning again after the last.

    Raises:
        ValueError: the data cannot be read.
    """
    batch, length = batch_shape(config, tokens_per_rank)
    reader = RowReader(TokenStore(Path(config.data.directory), "validation"), length)
    if reader.num_rows < 1:
        raise ValueError(f"{config.data.directory}: its validation split has not one row of {length} tokens")

    def make(step: int, rank: int) -> Tensor:
        first = ((step - 1) * num_ranks + rank) * batch
        return torch.from_numpy(reader.read((first + np.arange(batch)) % reader.num_rows))[:, :-1]

    return make


def batch_shape(config: Config, tokens_per_rank: int) -> tuple[int, int]:
    """(B, S): whole groups of sequences, as long as they may be."""
    group = config.model.group_sequences
    if tokens_per_rank < group:
        raise ValueError(f"--tokens-per-rank {tokens_per_rank}: the router wants groups of {group} sequences")
    length = min(config.data.seq_len, tokens_per_rank // group)
    if config.model.sparse_members:
        config.model.router.check_length(length * config.model.sub_tokens)
    return group * (tokens_per_rank // (group * length)), length


def fresh_model(config: Config) -> Transformer:
    """With starting values."""
    model = Transformer(config.model, backend=config.kernels.backend)
    initialise(model, config.train.seed)
    return model


def calls_of_model(model: Transformer, precision: str, scene: Scene, num_ranks: int) -> Iterator[RoutedCall]:
    """What the model does with the ranks' tokens, call after call."""
    dtype = getattr(torch, precision)
    model.train()
    for step in range(1, scene.steps + 1):
        heard = [_hear(model, dtype, scene, step, rank) for rank in range(num_ranks)]
        for calls in zip(*heard, strict=True):
            first = calls[0]
            yield RoutedCall(
                step, 0, first.depth, first.layer, first.kind, [_held(call.rows_UD) for call in calls],
                [call.routes for call in calls], [_held(call.answers_TO) for call in calls],
            )  # fmt: skip


@torch.no_grad()
def _hear(model: Transformer, dtype: torch.dtype, scene: Scene, step: int, rank: int) -> list[TappedCall]:
    """One rank's micro-batch through all experts. Routers that sample draw from the micro-batch's own stream."""
    with torch.random.fork_rng(devices=[]), tap(model, with_rows=True) as heard:
        seed_micro_batch(scene.seed, step, rank)
        forward_in(model, dtype, scene.tokens(step, rank))
    return heard


def _held(rows: Tensor | None) -> Tensor:
    assert rows is not None
    return rows


def bank_of_model(model: Transformer, precision: str) -> Bank:
    """Its experts as they enter products: by layer."""
    dtype, layers = getattr(torch, precision), dict(sparse_layers(model))
    cast = {} if dtype == torch.float32 else cast_weights(model, dtype)

    def bank(layer: str) -> nn.Module:
        experts = layers[layer].experts
        values = {name: cast.get(f"{layer}.experts.{name}", value) for name, value in experts.named_parameters()}
        return _with(experts, values)

    return bank


def _with(experts: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """The same experts with other weights."""
    other = copy.copy(experts)
    other._parameters = dict.fromkeys(experts._parameters) | {
        name: nn.Parameter(value.detach(), requires_grad=False) for name, value in values.items()
    }
    return other


# A recorded routing -------------------------------------------------------------------------------------------------


def bank_of_config(config: ModelConfig, precision: str, *, backend: str, seed: int) -> Bank:
    """Experts with starting values, drawn layer by layer: a recorded routing needs no others, and none of the dense weights."""
    with torch.device("meta"):
        model = Transformer(config, backend=backend)
    layers, dtype, drawn = dict(sparse_layers(model)), getattr(torch, precision), {}

    def bank(layer: str) -> nn.Module:
        if layer not in layers:
            raise ValueError(f"{layer} was recorded, but the model has no such layer")
        if layer not in drawn:
            experts = layers[layer].experts
            values = {
                name: draw(f"{layer}.experts.{name}", value, seed).to(value.dtype if name.startswith("b_") else dtype)
                for name, value in experts.named_parameters()
            }
            drawn[layer] = _with(experts, values)
        return drawn[layer]

    return bank


def calls_of_trace(
    steps: dict[int, list[Path]], bank: Bank, precision: str, num_ranks: int, seed: int
) -> Iterator[RoutedCall]:
    """Recorded routes with rows and gate weights of our own, and what one rank answers to them.

    Raises:
        ValueError: a file is damaged.
    """
    generator, dtype = torch.Generator().manual_seed(seed), getattr(torch, precision)
    for dealt in replay(steps, num_ranks):
        layer = SparseLayer(bank(dealt.call.layer))  # pyright: ignore[reportArgumentType]
        routes = [_weighted(own, generator) for own in dealt.routes]
        rows = [torch.randn(count, dealt.call.width_in, generator=generator).to(dtype) for count in dealt.num_rows]
        yield _routed(dealt, rows, routes, layer)


@torch.no_grad()
def _routed(dealt: DealtCall, rows: list[Tensor], routes: list[Routes], layer: SparseLayer) -> RoutedCall:
    call = dealt.call
    answers = [layer(own, its) for own, its in zip(rows, routes, strict=True)]
    return RoutedCall(dealt.step, call.micro_batch, call.depth, call.layer, call.kind, rows, routes, answers)


def _weighted(routes: Routes, generator: torch.Generator) -> Routes:
    return replace(routes, weight_N=torch.rand(len(routes.expert_N), generator=generator))


def chosen_steps(steps: dict[int, list[Path]], most: int | None) -> dict[int, list[Path]]:
    """At most so many of the recorded steps, evenly spread, the first and the last among them."""
    numbers: Sequence[int] = sorted(steps)
    if most is None or most >= len(numbers):
        return steps
    picked = np.unique(np.linspace(0, len(numbers) - 1, most).round().astype(int))
    return {numbers[index]: steps[numbers[index]] for index in picked}
