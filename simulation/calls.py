"""What `moebius simulate` is asked: a model or a recorded run, made into calls for the simulated
ranks.

A model routes tokens (random ones, or a trained run's validation text): every rank's micro-batch
goes through the whole model on one rank, and what every sparse layer got, how it was routed and
what came out is what the simulated ranks must carry and reproduce. A recorded run gives the routes
alone; rows and gate weights are then drawn, for they do not decide what travels.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..data_pipeline.read.rows import SplitReader
from ..distributed.checkpoint.format import find_checkpoint, read_meta
from ..distributed.dispatch.expert_map import ExpertMap
from ..distributed.layout import Layout, MeshConfig, check_experts, check_runnable, plan_layout
from ..model.config.model_config import ModelConfig
from ..model.execution.precision import cast_weights, forward_in
from ..model.initialise import draw, initialise
from ..model.moe import SparseLayer
from ..model.transformer import Transformer
from ..train.config.run_config import Config
from ..train.record.route_tap import sparse_layers, tap
from ..train.record.route_trace import read_rank, recorded_steps
from ..train.record.routed_call import RoutedCall
from ..train.state import seed_micro_batch
from .dispatch import Cluster, ExpertsOfLayer, simulate
from .replay import replay
from .shapes import ShapeRequest
from .threads import MOST_PRETENDED, MOST_THREADS
from .traffic_report import SimulationReport

DEFAULT_RANKS = 8
MOST_TOKENS = 2**24  # of a rank and step: their rows, also those of 256 heads, have numbers
_NODE = 8  # ranks of a node by default
_SEEDS = 2**31  # of them, with a million steps of every rank each, a generator can tell

Tokens = Callable[[int, int], Tensor]  # (step, rank) → (B, S)


@dataclass(frozen=True)
class RequestedRanks:
    """The sizes that the user asked for; None: as the configuration or the defaults say.

    Replicas fill the world.
    """

    ep: int | None = None
    world_size: int | None = None
    ranks_per_node: int | None = None
    overlap_chunks: int | None = None

    def __post_init__(self) -> None:
        at_least_one(**vars(self))


def at_least_one(**options: int | None) -> None:
    """Checks options that count something.

    Raises:
        ValueError: one is given and below 1.
    """
    for name, value in options.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: at least 1")


def _check_seed(seed: int) -> None:
    if not 0 <= seed < _SEEDS:
        raise ValueError(f"--seed {seed}: from 0 to {_SEEDS - 1:,}")


def make_cluster(config: Config, asked: RequestedRanks, dispatcher: str | None = None) -> Cluster:
    """Returns the simulated ranks: as asked, else as `mesh` says, else EP groups of 8, 8 to a node.

    Raises:
        ValueError: the sizes do not fit each other or the model's experts, or there are too many
            for real values.
    """
    layout, per_node = layout_of(config, asked)
    if layout.world_size > MOST_THREADS:
        raise ValueError(
            f"{layout.world_size:,} ranks: with real values there may be {MOST_THREADS} at most; "
            "--shapes-only looks at single "
            f"ranks of up to {MOST_PRETENDED:,}"
        )
    chunks = asked.overlap_chunks or config.mesh.overlap_chunks
    return Cluster(layout, dispatcher or config.mesh.dispatcher, chunks, per_node)


def layout_of(config: Config, asked: RequestedRanks) -> tuple[Layout, int]:
    """Returns the layout, and how many ranks a node has.

    `asked.ep` takes the place of the mesh's ep and replicas.

    Raises:
        ValueError: the sizes do not fit each other or the model's experts.
    """
    if config.train.precision == "bfloat16_only":
        raise ValueError(
            'train.precision="bfloat16_only" cannot be simulated: the simulator keeps weights in '
            'float32; use train.precision="bfloat16", whose exchanges are the same'
        )
    mesh = config.mesh
    check_runnable(mesh)
    ep = asked.ep or (
        mesh.ep if mesh.ep > 1 else min(DEFAULT_RANKS, asked.world_size or DEFAULT_RANKS)
    )
    wanted = MeshConfig(ep=ep, dp_shard=mesh.dp_shard)
    layout = plan_layout(
        wanted,
        asked.world_size or (mesh.dp_shard or ep) * (1 if asked.ep else mesh.dp_replicate or 1),
    )
    check_experts(layout, _experts(config.model))
    per_node = asked.ranks_per_node or (
        _NODE if layout.world_size % _NODE == 0 else layout.world_size
    )
    if layout.world_size % per_node:
        raise ValueError(
            f"--ranks-per-node {per_node} does not divide the {layout.world_size} ranks"
        )
    return layout, per_node


def shape_request(
    config: Config, asked: RequestedRanks, dispatcher: str | None = None
) -> tuple[ShapeRequest, str | None]:
    """Returns what `--shapes-only` builds, and why training would refuse it on that world.

    None: it would not.

    Raises:
        ValueError: the sizes do not fit each other or the model's experts.
    """
    if config.mesh.replicas:
        raise ValueError(
            f"mesh.replicas={config.mesh.replicas}: --shapes-only builds no slots for copies of "
            "experts; leave mesh.replicas out"
        )
    layout, per_node = layout_of(config, asked)
    changes = {
        "ep": layout.ep,
        "dp_replicate": None,
        **({"dispatcher": dispatcher} if dispatcher else {}),
    }
    mesh = config.mesh.model_copy(update=changes)
    try:
        config.model_copy(update={"mesh": mesh}).check_world(layout.world_size)
        refusal = None
    except ValueError as error:
        refusal = str(error)
    request = ShapeRequest(
        model=config.model,
        layout=layout,
        dispatcher=mesh.dispatcher,
        sharding=mesh.sharding,
        precision=config.train.precision,
        seq_len=config.data.seq_len,
        micro_batch=config.train.micro_batch,
        ranks_per_node=per_node,
        overlap_chunks=asked.overlap_chunks or mesh.overlap_chunks,
    )
    return request, refusal


def _experts(model: ModelConfig) -> dict[str, int]:
    counts = model.expert_counts()
    if not counts:
        raise ValueError("the model has no experts: there is nothing to route")
    return counts


# Where experts live -------------------------------------------------------------------------------

CONTIGUOUS = "contiguous"


@dataclass(frozen=True)
class SavedPlacement:
    """On which ranks a run that moves its experts had them at a checkpoint."""

    step: int
    expert_maps: Mapping[str, ExpertMap]  # by layer
    wanted: bool  # asked for by its step: it must fit, or nothing is simulated

    @property
    def ep(self) -> int:
        """Returns how many ranks the experts are spread over."""
        return len(next(iter(self.expert_maps.values())).slots_P)


def find_placement(
    run_dir: Path | None, asked: str | None, *, default: int | None = None
) -> SavedPlacement | None:
    """Finds what `--expert-map` asks for; None: contiguous blocks.

    Args:
        run_dir: None: no run, but a fresh model.
        asked: the step of a checkpoint, or "contiguous"; None: nothing.
        default: the step whose checkpoint is taken where nothing is asked for; None: none is.

    Raises:
        ValueError: there is no such checkpoint, or no expert had moved.
    """
    if asked == CONTIGUOUS or (asked is None and default is None):
        return None
    if asked is not None and not asked.isdecimal():
        raise ValueError(f"--expert-map {asked}: write the step of a checkpoint, or {CONTIGUOUS}")
    if run_dir is None:
        raise ValueError(
            f"--expert-map {asked}: fresh weights have no checkpoint; name a run folder, "
            "or --trace RUN"
        )
    meta = read_meta(find_checkpoint(run_dir, default if asked is None else int(asked)))
    expert_maps = {
        name: ExpertMap.from_dict(bank["homes"])
        for name, bank in meta.meta.get("experts", {}).items()
    }
    if not expert_maps and asked is not None:
        raise ValueError(
            f"--expert-map {asked}: {run_dir.name} moved no experts up to there "
            "(mesh.rebalance_every was 0)"
        )
    return SavedPlacement(meta.step, expert_maps, asked is not None) if expert_maps else None


def place(cluster: Cluster, placement: SavedPlacement | None) -> Cluster:
    """Returns the same ranks with the experts where the checkpoint had them.

    They stay in contiguous blocks where the checkpoint is of other EP groups.

    Raises:
        ValueError: it was, but is wanted.
    """
    if placement is None:
        return cluster
    if placement.ep == cluster.layout.ep:
        return replace(cluster, expert_maps=placement.expert_maps)
    if placement.wanted:
        raise ValueError(
            f"--expert-map {placement.step}: its experts are spread over {placement.ep} ranks, "
            f"and not over {cluster.layout.ep}; "
            f"use --ep {placement.ep}, or --expert-map {CONTIGUOUS}"
        )
    return cluster


def _expert_map_words(config: Config, cluster: Cluster, placement: SavedPlacement | None) -> str:
    """Tells where the experts are; nothing where no run has ever moved one."""
    if cluster.expert_maps and placement is not None:
        return f"; experts where they were at step {placement.step}"
    unused = (
        f" (those of step {placement.step} are for ep {placement.ep})"
        if placement is not None
        else ""
    )
    return (
        f"; experts in contiguous blocks, none moved{unused}"
        if config.mesh.rebalance_every or unused
        else ""
    )


# Sources ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallSource:
    """Where calls come from: the same ones whenever asked, for any number of ranks."""

    title: str
    config: Config
    tokens: Callable[[Cluster], str]  # in words
    experts_of_layer: ExpertsOfLayer
    calls: Callable[[int], Iterator[list[RoutedCall]]]  # of so many ranks
    placement: SavedPlacement | None = None


def simulate_all(
    source: CallSource, asked: RequestedRanks, dispatchers: Sequence[str | None]
) -> SimulationReport:
    """Simulates the same calls with every dispatcher.

    Raises:
        ValueError: the request cannot be carried out.
        RankFailed: an exchange failed.
    """
    clusters = [
        place(make_cluster(source.config, asked, each), source.placement) for each in dispatchers
    ]
    found = [
        simulate(source.calls(cluster.layout.world_size), source.experts_of_layer, cluster)
        for cluster in clusters
    ]
    words = source.tokens(clusters[0]) + _expert_map_words(
        source.config, clusters[0], source.placement
    )
    return SimulationReport(source.title, words, tuple(found))


def source_from_model(
    title: str,
    config: Config,
    trained: Transformer | None,
    *,
    tokens_per_rank: int,
    steps: int,
    seed: int,
    placement: SavedPlacement | None = None,
) -> CallSource:
    """Returns the calls of a model that routes tokens itself.

    A trained one routes its validation text, a fresh one random tokens.

    Raises:
        ValueError: the router cannot take so few tokens, or the text cannot be read.
    """
    at_least_one(steps=steps, tokens_per_rank=tokens_per_rank)
    _check_seed(seed)
    _experts(config.model)
    batch, length = batch_shape(config, tokens_per_rank)
    model, precision = trained or fresh_model(config), config.train.precision

    def calls(num_ranks: int) -> Iterator[list[RoutedCall]]:
        make = text_tokens if trained else random_tokens
        tokens = make(config, batch, length, seed=seed, num_ranks=num_ranks)
        return calls_of_model(model, precision, TokenBatches(tokens, steps, seed), num_ranks)

    def words(_cluster: Cluster) -> str:
        what = "of the validation text" if trained else "at random"
        count = "1 step" if steps == 1 else f"{steps} steps"
        return f"{batch} × {length} tokens {what} per rank and step, {count}, {precision}"

    return CallSource(title, config, words, experts_of_model(model, precision), calls, placement)


def source_from_trace(
    run_dir: Path, *, steps: int | None, seed: int, expert_map: str | None = None
) -> CallSource:
    """Returns the calls of a recorded run.

    Args:
        run_dir: its run folder.
        steps: how many of the recorded steps at most; None: all.
        seed: of the rows and gate weights, which were not recorded.
        expert_map: as for `find_placement`.

    Raises:
        ValueError: nothing was recorded there, or there are no such expert map.
    """
    at_least_one(steps=steps)
    _check_seed(seed)
    config = config_of_run(run_dir)
    files, precision = chosen_steps(recorded_steps(run_dir), steps), config.train.precision
    experts_of_layer = initial_experts(
        config.model, precision, backend=config.kernels.name, seed=config.train.seed
    )
    then = len(files[min(files)])
    tokens = sum(read_rank(files[min(files)][0]).tokens) * then

    def words(cluster: Cluster) -> str:
        recorded = (
            f"{len(files)} recorded steps, {min(files)} to {max(files)},"
            if len(files) > 1
            else f"step {min(files)}"
        )
        now = cluster.layout.world_size
        return f"{recorded} of {tokens:,} tokens; ranks: {then} then, {now} now; {precision}"

    def calls(num_ranks: int) -> Iterator[list[RoutedCall]]:
        return calls_of_trace(files, experts_of_layer, precision, num_ranks, seed)

    return CallSource(
        f"trace of {run_dir.name}",
        config,
        words,
        experts_of_layer,
        calls,
        find_placement(run_dir, expert_map),
    )


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


def random_tokens(config: Config, batch: int, length: int, *, seed: int, num_ranks: int) -> Tokens:
    """Returns tokens uniform over the vocabulary; a rank's do not depend on how many ranks are."""
    if num_ranks > MOST_THREADS:
        raise AssertionError(f"{num_ranks} ranks would draw the tokens of other steps")

    def make(step: int, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed((seed * 2**20 + step) * MOST_THREADS + rank)
        return torch.randint(config.model.vocab_size, (batch, length), generator=generator)

    return make


def text_tokens(config: Config, batch: int, length: int, *, seed: int, num_ranks: int) -> Tokens:
    """Returns the validation rows of a run's data from row `seed` on, over and over.

    Raises:
        ValueError: the data cannot be read.
    """
    reader = SplitReader(config.data.directory, "validation", seq_len=length)
    if reader.num_rows < 1:
        raise ValueError(
            f"{config.data.directory}: its validation split has not one row of {length} tokens"
        )

    def make(step: int, rank: int) -> Tensor:
        first = seed + ((step - 1) * num_ranks + rank) * batch
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
    model = Transformer(config.model, backend=config.kernels.name)
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
        for calls in zip(*recorded, strict=True):
            yield list(calls)


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
    steps: dict[int, list[Path]],
    experts_of_layer: ExpertsOfLayer,
    precision: str,
    num_ranks: int,
    seed: int,
) -> Iterator[list[RoutedCall]]:
    """Yields recorded routes, dealt out to so many ranks, with values that were not recorded.

    Rows and gate weights are drawn; the outputs are those of one rank with all experts.

    Raises:
        ValueError: a file is damaged.
    """
    generator, dtype = torch.Generator().manual_seed(seed), getattr(torch, precision)
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
    numbers: Sequence[int] = sorted(steps)
    if most is None or most >= len(numbers):
        return steps
    picked = np.unique(np.linspace(0, len(numbers) - 1, most).round().astype(int))
    return {numbers[index]: steps[numbers[index]] for index in picked}
