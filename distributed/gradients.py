"""Reduces gradients over the mesh: sums only, one norm, one clipping coefficient, one decision to skip.

The loss is already divided by the world's number of tokens, so nothing is averaged here. Dense
gradients are summed over the world, experts' over all ranks that hold them (expert_replicas): the
dispatcher's backward has already sent the gradients of the EP group's tokens to the experts. FSDP
sums the gradients that it shards (sharding.py).

A parameter without a gradient on this rank counts as zeros, and after the reduction every parameter
has a gradient. All ranks therefore issue the same collectives, whatever their tokens routed to.

Cost per step: one copy of the gradients into flat buckets (kept; 4 bytes per parameter) and one
all-reduce per 25 MB. Reduced gradients are views of the buckets, so nothing is copied back unless
parameters are narrower than float32.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from ..model.layers import on_device
from .local_shard import local_shard_of, local_tensor
from .mesh import Mesh

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class _Bucket:
    """Consecutive parameters whose gradients are reduced as one flat tensor."""

    parameters: list[Parameter]
    flat: Tensor  # float32, or float64 for parameters of float64
    views: list[Tensor]  # of `flat`, with the parameters' shapes

    def fixed(self) -> list[tuple[Parameter, Tensor]]:
        """Returns a tensor for each gradient to stay in: its view, if that has its dtype."""
        return [
            (parameter, view if parameter.dtype == view.dtype else torch.zeros_like(parameter))
            for parameter, view in zip(self.parameters, self.views, strict=True)
        ]

    def pack(self) -> None:
        """Copies the gradients into the flat tensor; a missing one counts as zeros."""
        views: list[Tensor] = []
        gradients: list[Tensor] = []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                views.append(view)
                gradients.append(parameter.grad)
        if views:
            torch._foreach_copy_(views, gradients)  # pyright: ignore[reportPrivateImportUsage]

    def unpack(self) -> None:
        """Sets the parameters' gradients to the sums in the flat tensor."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.dtype == view.dtype:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.to(parameter.dtype)
            else:
                parameter.grad.copy_(view)


class GradientReducer:
    """Sums gradients over the ranks in buffers that it reuses.

    `dense` and `experts` must be the same, in the same order, on every rank. After `reduce()` the
    gradients are views of this object's buffers, valid until the next `reduce()`. A step that begins
    with `zero_in_place()` accumulates in these buffers, so nothing is copied.
    """

    def __init__(
        self,
        dense: Sequence[Parameter],
        experts: Sequence[Parameter],
        mesh: Mesh,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._sums: list[tuple[dist.ProcessGroup, list[_Bucket]]] = []
        self._alone: list[Parameter] = []  # held by this rank only: nothing to sum
        self._fixed: list[tuple[Parameter, Tensor]] = []
        for parameters, group in ((dense, mesh.world_group), (experts, mesh.expert_replica_group)):
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            if group.size() == 1:
                self._alone += trained
            else:
                self._sums.append((group, _buckets(trained, bucket_bytes)))

    def zero_in_place(self) -> None:
        """Sets all gradients to zeros in tensors that are the same in every step.

        A CUDA graph adds to them. Eager steps set gradients to None instead, which needs no zeros and,
        while no gradient exists, no memory.
        """
        if not self._fixed:
            self._fixed = [(parameter, torch.zeros_like(parameter)) for parameter in self._alone]
            for bucket in itertools.chain.from_iterable(buckets for _, buckets in self._sums):
                self._fixed += bucket.fixed()
        for parameter, gradient in self._fixed:
            parameter.grad = gradient
        torch._foreach_zero_([gradient for _, gradient in self._fixed])  # pyright: ignore[reportPrivateImportUsage]

    def reduce(self) -> None:
        """Replaces every gradient by its sum over the ranks. Collective over the world."""
        for parameter in self._alone:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        pending: list[tuple[_Bucket, dist.Work | None]] = []
        for group, buckets in self._sums:
            for bucket in buckets:
                bucket.pack()
                pending.append((bucket, dist.all_reduce(bucket.flat, group=group, async_op=True)))
        for bucket, work in pending:
            if work is not None:
                work.wait()
            bucket.unpack()


def parameters_to_reduce(model: nn.Module) -> tuple[list[Parameter], list[Parameter]]:
    """Returns a model's dense and expert parameters, each in the model's order.

    Parameters that FSDP shards are in neither: FSDP sums their gradients itself.
    """
    dense: list[Parameter] = []
    experts: list[Parameter] = []
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            (experts if local_shard_of(parameter).has_experts else dense).append(parameter)
    return dense, experts


def global_grad_norm(
    parameters: Mapping[Parameter, str],
    mesh: Mesh,
    *,
    numbers: Sequence[Tensor | float] = (),
    by_part: bool = False,
) -> tuple[float, tuple[float, ...], dict[str, float]]:
    """Returns the 2-norm of the whole model's reduced gradient, the numbers' sums over ranks, and
    `by_part` the norm of every part, which each parameter is given with.

    Collective, with equally many numbers and the same parts on every rank; all ranks get the same
    bits. The first copy of each tensor counts its elements, so a non-finite gradient anywhere makes
    the norm non-finite everywhere. The numbers share the norm's reduction: values to agree on at a
    step boundary (a flag of any rank, the step's loss) need no message of their own. So do the parts'
    squares, which are sums of those that make the norm. Reading the results is the step's only wait
    for the device.
    """
    names = sorted(set(parameters.values())) if by_part else []
    sums = torch.zeros(
        1 + len(numbers) + len(names), dtype=torch.float64, device=_device(parameters)
    )
    if counted := list(_counted_here(parameters, mesh.rank)):
        squares_N, parts_N = _squares(counted)
        sums[0] = squares_N.sum()
        if by_part:
            sums[1 + len(numbers) :] = _sums_of_parts(squares_N, parts_N, names)
    for place, number in enumerate(numbers, start=1):
        sums[place].fill_(number)
    if mesh.world_group.size() > 1:
        dist.all_reduce(sums, group=mesh.world_group)
    norm, *rest = sums.tolist()
    norms = map(math.sqrt, rest[len(numbers) :])
    return math.sqrt(norm), tuple(rest[: len(numbers)]), dict(zip(names, norms, strict=True))


def clip_gradients(
    parameters: Mapping[Parameter, str],
    mesh: Mesh,
    *,
    max_norm: float,
    numbers: Sequence[Tensor | float] = (),
    by_part: bool = False,
) -> tuple[float, tuple[float, ...], dict[str, float]]:
    """Scales all reduced gradients by min(1, max_norm / norm). Collective.

    Returns the norm before clipping, the numbers' sums and the norms of the parts, as
    `global_grad_norm` does. If the norm is not finite, skip the step; all ranks see the same norm, so
    all skip.
    """
    norm, sums, norms = global_grad_norm(parameters, mesh, numbers=numbers, by_part=by_part)
    gradients = [
        local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    scale = max_norm * (1 / (norm + 1e-6))
    if gradients and not scale >= 1:  # NaN is not
        torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
    return norm, sums, norms


def _counted_here(parameters: Mapping[Parameter, str], rank: int) -> Iterator[tuple[Tensor, str]]:
    """Yields what this rank counts of the gradients in the model's norm, each with its part."""
    for parameter, part in parameters.items():
        shard = local_shard_of(parameter)
        if parameter.grad is not None and shard.copy_index(rank) == 0:
            for view in shard.first_views(local_tensor(parameter.grad)):
                yield view, part


def _buckets(parameters: Sequence[Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Groups consecutive parameters of one device and sum dtype into buckets of `bucket_bytes`.

    A larger parameter gets its own bucket.
    """
    groups: list[list[Parameter]] = []
    kind, num_bytes = None, 0
    for parameter in parameters:
        dtype = _sum_dtype(parameter)
        size = parameter.numel() * dtype.itemsize
        if kind != (parameter.device, dtype) or num_bytes + size > bucket_bytes:
            groups.append([])
            kind, num_bytes = (parameter.device, dtype), 0
        groups[-1].append(parameter)
        num_bytes += size
    return [_bucket(group) for group in groups]


def _bucket(parameters: list[Parameter]) -> _Bucket:
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), dtype=_sum_dtype(parameters[0]), device=parameters[0].device)
    views = [
        part.view(parameter.shape)
        for part, parameter in zip(flat.split(sizes), parameters, strict=True)
    ]
    return _Bucket(parameters, flat, views)


def _sum_dtype(parameter: Parameter) -> torch.dtype:
    # sums over many ranks in bfloat16 would lose small terms
    return torch.promote_types(parameter.dtype, torch.float32)


def _squares(counted: Sequence[tuple[Tensor, str]]) -> tuple[Tensor, list[str]]:
    """Returns the squared norm of each gradient in float64, and its part, in one order."""
    by_dtype: dict[torch.dtype, list[tuple[Tensor, str]]] = {}
    for gradient, part in counted:
        by_dtype.setdefault(gradient.dtype, []).append((gradient, part))
    norms = [
        torch.stack(
            _norms([gradient for gradient, _ in same], torch.promote_types(dtype, torch.float32))
        ).double()
        for dtype, same in by_dtype.items()
    ]
    squares_N = (norms[0] if len(norms) == 1 else torch.cat(norms)).square()
    return squares_N, [part for same in by_dtype.values() for _, part in same]


def _sums_of_parts(values_N: Tensor, parts_N: Sequence[str], names: Sequence[str]) -> Tensor:
    """Returns the sum of each part's values, in the order of `names`; other parts' may be NaN."""
    of_N = on_device(torch.tensor([names.index(part) for part in parts_N]), values_N.device)
    of_P = torch.arange(len(names), device=values_N.device)
    return torch.where(of_P[:, None] == of_N, values_N, 0.0).sum(1)


def _norms(gradients: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch._foreach_norm(gradients, 2, dtype)  # pyright: ignore[reportPrivateImportUsage]


def _device(parameters: Iterable[Parameter]) -> torch.device:
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
