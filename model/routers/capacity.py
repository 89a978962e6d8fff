"""Capacity: how many rows an expert serves at most, and which ones it refuses.

The routing group is one rank's micro-batch of n rows. An expert serves C = ⌈f·K·n/E⌉ routes, at
least 1, with f the capacity factor (GShard, arXiv 2006.16668, §3.2; Switch, arXiv 2101.03961, eq.
3). A refused route disappears: the row keeps its residual, and the other gate weights stay as
renormalised before. Code bases round differently: up (V-MoE), or down after rounding n/E up
(torchscale, Tutel). Here C rounds up in exact arithmetic, so f = 1.1 means 11 for 10.

`drop_order` decides in which order routes request a place:

    position_major   by (position, sequence, choice): later positions never take a place, so the model stays causal
    token_major      by (sequence, position, choice): the order of rows; later positions of earlier sequences take places
    slot_major       all first choices, then all second ones (GShard): a later first choice evicts an earlier second choice
    priority         as slot_major, but rows with the largest probability first (V-MoE, arXiv 2106.05974, algorithm 2)

With a capacity, an output depends on the micro-batch's other rows, its size and its sequence
length: a truncated text has a smaller capacity, and token-by-token generation another one at each
token. Under `position_major` later positions matter only by their number. Cost: two sorts of N =
T·K small integers and one number read from the device (the remaining routes). Nothing of size T·E·C
exists.

Legend: T rows, E experts, K experts chosen, N routes (T·K, row-major), C capacity.
"""

import math
from fractions import Fraction
from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import Tensor

from ..execution.draws import draw_uniform
from ..routing import Routes
from .router import Choice, ChoiceConfig, ChoiceRouter, Promises, TopKConfig

DropOrder = Literal["position_major", "token_major", "slot_major", "priority"]


class CapacityConfig(TopKConfig, ChoiceConfig):
    """Describes the keys of every router that may refuse rows."""

    capacity_factor: PositiveFloat | None = None
    """Capacity of an expert in training, relative to an even load; none: dropless."""

    evaluation_capacity_factor: PositiveFloat | None = None
    """Capacity of an expert in evaluation; none: dropless."""

    drop_order: DropOrder = "position_major"
    """Which routes a full expert refuses first."""

    capacity_rounding: Literal["routes", "rows"] = "routes"
    """With "routes", C = ⌈f·K·n/E⌉. With "rows", as in torchscale, C = ⌊f·K·⌈n/E⌉⌋."""

    @property
    def random_second(self) -> bool:
        """Returns whether training uses a row's second expert at random.

        The probability is min(1, 2·its gate weight).
        """
        return False

    @property
    def promises(self) -> Promises:
        """Returns what this configuration guarantees."""
        unlimited = self.capacity_factor is None and self.evaluation_capacity_factor is None
        return self._promises(unlimited, dropless=unlimited and not self.random_second)

    @property
    def evaluation_promises(self) -> Promises:
        """Returns what this configuration guarantees in evaluation."""
        unlimited = self.evaluation_capacity_factor is None
        return self._promises(unlimited, dropless=unlimited)

    def _promises(self, unlimited: bool, *, dropless: bool) -> Promises:
        return Promises(
            causal=unlimited or self.drop_order == "position_major",
            batch_invariant=unlimited,
            dropless=dropless,
            balanced=False,
        )


class CapacityRouter(ChoiceRouter):
    """Routes to experts that may be full; a subclass implements `choose`, best choice first."""

    config: CapacityConfig

    def admit(
        self, choice: Choice, routes: Routes, batch_size: int, real_T: Tensor | None
    ) -> Routes:
        """Returns the requested routes that find a place; padding requests none.

        The capacity counts padding rows, because it follows from shapes.
        """
        config = self.config
        factor = config.capacity_factor if self.training else config.evaluation_capacity_factor
        asked_TK = self._asked(choice)
        if factor is None:
            return routes if asked_TK is None else routes.kept(asked_TK.flatten())
        if real_T is not None:
            real_TK = real_T[:, None].expand_as(choice.experts_TK)
            asked_TK = real_TK if asked_TK is None else asked_TK & real_TK
        num_rows, top_k = choice.experts_TK.shape
        if config.capacity_rounding == "rows":
            capacity = row_capacity(factor, num_rows, top_k=top_k, num_experts=self.num_experts)
        else:
            capacity = expert_capacity(factor, num_rows * top_k, num_experts=self.num_experts)
        expert_N = routes.expert_N
        if asked_TK is not None:  # the others queue at a dummy expert
            expert_N = expert_N.where(asked_TK.flatten(), self.num_experts)
        turn_N = serving_order(choice, config.drop_order, batch_size)
        return routes.kept(
            has_place(expert_N, turn_N, capacity=capacity) & (expert_N < self.num_experts)
        )

    def _asked(self, choice: Choice) -> Tensor | None:
        """Draws GShard's random second expert (arXiv 2006.16668, algorithm 1); None: use all."""
        if not self.training or not self.config.random_second:
            return None
        second_T = choice.weights_TK[:, 1].detach()
        asked_T = 2 * second_T > draw_uniform(second_T.shape, second_T.device)
        return torch.stack((torch.ones_like(asked_T), asked_T), dim=1)


def expert_capacity(factor: float, num_routes: int, *, num_experts: int) -> int:
    """Returns C = ⌈factor · routes / experts⌉, at least 1, with the factor as an exact decimal."""
    return max(1, math.ceil(Fraction(str(factor)) * num_routes / num_experts))


def row_capacity(factor: float, num_rows: int, *, top_k: int, num_experts: int) -> int:
    """Returns torchscale's C: ⌊factor · K · ⌈rows / experts⌉⌋, at least 1."""
    return max(1, math.floor(Fraction(str(factor)) * top_k * math.ceil(num_rows / num_experts)))


def serving_order(choice: Choice, order: DropOrder, batch_size: int) -> Tensor:
    """Returns the routes' numbers, (N,), in the order in which they request a place."""
    experts_TK = choice.experts_TK
    route_TK = torch.arange(experts_TK.numel(), device=experts_TK.device).view_as(experts_TK)
    match order:
        case "position_major":
            return route_TK.unflatten(0, (batch_size, -1)).transpose(0, 1).flatten()
        case "token_major":
            return route_TK.flatten()
        case "slot_major":
            return route_TK.T.flatten()
        case "priority":
            largest_T = choice.logits_TE.detach().softmax(-1).amax(-1)
            return route_TK[largest_T.argsort(descending=True, stable=True)].T.flatten()


def has_place(expert_N: Tensor, turn_N: Tensor, *, capacity: int) -> Tensor:
    """Returns whether each route is among its expert's first `capacity`: (N,) bool.

    Route turn_N[i] is the i-th to ask.
    """
    queue_N, index_N = expert_N[turn_N].sort(stable=True)
    place_N = torch.arange(len(queue_N), device=queue_N.device) - torch.searchsorted(
        queue_N, queue_N
    )
    return torch.empty_like(queue_N, dtype=torch.bool).scatter_(
        0, turn_N[index_N], place_N < capacity
    )
