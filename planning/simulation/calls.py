"""Makes the calls that simulated ranks execute, from a model that routes tokens.

Tokens are random, or a trained run's validation text. Every rank's micro-batch goes through the
whole model on one rank; the simulated ranks must send what every sparse layer received and
reproduce its outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from ...data_pipeline.read.rows import SplitReader
from ...distributed.checkpoint.format import read_meta
from ...distributed.dispatch.expert_map import ExpertMap
from ...distributed.layout import Layout, check_experts
from ...model.cost import count_parameters
from ...model.execution.precision import forward_in
from ...model.initialise import initialise
from ...model.loops.steps import PassOptions
from ...model.transformer import Transformer
from ...train.config.run_config import Config
from ...train.micro_batches import pass_draws
from ...train.record.route_tap import RoutedCall, sparse_layers, tap
from ...train.state import seed_micro_batch
from .dispatch import Cluster, SimulatedCall, simulate
from .threads import MOST_THREADS

MOST_TOKENS = 2**24  # per rank and step, so that rows of 256 heads fit into an address
DEFAULT_RANKS = 8  # of an EP group, and of a node


def ranks_of(config: Config, ep: int | None, ranks_per_node: int | None) -> tuple[int, int]:
    """Returns the ranks of the simulated EP group, and how many share a node: as asked, otherwise
    as `mesh` says, otherwise 8.

    Raises:
        ValueError: the sizes do not fit each other or the model's experts, or there are too many
            ranks.
    """
    if config.train.precision == "bfloat16_only":
        raise ValueError(
            'train.precision="bfloat16_only" cannot be simulated, because the simulator keeps weights '
            'in float32; use train.precision="bfloat16", whose exchanges are the same'
        )
    experts = config.model.expert_counts()
    if not experts:
        raise ValueError("the model has no experts, so there is nothing to route")
    if ep is None:
        ep = config.mesh.ep if config.mesh.ep > 1 else DEFAULT_RANKS
    if not 1 <= ep <= MOST_THREADS:
        raise ValueError(
            f"--ep {ep}: 1 to {MOST_THREADS} ranks can be simulated; use `moebius plan` for more"
        )
    check_experts(Layout(1, ep), experts)
    if ranks_per_node is None:
        ranks_per_node = ep if ep % DEFAULT_RANKS else DEFAULT_RANKS
    if ranks_per_node < 1 or ep % ranks_per_node:
        raise ValueError(f"--ranks-per-node {ranks_per_node} must divide the {ep} ranks")
    return ep, ranks_per_node


@dataclass(frozen=True)
class CallSource:
    """Routes tokens through a model, the same calls for any number of ranks.

    A trained model routes its validation text, a fresh one random tokens.
    """

    title: str
    config: Config
    trained: Transformer | None
    tokens_per_rank: int
    steps: int
    expert_maps: Mapping[str, ExpertMap] = field(default_factory=dict)  # a trained run's, by layer

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Returns (B, S) of a micro-batch: whole groups of sequences, as long as possible.

        Raises:
            ValueError: there are too few tokens for the router, or too many to number.
        """
        tokens, group = self.tokens_per_rank, self.config.model.group_sequences
        if not 1 <= tokens <= MOST_TOKENS:
            raise ValueError(f"--tokens-per-rank {tokens}: must be 1 to {MOST_TOKENS:,}")
        if tokens < group:
            raise ValueError(
                f"--tokens-per-rank {tokens}: the router needs groups of {group} sequences"
            )
        length = min(self.config.data.seq_len, tokens // group)
        experts = self.config.model.experts
        if experts is not None:
            experts.router.check_length(length * experts.sub_tokens)
        return group * (tokens // (group * length)), length

    @property
    def tokens(self) -> str:
        """Returns the number and source of the tokens as text."""
        batch, length = self.shape
        origin = "of the validation text" if self.trained else "at random"
        count = "1 step" if self.steps == 1 else f"{self.steps} steps"
        precision = self.config.train.precision
        return f"{batch} × {length} tokens {origin} per rank and step, {count}, {precision}"

    @cached_property
    def model(self) -> Transformer:
        """Returns the trained model, or the configured one with initial weights.

        Raises:
            ValueError: this machine's memory cannot hold them.
        """
        if self.trained:
            return self.trained
        needed = 4 * count_parameters(self.config.model, self.config.data.seq_len).total
        if needed > (free := psutil.virtual_memory().available):
            raise ValueError(
                f"{self.title}: its weights take {needed / 10**9:,.0f} GB, and this machine has "
                f"{free / 10**9:,.0f} GB free: simulate fewer layers (model.num_layers, "
                "model.layers_per_group), or calculate with `moebius plan`"
            )
        model = Transformer(self.config.model, backend=self.config.kernels.backend)
        initialise(model, self.config.train.seed)
        return model

    def calls(self, step: int, num_ranks: int) -> list[list[RoutedCall]]:
        """Returns the model's routes in one step call by call, with one entry per rank.

        Raises:
            ValueError: the validation text cannot be read.
        """
        self.model.train()
        recorded = []
        for rank in range(num_ranks):
            number = (step - 1) * num_ranks + rank
            tokens_BS = self._text(number) if self.trained else self.random_tokens(step, rank)
            recorded.append(self._record(tokens_BS, step, rank))
        return [list(call) for call in zip(*recorded, strict=True)]

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
            options = PassOptions(draws=pass_draws(train.seed, step, rank, rows, device))
            forward_in(self.model, getattr(torch, train.precision), tokens_BS, options=options)
        return calls

    def random_tokens(self, step: int, rank: int) -> Tensor:
        """Draws a rank's tokens, whatever the number of ranks."""
        seed = self.config.train.seed % 2**31
        generator = torch.Generator().manual_seed((seed * 2**20 + step) * MOST_THREADS + rank)
        return torch.randint(self.config.model.vocab_size, self.shape, generator=generator)

    def _text(self, number: int) -> Tensor:
        """Reads the validation rows of a micro-batch; they repeat without end."""
        (batch, _), reader = self.shape, self._reader
        rows = reader.read((number * batch + np.arange(batch)) % reader.num_rows)
        return torch.from_numpy(rows.tokens[:, :-1])

    @cached_property
    def _reader(self) -> SplitReader:
        directory, length = self.config.data.directory, self.shape[1]
        reader = SplitReader(directory, "validation", seq_len=length)
        if reader.num_rows < 1:
            raise ValueError(
                f"{directory}: its validation split is shorter than one row of {length} tokens"
            )
        return reader


@dataclass(frozen=True)
class Simulation:
    """Holds all calls with one dispatcher."""

    cluster: Cluster
    calls: list[SimulatedCall]


def simulate_all(
    source: CallSource, ep: int, ranks_per_node: int, dispatchers: Sequence[str]
) -> list[Simulation]:
    """Simulates the same calls with every dispatcher.

    Raises:
        ValueError: the source or a dispatcher does not fit.
        RankFailed: an exchange failed.
    """
    # A run's experts lie where it moved them, if its EP groups have this size.
    fits = all(len(moved.slots_P) == ep for moved in source.expert_maps.values())
    maps = source.expert_maps if fits else {}
    found = [Simulation(Cluster(ep, name, ranks_per_node, maps), []) for name in dispatchers]
    layers = dict(sparse_layers(source.model))
    for step in range(1, source.steps + 1):
        calls = source.calls(step, ep)
        for each in found:
            each.calls.extend(simulate(calls, lambda name: layers[name].experts, each.cluster))
    return found


def expert_maps_of(checkpoint: Path) -> dict[str, ExpertMap]:
    """Returns a run's expert maps at a checkpoint, by layer; empty if no expert ever moved."""
    meta = read_meta(checkpoint).meta
    return {name: ExpertMap.from_dict(bank["homes"]) for name, bank in meta["experts"].items()}
