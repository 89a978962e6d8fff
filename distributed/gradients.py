"""Gradients over the mesh: every reduction is a SUM, one norm, one clipping coefficient, one
decision to skip.

The loss is already divided by the number of tokens of the whole world, so nothing is averaged here:
a dense gradient is summed over the world, an expert's over all ranks that hold it
(expert_replicas); the all-to-all's backward has brought the gradients of the ep group's tokens to
the expert already. What FSDP shards, it has summed itself (sharding.py).

A parameter without a gradient on this rank counts as zeros, and after the reduction every parameter
has a gradient. So all ranks issue the same collectives whatever their tokens did, and one rank
treats a parameter as many do.

Cost per step: one copy of the gradients into flat buckets (kept; 4 bytes per parameter) and one
all-reduce per 25 MB; the reduced gradients are views into the buckets, so nothing is copied back
unless the parameters are narrower than float32.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from .local_shard import local_shard_of, local_tensor
from .mesh import Mesh

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class _Bucket:
    """Neighbouring parameters whose gradients are reduced as one flat tensor."""

    parameters: list[Parameter]
    flat: Tensor  # float32, or float64 for parameters of float64
    views: list[Tensor]  # into `flat`, of the parameters' shapes

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
        """Makes the sums in the flat tensor the parameters' gradients."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.dtype == view.dtype:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.to(parameter.dtype)
            else:
                parameter.grad.copy_(view)


class GradientReducer:
    """Sums gradients over the ranks, again and again, in the same buffers.

    `dense` and `experts` must be the same, in the same order, on every rank. After `reduce()` the
    gradients are views into this object's buffers: valid until the next `reduce()`.
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
        self._alone: list[Parameter] = []  # held by this rank only: nothing to add
        for parameters, group in ((dense, mesh.world_group), (experts, mesh.expert_replica_group)):
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            if group.size() == 1:
                self._alone += trained
            else:
                self._sums.append((group, _buckets(trained, bucket_bytes)))

    def reduce(self) -> None:
        """Replaces every gradient by its sum over the ranks; a collective call of the world."""
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
    """Returns the dense and the expert parameters of a model, each in the model's order.

    Those that FSDP shards are in neither: it sums their gradients itself.
    """
    dense: list[Parameter] = []
    experts: list[Parameter] = []
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            (experts if local_shard_of(parameter).has_experts else dense).append(parameter)
    return dense, experts


def global_grad_norm(
    parameters: Sequence[Parameter], mesh: Mesh, *, numbers: Sequence[Tensor | float] = ()
) -> tuple[float, tuple[float, ...]]:
    """Returns the 2-norm of the whole model's reduced gradient, and the numbers' sums over ranks.

    All are read from the device at once: the step's one wait for it.

    A collective call, with as many numbers on every rank; its results have the same bits on all of
    them. Every element is counted once, by the first copy of its tensor, so a non-finite gradient
    anywhere makes the norm non-finite everywhere. The numbers ride on the same reduction: what must
    be agreed at every step boundary (a flag that any rank has set, the step's loss) costs no
    message of its own.
    """
    sums = torch.zeros(1 + len(numbers), dtype=torch.float64, device=_device(parameters))
    sums[0] = _square_sum(list(_counted_here(parameters, mesh.rank)))
    for place, number in enumerate(numbers, start=1):
        sums[place] = number
    if mesh.world_group.size() > 1:
        dist.all_reduce(sums, group=mesh.world_group)
    sums[0].sqrt_()
    norm, *rest = sums.tolist()
    return norm, tuple(rest)


def clip_gradients(
    parameters: Sequence[Parameter],
    mesh: Mesh,
    *,
    max_norm: float,
    numbers: Sequence[Tensor | float] = (),
) -> tuple[float, tuple[float, ...]]:
    """Scales all gradients by min(1, max_norm / norm).

    Returns the norm before that and the numbers' sums, as `global_grad_norm` does.

    A collective call, after the reduction. If the norm is not finite the gradients are worthless:
    skip the step. All ranks see the same norm, so all of them do.
    """
    norm, sums = global_grad_norm(parameters, mesh, numbers=numbers)
    gradients = [
        local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None
    ]
    scale = max_norm * (1 / (norm + 1e-6))
    if gradients and not scale >= 1:  # NaN is not
        torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
    return norm, sums


def _counted_here(parameters: Sequence[Parameter], rank: int) -> Iterator[Tensor]:
    """Yields the parts of the gradients that this rank counts for the norm of the whole model."""
    for parameter in parameters:
        shard = local_shard_of(parameter)
        if parameter.grad is not None and shard.copy_index(rank) == 0:
            yield from shard.first_views(local_tensor(parameter.grad))


def _buckets(parameters: Sequence[Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Groups consecutive parameters of one device and sum type, about bucket_bytes in a bucket.

    A parameter that is larger has a bucket of its own.
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
    # bfloat16 sums over many ranks would lose small terms
    return torch.promote_types(parameter.dtype, torch.float32)


def _square_sum(gradients: Sequence[Tensor]) -> Tensor | float:
    if not gradients:
        return 0.0
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    norms = [
        torch.stack(_norms(same, torch.promote_types(dtype, torch.float32))).double()
        for dtype, same in by_dtype.items()
    ]
    return (norms[0] if len(norms) == 1 else torch.cat(norms)).square().sum()


def _norms(gradients: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return torch._foreach_norm(gradients, 2, dtype)  # pyright: ignore[reportPrivateImportUsage]


def _device(parameters: Sequence[Parameter]) -> torch.device:
    return next((parameter.device for parameter in parameters), torch.device("cpu"))
