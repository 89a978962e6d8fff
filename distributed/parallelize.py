"""Takes a model and spreads it: every rank keeps its block of each bank of experts, and all of the rest.

Everything is applied from outside; the model's code holds no rank. The model is built without storage, cut, and only then filled,
tensor by tensor from streams that do not depend on the number of ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..model.balance import RunningSum
from ..model.config import ModelConfig
from ..model.initialise import draw
from ..model.moe import SparseLayer
from ..model.transformer import Transformer
from .dispatch import make_dispatcher
from .dispatch_setup import build_node_groups
from .layout import local_experts
from .mesh import Mesh
from .process import DEFAULT_TIMEOUT_S
from .shards import Held, block, hold


def build_model(
    config: ModelConfig,
    mesh: Mesh,
    *,
    dispatcher: str,
    backend: str,
    seed: int,
    device: torch.device,
    overlap_chunks: int = 1,
    check_every: int = 0,
    ranks_per_node: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Transformer:
    """The model of `config` as this rank holds it, with its starting values, on `device`.

    Collective for the hierarchical dispatcher, whose groups (with that timeout) are made here. `ranks_per_node` None: all ranks
    are on one node.

    Raises:
        ValueError: the EP degree does not divide a layer's experts, or the dispatcher does not fit the mesh.
    """
    nodes = None
    if dispatcher == "hierarchical":
        nodes = build_node_groups(mesh.ep_group, ranks_per_node, timeout_s=timeout_s)
    with torch.device("meta"):
        model = Transformer(config, backend=backend)
    for layer in model.modules():
        if isinstance(layer, SparseLayer):
            layer.dispatcher = make_dispatcher(
                dispatcher, mesh.ep_group, overlap_chunks=overlap_chunks, check_every=check_every,
                ranks_per_node=ranks_per_node, nodes=nodes,
            )  # fmt: skip
    if mesh.layout.world_size > 1:
        model.running = RunningSum(lambda local: _sum_over(mesh.world_group, local))
    _fill(model, mesh, seed, device)
    return model


def expert_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are sharded over EP along dim 0; all others are the same on every rank."""
    return frozenset(
        f"{layer_name}.experts.{name}"
        for layer_name, layer in model.named_modules()
        if isinstance(layer, SparseLayer)
        for name, _ in layer.experts.named_parameters()
    )


def _fill(model: Transformer, mesh: Mesh, seed: int, device: torch.device) -> None:
    sharded = expert_names(model)
    for name, parameter in list(model.named_parameters()):
        value, held = draw(name, parameter, seed), None
        if name in sharded:
            held = _own_experts(value.shape, mesh)
            value = held.boxes[0].cut(value)
        parameter = nn.Parameter(value.to(device))
        if held is not None:
            hold(parameter, held)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, parameter)
    for name, buffer in list(model.named_buffers()):  # what a router learns without a gradient: all start at zero
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, torch.zeros_like(buffer, device=device))


def _sum_over(group: dist.ProcessGroup, local: Tensor) -> Tensor:
    total = local.clone()
    dist.all_reduce(total, group=group)
    return total


def _own_experts(shape: torch.Size, mesh: Mesh) -> Held:
    experts = local_experts(mesh.layout, mesh.rank, shape[0])
    return block(shape, 0, experts.start, len(experts), ranks_per_copy=mesh.layout.ep, has_experts=True)
