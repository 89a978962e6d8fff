"""Builds a model distributed over a mesh, without any change to the model's own code.

Every rank keeps its block of each bank of experts and the whole rest, or its shard of both. The model
is built without storage, cut, and then filled tensor by tensor from random streams that do not depend
on the number of ranks. A rank therefore never holds more than one whole tensor.
"""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..model.balance import RunningSum
from ..model.config.model_config import ModelConfig
from ..model.execution.precision import store_in
from ..model.initialise import draw
from ..model.moe import SparseLayer
from ..model.transformer import Transformer
from .dispatch.base import build_node_groups
from .dispatch.choose import choose_dispatcher, make_dispatcher
from .dispatch.table import needs_nodes
from .layout import local_experts
from .local_shard import LocalShard, block_shard, local_tensor, set_local_shard, whole_shard
from .mesh import Mesh
from .process.process import DEFAULT_TIMEOUT_S
from .sharding import fsdp_shard, shard_model


def build_model(
    config: ModelConfig,
    mesh: Mesh,
    *,
    dispatcher: str,
    backend: str,
    seed: int,
    device: torch.device,
    sharding: Literal["none", "fsdp"] = "none",
    precision: torch.dtype = torch.float32,
    stored: torch.dtype = torch.float32,
    check_every: int = 0,
    ranks_per_node: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Transformer:
    """Builds this rank's part of the model of `config` with its initial values on `device`.

    On the meta device the model has no values. Collective for "auto" and for dispatchers that need
    node groups or shared memory, which it creates with `timeout_s`.

    Args:
        config: the model's configuration.
        mesh: the ranks and their groups.
        dispatcher: a name of `mesh.dispatcher`.
        backend: a name of `kernels.backend`.
        seed: of the initial values.
        device: of all parameters.
        sharding: "fsdp" shards weights; see `mesh.sharding`.
        precision: dtype of products, to which FSDP casts sharded weights before gathering them.
        stored: dtype of weights; bfloat16 for train.precision="bfloat16_only".
        check_every: checks every n-th pass of the dispatchers.
        ranks_per_node: None means that all ranks are on one node.
        timeout_s: of the groups created here.

    Raises:
        ValueError: a layer has fewer experts than ep, or the dispatcher does not fit the mesh.
    """
    with torch.device("meta"):
        model = Transformer(config, backend=backend)
    _connect(
        model,
        mesh,
        dispatcher=dispatcher,
        device=device,
        check_every=check_every,
        ranks_per_node=ranks_per_node,
        timeout_s=timeout_s,
    )
    specified = dict(model.named_parameters())
    expert_shards = _keep_own_experts(model, mesh)
    if sharding == "fsdp":
        shard_model(model, mesh, precision)
    store_in(model, stored)
    model.to_empty(device=device)
    _fill(model, specified, expert_shards, mesh, seed)
    return model


def _connect(
    model: Transformer,
    mesh: Mesh,
    *,
    dispatcher: str,
    device: torch.device,
    check_every: int,
    ranks_per_node: int | None,
    timeout_s: float,
) -> None:
    """Sets the model's dispatchers, and sums its balancing losses over the world."""
    choice = choose_dispatcher(
        dispatcher,
        mesh.ep_group,
        device=device,
        ranks_per_node=ranks_per_node,
        timeout_s=timeout_s,
    )
    nodes = None
    if needs_nodes(choice.name):
        nodes = build_node_groups(mesh.ep_group, ranks_per_node, timeout_s=timeout_s)
    for layer in model.modules():
        if not isinstance(layer, SparseLayer):
            continue
        layer.dispatcher = make_dispatcher(
            choice.name,
            mesh.ep_group,
            check_every=check_every,
            ranks_per_node=ranks_per_node,
            nodes=nodes,
            outbox=choice.outbox,
            why=choice.why,
        )
    if mesh.layout.world_size > 1:
        model.running = RunningSum(lambda local: _sum_over(mesh.world_group, local))


def expert_names(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters that EP shards along dim 0; others are the same everywhere."""
    return frozenset(
        f"{layer_name}.experts.{name}"
        for layer_name, layer in model.named_modules()
        if isinstance(layer, SparseLayer)
        for name, _ in layer.experts.named_parameters()
    )


def _keep_own_experts(model: Transformer, mesh: Mesh) -> dict[str, LocalShard]:
    """Cuts the banks, still without values, to this rank's experts; returns their shards."""
    found = {}
    for name in sorted(expert_names(model)):
        shape = model.get_parameter(name).shape
        experts = local_experts(mesh.layout, mesh.rank, shape[0])
        found[name] = block_shard(
            shape, 0, experts.start, len(experts), ranks_per_copy=mesh.layout.ep, has_experts=True
        )
        owner, _, attribute = name.rpartition(".")
        own = nn.Parameter(torch.empty(len(experts), *shape[1:], device="meta"))
        setattr(model.get_submodule(owner), attribute, own)
    return found


@torch.no_grad()
def _fill(
    model: Transformer,
    specified: Mapping[str, nn.Parameter],
    expert_shards: Mapping[str, LocalShard],
    mesh: Mesh,
    seed: int,
) -> None:
    """Draws each whole tensor and keeps this rank's shard.

    `specified` are the whole parameters without values, which name the rule to draw by.
    """
    for name, parameter in model.named_parameters():
        shard = expert_shards.get(name) or whole_shard(specified[name].shape)
        if isinstance(parameter, DTensor):
            shard = fsdp_shard(shard, parameter.shape, mesh.layout, mesh.rank)
        set_local_shard(parameter, shard)
        if parameter.is_meta:  # shapes only
            continue
        value = draw(name, specified[name], seed)
        for slice_ in shard.slices:
            slice_.view(local_tensor(parameter)).copy_(slice_.copy_from(value))
    for buffer in model.buffers():  # router state without gradients, which starts at zero
        buffer.zero_()


def _sum_over(group: dist.ProcessGroup, local: Tensor) -> Tensor:
    total = local.clone()
    dist.all_reduce(total, group=group)
    return total
