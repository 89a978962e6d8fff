"""Makes the calls that simulated ranks execute, from a model that routes tokens.

Tokens are random, or a trained run's validation text. Every rank's micro-batch goes through the
whole model on one rank; the simulated ranks must send what every sparse layer received and
reproduce its outputs.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ...data_pipeline.read.rows import SplitReader
from ...distributed.checkpoint.format import find_checkpoint, read_meta
from ...distributed.dispatch.expert_map import ExpertMap
from ...model.execution.precision import cast_weights, forward_in
from ...model.initialise import initialise
from ...model.loops.steps import PassOptions
from ...model.transformer import Transformer
from ...train.config.run_config import Config
from ...train.micro_batches import draws_of
from ...train.record.route_tap import RoutedCall, sparse_layers, tap
from ...train.state import seed_micro_batch
from .dispatch import Cluster, ExpertsOfLayer, Simulation, simulate
from .ranks import RequestedRanks, at_least_one, experts_of, make_cluster
from .threads import MOST_THREADS

MOST_TOKENS = 2**24  # per rank and step, so that rows of 256 heads fit into an address

Tokens = Callable[[int, int], Tensor]  # (step, rank) → (B, S)


@dataclass(frozen=True)
class CallSource:
    """Routes tokens through a model, the same calls for any number of ranks.

    A trained model routes its validation text, a fresh one random tokens.

    Raises:
        ValueError: the model has no experts, or the router needs more tokens.
    """

    title: str
    config: Config
    trained: Transformer | None
    tokens_per_rank: int
    steps: int
    expert_maps: Mapping[str, ExpertMap] = field(default_factory=dict)  # a trained run's, by layer

    def __post_init__(self) -> None:
        at_least_one(steps=self.steps, tokens_per_rank=self.tokens_per_rank)
        experts_of(self.config.model)
        batch_shape(self.config, self.tokens_per_rank)

    @property
    def tokens(self) -> str:
        """Returns the number and source of the tokens as text."""
        batch, length = batch_shape(self.config, self.tokens_per_rank)
        origin = "of the validation text" if self.trained else "at random"
        count = "1 step" if self.steps == 1 else f"{self.steps} steps"
        precision = self.config.train.precision
        return f"{batch} × {length} tokens {origin} per rank and step, {count}, {precision}"

    @cached_property
    def model(self) -> Transformer:
        """Returns the trained model, or the configured one with initial weights."""
        if self.trained:
            return self.trained
        model = Transformer(self.config.model, backend=self.config.kernels.backend)
        initialise(model, self.config.train.seed)
        return model

    def calls(self, num_ranks: int) -> Iterator[list[RoutedCall]]:
        """Returns the model's routes call by call, with one entry per rank.

        Raises:
            ValueError: the validation text cannot be read.
        """
        make = text_tokens if self.trained else random_tokens
        shape = batch_shape(self.config, self.tokens_per_rank)
        return self._routed(make(self.config, *shape, num_ranks=num_ranks), num_ranks)

    def _routed(self, tokens: Tokens, num_ranks: int) -> Iterator[list[RoutedCall]]:
        self.model.train()
        for step in range(1, self.steps + 1):
            recorded = [self._record(tokens(step, rank), step, rank) for rank in range(num_ranks)]
            yield from map(list, zip(*recorded, strict=True))

    @torch.no_grad()
    def _record(self, tokens_BS: Tensor, step: int, rank: int) -> list[RoutedCall]:
        """Returns the calls of one rank's micro-batch, routed by the whole model.

        Routers that sample draw as in training.
        """
        train = self.config.train
        with (
            torch.random.fork_rng(devices=[]),
            tap(self.model, step=step, with_values=True) as calls,
        ):
            seed_micro_batch(train.seed, step, rank)
            rows, device = len(tokens_BS), tokens_BS.device
            options = PassOptions(draws=draws_of(train.seed, step, rank, rows, device))
            forward_in(self.model, getattr(torch, train.precision), tokens_BS, options=options)
        return calls


def simulate_all(
    source: CallSource, asked: RequestedRanks, dispatchers: Sequence[str | None]
) -> tuple[Simulation, ...]:
    """Simulates the same calls with every dispatcher.

    Raises:
        ValueError: the request cannot be met.
        RankFailed: an exchange failed.
    """
    clusters = [_place(make_cluster(source.config, asked, each), source) for each in dispatchers]
    experts = experts_of_model(source.model, source.config.train.precision)
    return tuple(
        simulate(source.calls(cluster.layout.world_size), experts, cluster) for cluster in clusters
    )


def _place(cluster: Cluster, source: CallSource) -> Cluster:
    """Places the experts as the run did, if its EP groups have the same size."""
    maps = source.expert_maps
    if any(len(found.slots_P) != cluster.layout.ep for found in maps.values()):
        return cluster
    return replace(cluster, expert_maps=maps)


def expert_maps_of(run_dir: Path, step: int) -> dict[str, ExpertMap]:
    """Returns a run's expert maps at a checkpoint, by layer; empty if no expert ever moved."""
    meta = read_meta(find_checkpoint(run_dir, step)).meta
    return {name: ExpertMap.from_dict(bank["homes"]) for name, bank in meta["experts"].items()}


def random_tokens(config: Config, batch: int, length: int, *, num_ranks: int) -> Tokens:
    """Returns tokens uniform over the vocabulary; a rank's do not depend on the number of ranks."""
    assert num_ranks <= MOST_THREADS, "more ranks would reuse the seeds of other steps"
    seed = config.train.seed % 2**31

    def make(step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed((seed * 2**20 + step) * MOST_THREADS + rank)
        return torch.randint(config.model.vocab_size, (batch, length), generator=generator)

    return make


def text_tokens(config: Config, batch: int, length: int, *, num_ranks: int) -> Tokens:
    """Returns the validation rows of a run's data, repeated without end.

    Raises:
        ValueError: the data cannot be read.
    """
    reader = SplitReader(config.data.directory, "validation", seq_len=length)
    if reader.num_rows < 1:
        raise ValueError(
            f"{config.data.directory}: its validation split is shorter than one row of {length} tokens"
        )

    def make(step: int, rank: int) -> Tensor:
        first = ((step - 1) * num_ranks + rank) * batch
        rows = reader.read((first + np.arange(batch)) % reader.num_rows)
        return torch.from_numpy(rows.tokens[:, :-1])

    return make


def batch_shape(config: Config, tokens_per_rank: int) -> tuple[int, int]:
    """Returns (B, S) for a number of tokens: whole groups of sequences, as long as possible.

    Raises:
        ValueError: there are too few tokens for the router, or too many to number.
    """
    group = config.model.group_sequences
    if tokens_per_rank > MOST_TOKENS:
        raise ValueError(f"--tokens-per-rank {tokens_per_rank}: at most {MOST_TOKENS:,}")
    if tokens_per_rank < group:
        raise ValueError(
            f"--tokens-per-rank {tokens_per_rank}: the router needs groups of {group} sequences"
        )
    length = min(config.data.seq_len, tokens_per_rank // group)
    experts = config.model.experts
    if experts is not None:
        experts.router.check_length(length * experts.sub_tokens)
    return group * (tokens_per_rank // (group * length)), length


def experts_of_model(model: Transformer, precision: str) -> ExpertsOfLayer:
    """Returns the model's experts by layer, with weights in the precision of the products."""
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
    other = copy.copy(experts)
    other._parameters = dict.fromkeys(experts._parameters) | {
        name: nn.Parameter(value.detach(), requires_grad=False) for name, value in values.items()
    }
    return other
