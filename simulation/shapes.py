"""One rank of a world of up to 10,240, without the others and without values: does the
configuration hold, what does it weigh?

The rank's process groups are made on a pretended world, its model on the meta device as training
would build it, sharded where the configuration says so. Then it is checked that
  * every group joins the ranks of the layout's tables;
  * the rank holds of every tensor what the tables say, and all ranks of its ep group together every
    expert once;
  * the model with this rank's experts runs: a forward pass of shapes, each rank pretended to
    receive as many rows as it sends.

Memory is exact for weights, gradients and AdamW's moments. What the backward pass keeps is counted
on one rank at balanced load (workload.py), without recomputation. About 2 s for the first rank of a
model of 24 depth steps, less for the next.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.layout import (
    AXES,
    Coordinates,
    Layout,
    check_experts,
    coordinates,
    expert_blocks,
    group_of,
    local_experts,
)
from ..distributed.local_shard import LocalShard, local_shard_of, local_tensor
from ..distributed.mesh import Mesh, build_mesh
from ..distributed.parallelize import build_model, expert_names
from ..distributed.process.process import DEFAULT_TIMEOUT_S, Process
from ..model.balance import RunningSum
from ..model.config.model_config import ModelConfig
from ..model.execution.precision import enters_a_product, forward_in
from ..model.moe import LocalRows, SparseLayer
from ..model.routing import Routes
from ..model.transformer import Transformer
from ..planning.workload import describe, kept_by_bank
from .threads import pretended_rank


class ShapeMismatch(AssertionError):
    """A rank does not hold what the tables say: a mistake of this package."""


@dataclass(frozen=True)
class BankShape:
    """A bank of experts on one rank."""

    layer: str
    experts: range
    shape: tuple[int, ...]  # of its first tensor, as the rank holds it
    whole: tuple[int, ...]


@dataclass(frozen=True)
class RankShapes:
    """One rank's place in the layout, its experts and its bytes."""

    rank: int
    place: Coordinates
    group_sizes: dict[str, int]
    banks: tuple[BankShape, ...]
    dense_parameters: int  # held here
    expert_parameters: int
    bytes: dict[str, int]  # weights, gradients, moments, copies, kept

    @property
    def total_bytes(self) -> int:
        """Returns the bytes of all parts."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class ShapeRequest:
    """What is built on every rank."""

    model: ModelConfig
    layout: Layout
    dispatcher: str
    sharding: Literal["none", "fsdp"]
    precision: str
    seq_len: int
    micro_batch: int
    ranks_per_node: int


def first_middle_last(world_size: int) -> list[int]:
    """Returns the first, the middle and the last rank."""
    return sorted({0, world_size // 2, world_size - 1})


def shapes_of(request: ShapeRequest, ranks: Sequence[int]) -> list[RankShapes]:
    """Builds and checks these ranks, one after another.

    Raises:
        ValueError: the configuration does not fit the world.
        ShapeMismatch: a rank does not hold what it should.
    """
    check_experts(request.layout, request.model.expert_counts())
    kept = _kept_bytes(request)
    return [_shapes_of_rank(request, rank, kept) for rank in ranks]


def _shapes_of_rank(request: ShapeRequest, rank: int, kept: int) -> RankShapes:
    layout, precision = request.layout, getattr(torch, request.precision)
    with pretended_rank(rank, layout.world_size):
        mesh = build_mesh(layout, _process(request, rank))
        _check_groups(mesh)
        build: Any = dict(
            dispatcher=request.dispatcher,
            backend="segments",
            seed=0,
            device=torch.device("meta"),
            precision=precision,
            ranks_per_node=request.ranks_per_node,
        )
        model = build_model(request.model, mesh, sharding=request.sharding, **build)
        _check_parameters(model, layout, rank)
        unsharded = (
            model if request.sharding == "none" else build_model(request.model, mesh, **build)
        )
        _check_forward(unsharded, request)
    return _measure(model, request, rank, kept)


def _process(request: ShapeRequest, rank: int) -> Process:
    return Process(
        rank=rank,
        world_size=request.layout.world_size,
        local_rank=rank % request.ranks_per_node,
        device=torch.device("cpu"),
        backend="fake",
        timeout_s=DEFAULT_TIMEOUT_S,
        ranks_per_node=request.ranks_per_node,
    )


# The checks ---------------------------------------------------------------------------------------


def _check_groups(mesh: Mesh) -> None:
    for axis in AXES:
        found, expected = (
            dist.get_process_group_ranks(mesh.group(axis)),
            group_of(mesh.layout, axis, mesh.rank),
        )
        if found != expected:
            raise ShapeMismatch(
                f"rank {mesh.rank}: its group {axis} joins {found}, the tables say {expected}"
            )


def _check_parameters(model: Transformer, layout: Layout, rank: int) -> None:
    banks = expert_names(model)
    for name, parameter in model.named_parameters():
        shard, local = local_shard_of(parameter), tuple(local_tensor(parameter).shape)
        sizes = (
            tuple(shard.slices[0].sizes) if shard.slices else None
        )  # None: FSDP had nothing left for this rank
        if (0 not in local) if sizes is None else (sizes != local):
            raise ShapeMismatch(
                f"rank {rank}: holds {local} of {name}, "
                f"its tables say {sizes} of {shard.global_shape}"
            )
        if name in banks:
            _check_blocks(shard.global_shape[0], layout, name)
            _check_own_experts(shard, layout, rank, name)


def _check_own_experts(shard: LocalShard, layout: Layout, rank: int, name: str) -> None:
    own = local_experts(layout, rank, shard.global_shape[0], name)
    for slice_ in shard.slices:
        first, end = slice_.offsets[0], slice_.offsets[0] + slice_.sizes[0]
        if not own.start <= first < end <= own.stop:
            raise ShapeMismatch(
                f"rank {rank}: holds the experts {first}-{end - 1} of {name}, its tables say {own}"
            )


def _check_blocks(num_experts: int, layout: Layout, name: str) -> None:
    everyone = list(itertools.chain.from_iterable(expert_blocks(num_experts, layout.ep)))
    if everyone != list(range(num_experts)):
        raise ShapeMismatch(f"{name}: the ranks of an ep group hold the experts {everyone}")


class _Mirror:
    """A dispatcher in shapes: as many rows arrive as leave, all for the experts of this rank."""

    def __init__(self, num_local: int) -> None:
        self._num_local = num_local

    def dispatch(self, x_UD: Tensor, routes: Routes) -> LocalRows:
        """Returns the rows as they are, with routes through the experts of this rank."""
        return LocalRows(x_UD, replace(routes, num_experts=self._num_local, per_expert=0))


def _check_forward(model: Transformer, request: ShapeRequest) -> None:
    for layer in model.modules():
        if isinstance(layer, SparseLayer):
            layer.dispatcher = _Mirror(next(layer.experts.parameters()).shape[0])
    model.running = RunningSum()
    tokens = torch.zeros(request.micro_batch, request.seq_len, dtype=torch.int64, device="meta")
    with torch.device("meta"), torch.no_grad():
        logits = forward_in(model, getattr(torch, request.precision), tokens).logits_BSV
    expected = (*tokens.shape, request.model.vocab_size)
    if tuple(logits.shape) != expected:
        raise ShapeMismatch(f"the logits are {tuple(logits.shape)} and not {expected}")


# The bytes ----------------------------------------------------------------------------------------


def _measure(model: Transformer, request: ShapeRequest, rank: int, kept: int) -> RankShapes:
    banks, layout = expert_names(model), request.layout
    counts = {name: local_tensor(parameter).numel() for name, parameter in model.named_parameters()}
    dense, experts = (
        sum(n for name, n in counts.items() if (name in banks) is wanted)
        for wanted in (False, True)
    )
    in_float32 = 4 * (dense + experts)
    sizes = {
        "weights": in_float32,
        "gradients": in_float32,
        "moments": 2 * in_float32,
        "kept": kept,
    }
    if request.precision != "float32" and request.sharding == "none":
        sizes["copies"] = 2 * sum(n for name, n in counts.items() if enters_a_product(name))
    return RankShapes(
        rank,
        coordinates(layout, rank),
        {axis: layout.size(axis) for axis in AXES},
        tuple(_banks(model, layout, rank)),
        dense,
        experts,
        sizes,
    )


def _banks(model: Transformer, layout: Layout, rank: int) -> list[BankShape]:
    found = []
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLayer):
            first = next(layer.experts.parameters())
            whole = tuple(local_shard_of(first).global_shape)
            own = local_experts(layout, rank, whole[0])
            found.append(BankShape(name, own, tuple(local_tensor(first).shape), whole))
    return found


def _kept_bytes(request: ShapeRequest) -> int:
    workload = describe(request.model, seq_len=request.seq_len, precision=request.precision)
    banks = sum(
        uses * kept_by_bank(bank, workload.bytes_per_element) for bank, uses in workload.uses
    )
    return round(request.micro_batch * request.seq_len * (workload.saved_bytes + banks))
