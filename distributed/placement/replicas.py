"""Reduces the gradients of replicated experts, so that all copies get the same bits and stay equal.

Copies have processed different tokens. Before the usual reduction their gradients are packed into one
tensor per parameter, with zeros for absent experts, and summed over the world in float32. The sum
then replaces the result of the usual reduction.

Cost per step: one all-reduce over the world of all experts with copies (at most half the slots), and
persistent buffers of that size.

Legend: X experts with copies.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from ..dispatch.expert_map import ExpertMap
from ..gradients import GradientReducer, parameters_to_reduce
from ..mesh import Mesh
from .move import banks_of, expert_maps_of


@dataclass(frozen=True)
class _Shared:
    """A parameter with replicated experts, and the sum of their gradients."""

    parameter: Parameter
    slots: list[int]  # of replicated experts on this rank
    places: list[int]  # their places in the sum
    sum_X: Tensor

    def pack(self) -> None:
        """Copies this rank's gradients of replicated experts into the sum."""
        self.sum_X.zero_()
        if self.parameter.grad is not None:
            self.sum_X[self.places] = self.parameter.grad[self.slots].to(self.sum_X.dtype)

    def unpack(self) -> None:
        """Replaces the gradients of this rank's copies by the sum."""
        if self.parameter.grad is None:
            raise AssertionError("the reducer gives every parameter a gradient")
        self.parameter.grad[self.slots] = self.sum_X[self.places].to(self.parameter.grad.dtype)


class CopyReducer:
    """A `GradientReducer` that sums the gradients of an expert's copies over all of them."""

    def __init__(
        self,
        reducer: GradientReducer,
        banks: Iterable[tuple[ExpertMap, Iterable[Parameter]]],
        mesh: Mesh,
    ) -> None:
        self._reducer, self._group = reducer, mesh.world_group
        self._shared: list[_Shared] = []
        for expert_map, parameters in banks:
            if expert_map.copies:
                trained = [parameter for parameter in parameters if parameter.requires_grad]
                self._shared += _shared(expert_map, trained, mesh.coordinates.ep)

    def zero_in_place(self) -> None:
        """Sets all gradients to zeros, see `GradientReducer.zero_in_place`."""
        self._reducer.zero_in_place()

    def reduce(self) -> None:
        """Replaces every gradient by its sum over the ranks. Collective over the world."""
        pending = []
        for shared in self._shared:
            shared.pack()
            pending.append(dist.all_reduce(shared.sum_X, group=self._group, async_op=True))
        self._reducer.reduce()
        for shared, work in zip(self._shared, pending, strict=True):
            if work is not None:
                work.wait()
            shared.unpack()


def make_reducer(model: nn.Module, mesh: Mesh) -> GradientReducer | CopyReducer:
    """Returns the reducer for a model's current placement of experts; a move needs a new one."""
    reducer = GradientReducer(*parameters_to_reduce(model), mesh)
    expert_maps = expert_maps_of(model)
    if not any(expert_map.copies for expert_map in expert_maps.values()):
        return reducer
    banks = [
        (expert_maps[name], layer.experts.parameters()) for name, layer in banks_of(model).items()
    ]
    return CopyReducer(reducer, banks, mesh)


def _shared(expert_map: ExpertMap, parameters: Iterable[Parameter], ep_rank: int) -> list[_Shared]:
    """Prepares the sums of one bank's replicated experts, one per parameter."""
    copied, own = sorted({expert for expert, _ in expert_map.copies}), expert_map.own_slots(ep_rank)
    held = {expert: slot for slot, expert in enumerate(expert_map.expert_S[own.start : own.stop])}
    places = [place for place, expert in enumerate(copied) if expert in held]
    slots = [held[copied[place]] for place in places]
    return [
        _Shared(
            parameter,
            slots,
            places,
            torch.zeros(
                len(copied),
                *parameter.shape[1:],
                dtype=torch.promote_types(parameter.dtype, torch.float32),
                device=parameter.device,
            ),
        )
        for parameter in parameters
    ]
