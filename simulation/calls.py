"""Makes the calls that simulated ranks carry out, from a model or from a recorded run.

A model routes tokens (random ones, or a trained run's validation text): every rank's micro-batch
goes through the whole model on one rank, and the simulated ranks must carry what every sparse layer
got and reproduce what came out. A recorded run gives only the routes; rows and gate weights are
then drawn, because they do not decide what travels.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..data_pipeline.read.rows import SplitReader
from ..distributed.checkpoint.format import find_checkpoint, read_meta
from ..distributed.dispatch.expert_map import ExpertMap
from ..model.config.model_config import ModelConfig
from ..model.execution.precision import cast_weights, forward_in
from ..model.initialise import draw, initialise
from ..model.moe import SparseLayer
from ..model.transformer import Transformer
from ..train.config.run_config import Config
from ..train.record.route_tap import RoutedCall, sparse_layers, tap
from ..train.state import seed_micro_batch
from .dispatch import Cluster, ExpertsOfLayer, Simulation, simulate
from .ranks import RequestedRanks, at_least_one, experts_of, make_cluster
from .recorded_routes import read_rank, recorded_steps
from .replay import replay
from .threads import MOST_THREADS

MOST_TOKENS = 2**24  # of a rank and step: their rows, also those of 256 heads, have numbers

Tokens = Callable[[int, int], Tensor]  # (step, rank) → (B, S)


@dataclass(frozen=True)
class CallSource:
    """Where calls come from: the same ones whenever asked, for any number of ranks."""

    title: str
    config: Config
    tokens: str  # where they come from and how many
    experts_of_layer: ExpertsOfLayer
    calls: Callable[[int], Iterator[list[RoutedCall]]]  # of so many ranks
    # Where a trained run has moved its experts, by layer.
    expert_maps: Mapping[str, ExpertMap] = field(default_factory=dict)


def simulate_all(
    source: CallSource, asked: RequestedRanks, dispatchers: Sequence[str | None]
) -> tuple[Simulation, ...]:
    """Simulates the same calls with every dispatcher.

    Raises:
        ValueError: the request cannot be carried out.
        RankFailed: an exchange failed.
    """
    clusters = [_place(make_cluster(source.config, asked, each), source) for each in dispatchers]
    return tuple(
        simulate(source.calls(cluster.layout.world_size), source.experts_of_layer, cluster)
        for cluster in clusters
    )


def _place(cluster: Cluster, source: CallSource) -> Cluster:
    """Puts the experts where the run had them, if its EP groups were as large."""
    maps = source.expert_maps
    if any(len(found.slots_P) != cluster.layout.ep for found in maps.values()):
        return cluster
    return replace(cluster, expert_maps=maps)


def expert_maps_of(run_dir: Path, step: int) -> dict[str, ExpertMap]:
    """Returns where a run had its experts at a checkpoint, by layer; empty if none ever moved."""
    meta = read_meta(find_checkpoint(run_dir, step)).meta
    return {name: ExpertMap.from_dict(bank["homes"]) for name, bank in meta["experts"].items()}


def source_from_model(
    title: str,
    config: Config,
    trained: Transformer | None,
    *,
    tokens_per_rank: int,
    steps: int,
    expert_maps: Mapping[str, ExpertMap],
) -> CallSource:
    """Returns the calls of a model that routes tokens itself.

    A trained one routes its validation text, a fresh one random tokens.

    Raises:
        ValueError: the router cannot take so few tokens, or the text cannot be read.
    """
    at_least_one(steps=steps, tokens_per_rank=tokens_per_rank)
    experts_of(config.model)
    batch, length = batch_shape(config, tokens_per_rank)
    model, precision = trained or fresh_model(config), config.train.precision

    def calls(num_ranks: int) -> Iterator[list[RoutedCall]]:
        make = text_tokens if trained else random_tokens
        tokens = make(config, batch, length, num_ranks=num_ranks)
        batches = TokenBatches(tokens, steps, config.train.seed)
        return calls_of_model(model, precision, batches, num_ranks)

    what = "of the validation text" if trained else "at random"
    count = "1 step" if steps == 1 else f"{steps} steps"
    words = f"{batch} × {length} tokens {what} per rank and step, {count}, {precision}"
    experts = experts_of_model(model, precision)
    return CallSource(title, config, words, experts, calls, expert_maps)


def source_from_trace(run_dir: Path, *, steps: int | None) -> CallSource:
    """Returns the calls of a recorded run, of at most so many steps.

    Raises:
        ValueError: nothing was recorded there.
    """
    at_least_one(steps=steps)
    config = config_of_run(run_dir)
    files, precision = chosen_steps(recorded_steps(run_dir), steps), config.train.precision
    experts_of_layer = initial_experts(
        config.model, precision, backend=config.kernels.backend, seed=config.train.seed
    )
    first = files[min(files)]
    tokens = sum(read_rank(first[0]).tokens) * len(first)
    span = f"{len(files)} recorded steps, {min(files)} to {max(files)}"
    recorded = span if len(files) > 1 else f"step {min(files)}"
    words = f"{recorded}, of {tokens:,} tokens; {len(first)} ranks then; {precision}"

    def calls(num_ranks: int) -> Iterator[list[RoutedCall]]:
        return calls_of_trace(files, experts_of_layer, precision, num_ranks)

    return CallSource(f"trace of {run_dir.name}", config, words, experts_of_layer, calls)


def config_of_run(run_dir: Path) -> Config:
    """Reads the configuration of a run folder.

    Raises:
        ValueError: it is none.
    """
    if not (run_dir / "config.json").exists():
        raise ValueError(f"{run_dir}: is not a run folder (no config.json)")
    return Config.load(run_dir / "config.json")


# A model's own routing ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenBatches:
    """The tokens of every step and rank, and from which seed routers draw."""

    tokens: Tokens
    steps: int
    seed: int


def random_tokens(config: Config, batch: int, length: int, *, num_ranks: int) -> Tokens:
    """Returns tokens uniform over the vocabulary; a rank's do not depend on how many ranks are."""
    assert num_ranks <= MOST_THREADS, "more ranks would draw the tokens of other steps"
    seed = config.train.seed % 2**31

    def make(step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed((seed * 2**20 + step) * MOST_THREADS + rank)
        return torch.randint(config.model.vocab_size, (batch, length), generator=generator)

    return make


def text_tokens(config: Config, batch: int, length: int, *, num_ranks: int) -> Tokens:
    """Returns the validation rows of a run's data, over and over.

    Raises:
        ValueError: the data cannot be read.
    """
    reader = SplitReader(config.data.directory, "validation", seq_len=length)
    if reader.num_rows < 1:
        raise ValueError(
            f"{config.data.directory}: its validation split has not one row of {length} tokens"
        )

    def make(step: int, rank: int) -> Tensor:
        first = ((step - 1) * num_ranks + rank) * batch
        rows = reader.read((first + np.arange(batch)) % reader.num_rows)
        return torch.from_numpy(rows.tokens[:, :-1])

    return make


def batch_shape(config: Config, tokens_per_rank: int) -> tuple[int, int]:
    """Returns (B, S) for so many tokens: whole groups of sequences, as long as they may be.

    Raises:
        ValueError: the router cannot take so few tokens, or they are more than can be numbered.
    """
    group = config.model.group_sequences
    if tokens_per_rank > MOST_TOKENS:
        raise ValueError(f"--tokens-per-rank {tokens_per_rank}: at most {MOST_TOKENS:,}")
    if tokens_per_rank < group:
        raise ValueError(
            f"--tokens-per-rank {tokens_per_rank}: the router wants groups of {group} sequences"
        )
    length = min(config.data.seq_len, tokens_per_rank // group)
    experts = config.model.experts
    if experts is not None:
        experts.router.check_length(length * experts.sub_tokens)
    return group * (tokens_per_rank // (group * length)), length


def fresh_model(config: Config) -> Transformer:
    """Returns the configured model with initial weights."""
    model = Transformer(config.model, backend=config.kernels.backend)
    initialise(model, config.train.seed)
    return model


def calls_of_model(
    model: Transformer, precision: str, batches: TokenBatches, num_ranks: int
) -> Iterator[list[RoutedCall]]:
    """Yields what the model routes with the ranks' tokens, call after call: one entry per rank."""
    dtype = getattr(torch, precision)
    model.train()
    for step in range(1, batches.steps + 1):
        recorded = [_record_rank(model, dtype, batches, step, rank) for rank in range(num_ranks)]
        yield from map(list, zip(*recorded, strict=True))


@torch.no_grad()
def _record_rank(
    model: Transformer, dtype: torch.dtype, batches: TokenBatches, step: int, rank: int
) -> list[RoutedCall]:
    """Returns the calls of one rank's micro-batch, routed by the whole model.

    Routers that sample draw from the micro-batch's own stream.
    """
    with (
        torch.random.fork_rng(devices=[]),
        tap(model, step=step, with_values=True) as recorded,
    ):
        seed_micro_batch(batches.seed, step, rank)
        forward_in(model, dtype, batches.tokens(step, rank))
    return recorded


def experts_of_model(model: Transformer, precision: str) -> ExpertsOfLayer:
    """Returns the model's experts by layer, with weights as they enter products."""
    dtype, layers = getattr(torch, precision), dict(sparse_layers(model))
    cast = {} if dtype == torch.float32 else cast_weights(model, dtype)

    def experts_of_layer(layer: str) -> nn.Module:
        experts = layers[layer].experts
        values = {
            name: cast.get(f"{layer}.experts.{name}", value)
            for name, value in experts.named_parameters()
        }
        return _with_weights(experts, values)

    return experts_of_layer


def _with_weights(experts: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """Returns the same experts with other weights."""
    other = copy.copy(experts)
    other._parameters = dict.fromkeys(experts._parameters) | {
        name: nn.Parameter(value.detach(), requires_grad=False) for name, value in values.items()
    }
    return other


# A recorded routing -------------------------------------------------------------------------------


def initial_experts(
    config: ModelConfig, precision: str, *, backend: str, seed: int
) -> ExpertsOfLayer:
    """Returns experts with initial values by layer, drawn when a layer is first asked for.

    A recorded routing needs no others, and none of the dense weights.
    """
    with torch.device("meta"):
        model = Transformer(config, backend=backend)
    layers, dtype = dict(sparse_layers(model)), getattr(torch, precision)
    drawn: dict[str, nn.Module] = {}

    def experts_of_layer(layer: str) -> nn.Module:
        if layer not in layers:
            raise ValueError(f"{layer} was recorded, but the model has no such layer")
        if layer not in drawn:
            values = {}
            for name, value in layers[layer].experts.named_parameters():
                kept_in = value.dtype if name.startswith("b_") else dtype
                values[name] = draw(f"{layer}.experts.{name}", value, seed).to(kept_in)
            drawn[layer] = _with_weights(layers[layer].experts, values)
        return drawn[layer]

    return experts_of_layer


def calls_of_trace(
    steps: dict[int, list[Path]], experts_of_layer: ExpertsOfLayer, precision: str, num_ranks: int
) -> Iterator[list[RoutedCall]]:
    """Yields recorded routes, dealt out to so many ranks, with rows and gate weights drawn.

    The outputs are those of one rank with all experts.

    Raises:
        ValueError: a file is damaged.
    """
    generator, dtype = torch.Generator().manual_seed(0), getattr(torch, precision)
    for dealt in replay(steps, num_ranks):
        experts = experts_of_layer(dealt[0].id.layer)
        layer = SparseLayer(experts)  # pyright: ignore[reportArgumentType]
        weighted = [_with_gate_weights(call, generator) for call in dealt]
        yield [_with_values(call, layer, dtype, generator) for call in weighted]


def _with_gate_weights(call: RoutedCall, generator: torch.Generator) -> RoutedCall:
    weight_N = torch.rand(len(call.routes.expert_N), generator=generator)
    return replace(call, routes=call.routes.with_weights(weight_N))


@torch.no_grad()
def _with_values(
    call: RoutedCall, layer: SparseLayer, dtype: torch.dtype, generator: torch.Generator
) -> RoutedCall:
    rows_UD = torch.randn(call.num_rows, call.width_in, generator=generator).to(dtype)
    return replace(call, rows_UD=rows_UD, outputs_TO=layer(rows_UD, call.routes))


def chosen_steps(steps: dict[int, list[Path]], most: int | None) -> dict[int, list[Path]]:
    """Returns at most so many recorded steps, evenly spread, the first and the last among them."""
    numbers = sorted(steps)
    if most is None or most >= len(numbers):
        return steps
    places = np.linspace(0, len(numbers) - 1, most).round().astype(int)
    return {numbers[place]: steps[numbers[place]] for place in dict.fromkeys(places.tolist())}
