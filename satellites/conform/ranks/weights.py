"""Handles parameters: how they are sharded, the kit's values for them, and their gradients.

A rank's parameter is compared by shape with the reference's of the same name. If equal, it is
replicated. If one dimension is shorter by the number of ranks, it is this rank's block. A list of
experts (`experts.3.w1`) is recognized by the numbers in names, counted per rank or over all ranks.
"""

import re
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ..contract import ContractError, Layer, Shard
from .values import Shape, draw, take

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_ROUTER = re.compile(r"(^|[._])(gate|router|wg)([._]|$)")


def parameters_of(layer: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the trained parameters by name, without the prefixes of wrappers."""
    found = {}
    for name, parameter in layer.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        if parameter.requires_grad:
            found[name] = parameter
    return found


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor, after completing pending sums."""
    if not isinstance(tensor, DTensor):
        return tensor
    if any(placement.is_partial() for placement in tensor.placements):
        whole = [Replicate() if p.is_partial() else p for p in tensor.placements]
        tensor = tensor.redistribute(placements=whole)
    return tensor.to_local()


def shapes_of(layer: nn.Module) -> dict[str, Shape]:
    """Returns the local shape of every trained parameter."""
    return {name: tuple(local(p.data).shape) for name, p in parameters_of(layer).items()}


def dtype_of(layer: nn.Module) -> torch.dtype:
    """Returns the dtype of the first trained parameter, which rows use."""
    return next(iter(parameters_of(layer).values())).dtype


def find_router(shapes: Mapping[str, Shape], layer: Layer) -> str | None:
    """Returns the name of the router's weight, (experts, width), or None.

    Raises:
        ContractError: the name given in the contract does not exist.
    """
    if layer.router is not None:
        if layer.router not in shapes:
            raise ContractError(f"router={layer.router!r}: the parameters are {', '.join(shapes)}")
        return layer.router
    if layer.routes == "given":
        return None
    named = [name for name, shape in shapes.items() if len(shape) == 2 and _ROUTER.search(name)]
    fitting = [
        name
        for name in named
        if layer.num_experts in (None, shapes[name][0]) and layer.width in (None, shapes[name][1])
    ]
    return fitting[0] if len(fitting) == 1 else None


def locate(
    shapes: Mapping[str, Shape], full: Mapping[str, Shape], layer: Layer, rank: int, size: int
) -> dict[str, Shard | None]:
    """Returns the place of every parameter of a rank; None: replicated.

    Raises:
        ContractError: shapes and names are ambiguous.
    """
    return {
        name: layer.shards(name, rank, size)
        if layer.shards is not None
        else _locate(name, shape, shapes, full, rank, size)
        for name, shape in shapes.items()
    }


def _locate(
    name: str,
    shape: Shape,
    shapes: Mapping[str, Shape],
    full: Mapping[str, Shape],
    rank: int,
    size: int,
) -> Shard | None:
    listed = _listed(name, shapes, full, rank, size)
    if listed is not None:
        return Shard(listed, None)
    if name in full and shape == full[name]:
        return None
    if name in full and len(shape) == len(full[name]):
        pairs = list(zip(shape, full[name], strict=True))
        shorter = [dim for dim, (ours, theirs) in enumerate(pairs) if ours != theirs]
        if len(shorter) == 1 and pairs[shorter[0]][0] * size == pairs[shorter[0]][1]:
            dim, length = shorter[0], pairs[shorter[0]][0]
            return Shard(name, dim, rank * length, (rank + 1) * length)
    raise ContractError(
        f"{name} {shape} on rank {rank} of {size} is not part of the reference's "
        f"{full.get(name, 'parameters ' + ', '.join(full))}; locate it with Layer.shards"
    )


def _listed(
    name: str, shapes: Mapping[str, Shape], full: Mapping[str, Shape], rank: int, size: int
) -> str | None:
    """Returns the reference's name of a member of a list of experts spread over the ranks."""
    for number in re.finditer(r"(?<![^.])\d+(?![^.])", name):
        before, after = name[: number.start()], name[number.end() :]
        ours, theirs = _numbers(before, after, shapes), _numbers(before, after, full)
        if len(ours) * size == len(theirs) and len(ours) < len(theirs):
            offset = 0 if ours != list(range(len(ours))) or rank == 0 else rank * len(ours)
            return f"{before}{int(number.group()) + offset}{after}"
    return None


def _numbers(before: str, after: str, shapes: Mapping[str, Shape]) -> list[int]:
    middles = (
        name[len(before) : len(name) - len(after)]
        for name in shapes
        if name.startswith(before) and name.endswith(after)
    )
    return sorted(int(middle) for middle in middles if middle.isdecimal())


def fill(
    layer: nn.Module,
    located: Mapping[str, Shard | None],
    full: Mapping[str, Shape],
    router: str | None,
) -> None:
    """Sets a rank's parameters to their part of the kit's values."""
    with torch.no_grad():
        for name, parameter in parameters_of(layer).items():
            shard = located[name]
            key = name if shard is None else shard.full
            part = take(draw(key, full[key], router), shard)
            own = local(parameter.data)
            own.copy_(torch.from_numpy(np.ascontiguousarray(part)).to(own.dtype))


def gradients_of(layer: nn.Module) -> dict[str, NDArray[np.float64]]:
    """Returns the local gradients, with zeros for missing ones."""
    return {
        name: as_array(
            torch.zeros_like(local(parameter.data))
            if parameter.grad is None
            else local(parameter.grad)
        )
        for name, parameter in parameters_of(layer).items()
    }


def as_array(tensor: Tensor) -> NDArray[np.float64]:
    """Returns the values in float64, which represents every narrower type exactly."""
    return tensor.detach().double().cpu().numpy()
