"""Shards weights, gradients and optimizer state with FSDP2, for models that repeat their layers.

FSDP units are every layer of the group (dense weights, over dp_shard), every bank of experts in it
(over efsdp), the head, and the embedding with the rest. With dp_replicate > 1 every replica has a
copy of each shard (HSDP), and gradients are summed over replicas. Weights are stored, updated and
reduced in float32 and cast to the products' precision before gathering, which halves the bytes.
Parameters outside matrix products (norms, routers, biases) are small and needed in float32: they stay
whole on every rank, and gradients.py sums their gradients.

FSDP would gather a unit at each call: R times per pass for a layer that R depth steps use. Here a
repeated unit stays gathered from its first forward call to its last backward call, so it is gathered
and its gradient reduced once per pass. A layer with R = 1 is freed after its forward and gathered
again for the backward, as FSDP does. The next unit's weights are prefetched while one computes.

Every reduction is a sum: the loss is already divided by the world's number of tokens.
"""

import itertools
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.hooks import RemovableHandle

from ..model.execution.precision import enters_a_product
from ..model.execution.recompute import recomputing
from ..model.moe import SparseLayer
from ..model.transformer import Transformer
from .layout import Layout, index_in_group
from .local_shard import LocalShard, narrowed_shard
from .mesh import Mesh


def shard_model(model: Transformer, mesh: Mesh, dtype: torch.dtype) -> None:
    """Shards the weights of a model on the meta device; its sharded parameters become DTensors.

    Args:
        model: changed in place.
        mesh: provides the groups to shard over.
        dtype: dtype of products, to which weights are cast before gathering.
    """
    whole = {parameter for name, parameter in model.named_parameters() if not is_sharded(name)}
    products = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    dense, experts = _mesh_over(mesh, "dp_shard"), _mesh_over(mesh, "efsdp")
    # The logits are a view, but nothing modifies them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    uses = Counter(step.member for step in model.config.schedule)
    banks_of = [
        [layer.experts for layer in member.modules() if isinstance(layer, SparseLayer)]
        for member in model.group
    ]
    for index, (member, banks) in enumerate(zip(model.group, banks_of, strict=True)):
        once = uses[index] == 1
        for bank in banks:
            _shard(bank, experts, products, whole, free=once)
            bank.products_dtype = dtype
        _shard(member, dense, products, whole, free=once)
    if model.head.weight is not None:  # else it reads the embedding
        _shard(model.head, dense, products, whole, free=False)
    _shard(model, dense, exact, whole, free=False)
    _prefetch(model, banks_of)
    _Passes(model, list(_units(model)))


def is_sharded(name: str) -> bool:
    """Returns whether FSDP shards the parameter of that name; others stay whole on every rank."""
    return enters_a_product(name) or name in ("embedding", "position_embedding")


def fsdp_shard(
    group_shard: LocalShard, shape: Sequence[int], layout: Layout, rank: int
) -> LocalShard:
    """Returns the shard of a parameter that FSDP leaves on a rank.

    Args:
        group_shard: the part that the rank's group stores.
        shape: the group's local shape, before FSDP cuts it.
        layout: the mesh's layout.
        rank: the rank.
    """
    axis = "efsdp" if group_shard.has_experts else "dp_shard"
    ranks, place = layout.size(axis), index_in_group(layout, axis, rank)
    dim = dim_to_cut(shape, ranks)
    share = -(-shape[dim] // ranks)  # like torch.chunk: the last ranks may have less, or nothing
    start = min(place * share, shape[dim])
    length = min(share, shape[dim] - start)
    return narrowed_shard(group_shard, dim, start, length, ranks_per_copy=layout.dp_shard)


def _mesh_over(mesh: Mesh, axis: str) -> DeviceMesh:
    """Returns the DeviceMesh that shards over `axis` and replicates over dp_replicate."""
    axes = (axis,) if mesh.layout.dp_replicate == 1 else ("dp_replicate", axis)
    return mesh.device_mesh(*axes)


def _shard(
    module: nn.Module,
    over: DeviceMesh,
    policy: MixedPrecisionPolicy,
    whole: set[nn.Parameter],
    *,
    free: bool,
) -> None:
    """Makes an FSDP unit of `module`, without its inner units; `free`s it after its forward call."""
    num_ranks = over.size(over.ndim - 1)
    unit = fully_shard(
        module,
        mesh=over,
        reshard_after_forward=free,
        mp_policy=policy,
        ignored_params=whole & set(module.parameters()),
        shard_placement_fn=lambda parameter: Shard(dim_to_cut(parameter.shape, num_ranks)),
    )
    # In this order: a divide factor alone becomes a scaled sum, which Gloo does not support.
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_gradient_divide_factor(1.0)


def dim_to_cut(shape: Sequence[int], num_ranks: int) -> int:
    """Returns the dimension that FSDP cuts: 0, or with fewer rows than ranks the first that divides.

    FSDP needs an even cut for every dimension but the first.
    """
    if shape[0] < num_ranks:
        for dim, size in enumerate(shape):
            if size % num_ranks == 0:
                return dim
    return 0


def free_gathered(model: nn.Module) -> None:
    """Frees weights that a pass without a backward has left gathered; they would become stale.

    A later backward pass gathers them again. Does nothing for a model that is not sharded.

    Raises:
        RuntimeError: an error has ended a forward pass; FSDP considers it still running and frees
            nothing.
    """
    units = list(_units(model))
    for unit in units:
        unit.reshard()
    if not units:
        return
    left = [
        name
        for name, weight in model.named_parameters()
        if is_sharded(name) and not isinstance(weight, DTensor)
    ]
    if left:
        raise RuntimeError(
            f"{len(left)} sharded weights are still gathered ({left[0]}, …), because an earlier forward pass of "
            "this model was ended by an error: build the model anew, or continue from a checkpoint"
        )


def _units(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _prefetch(model: Transformer, banks_of: list[list[Any]]) -> None:
    """Makes each member prefetch its banks and the next member; in the backward the previous one."""
    order = [[*banks, member] for member, banks in zip(model.group, banks_of, strict=True)]
    if isinstance(model.head, FSDPModule):
        order.append([model.head])
    for (*banks, member), following in itertools.pairwise(order):
        member.set_modules_to_forward_prefetch([*banks, *reversed(following)])
        following[-1].set_modules_to_backward_prefetch([member, *banks])


class _Passes:
    """Frees each unit after its last use in a backward pass, and after evaluation.

    When the backward of a call begins, FSDP reads whether to free the unit afterwards; only the last
    call sets this.
    """

    def __init__(self, model: Transformer, units: list[FSDPModule]) -> None:
        self._units = units
        self._open = dict.fromkeys(units, 0)  # calls whose backward has not begun
        for unit in units:
            cast(nn.Module, unit).register_forward_hook(self._count)
        self._handle: RemovableHandle = model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end)

    def _begin(self, model: nn.Module, inputs: Any) -> None:
        free_gathered(model)
        self._open = dict.fromkeys(self._units, 0)

    def _end(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            for unit in self._units:
                unit.reshard()

    def _count(self, module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if not isinstance(tensor, Tensor) or not tensor.requires_grad or recomputing():
            return  # a recomputation does not count as a call
        unit = cast(FSDPModule, module)
        self._open[unit] += 1
        tensor.register_hook(lambda gradient: self._leave(unit))

    def _leave(self, unit: FSDPModule) -> None:
        self._open[unit] -= 1
        unit.set_reshard_after_backward(self._open[unit] == 0, recurse=False)
