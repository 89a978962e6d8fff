"""Records of kernel calls, and the base class of every backend.

A call is one flat frozen record, so an operator's schema is the list of its fields (ops.py) and
nothing is unpacked by position.

Legend: U source rows, N routes, E experts, D input width, F hidden width, W columns before the
activation (F, or 2F if it is gated), O output width, P ranks, T target rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

ROW_SLACK = 64  # extra rows at the end of a backend's saved rows
Call = TypeVar("Call")  # MLPCall or LinearCall


# Lists of routes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sorting:
    """N routes sorted stably by expert, computed once per routing (permute.py).

    `order_N` and `place_N` are None if the routes are already sorted.
    """

    order_N: Tensor | None  # int32: the route that stands at a sorted place
    place_N: Tensor | None  # int32: the sorted place of a route
    # int32, on the routes' device: expert e has the places starts[e] … starts[e+1] − 1
    starts_E1: Tensor


class RouteList(Protocol):
    """The fields of a route list that operations read; the model's `Routes` implements it.

    Route n reads row source_N[n], passes through expert_N[n], is scaled by weight_N[n] and added to
    row target_N[n]. If `per_source`, `per_target` or `per_expert` is k > 0, route n belongs to
    source row, target row or expert n // k.
    """

    @property
    def source_N(self) -> Tensor: ...
    @property
    def expert_N(self) -> Tensor: ...
    @property
    def weight_N(self) -> Tensor: ...
    @property
    def target_N(self) -> Tensor: ...
    @property
    def num_targets(self) -> int: ...
    @property
    def per_source(self) -> int: ...
    @property
    def per_target(self) -> int: ...
    @property
    def per_expert(self) -> int: ...
    @property
    def sorting(self) -> Sorting: ...


def check_counts(routes: RouteList, num_experts: int) -> None:
    """Checks that a positive `per_expert` matches the number of routes.

    Raises:
        ValueError: it does not.
    """
    num_routes = routes.expert_N.shape[0]
    if routes.per_expert and routes.per_expert * num_experts != num_routes:
        raise ValueError(
            f"per_expert={routes.per_expert} does not fit {num_routes} routes over {num_experts} experts: "
            "give their quotient, or 0 if the counts differ"
        )


# Calls --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SortedRoutes:
    """A route list as backends receive it.

    `weight_N`, `source_N` and `target_N` are in route order. An index is None if a rule replaces
    it: route n then belongs to source row n // per_source, or to target row n // per_target.
    """

    weight_N: Tensor
    order_N: Tensor | None
    place_N: Tensor | None
    starts_E1: Tensor
    source_N: Tensor | None
    target_N: Tensor | None
    num_targets: int
    per_source: int
    per_target: int
    per_expert: int

    @property
    def num_routes(self) -> int:
        """Returns N, the number of routes."""
        return self.weight_N.shape[0]

    @property
    def num_experts(self) -> int:
        """Returns E, the number of experts."""
        return self.starts_E1.shape[0] - 1

    def source_rows(self) -> Tensor:
        """Returns the source row at each sorted place, (N,)."""
        return self._rows(self.source_N, self.per_source)

    def target_rows(self) -> Tensor:
        """Returns the target row at each sorted place, (N,)."""
        return self._rows(self.target_N, self.per_target)

    def gates(self, dtype: torch.dtype) -> Tensor:
        """Returns the gate weight at each sorted place in a dtype, (N,)."""
        return self._sorted(self.weight_N).to(dtype)

    def starts(self) -> list[int]:
        """Returns `starts_E1` on the host: the only synchronisation of backends that loop.

        With `per_expert` it is known without one.
        """
        if self.per_expert:
            return [expert * self.per_expert for expert in range(self.num_experts + 1)]
        return self.starts_E1.tolist()

    def gate_gradient(self, grad_gate: Tensor) -> Tensor:
        """Returns gradients at sorted places, which may be padded, in route order and the gates' dtype."""
        values_N = grad_gate[: self.num_routes].to(self.weight_N.dtype)
        return values_N if self.place_N is None else values_N.index_select(0, self.place_N)

    def _sorted(self, values_N: Tensor) -> Tensor:
        return values_N if self.order_N is None else values_N.index_select(0, self.order_N)

    def _rows(self, index_N: Tensor | None, per_row: int) -> Tensor:
        if index_N is not None:
            return self._sorted(index_N)
        order_N = self.order_N
        if order_N is None:
            order_N = torch.arange(self.num_routes, device=self.weight_N.device, dtype=torch.int32)
        return order_N if per_row == 1 else torch.div(order_N, per_row, rounding_mode="floor")


@dataclass(frozen=True)
class MLPCall(SortedRoutes):
    """A call of a bank of two-layer perceptrons, W_down[e]ᵀ a(W_up[e]ᵀ x + b_up[e]) + b_down[e].

    Rows, weights and gradients share one dtype; gate weights are float32 or wider. All tensors are
    contiguous.
    """

    WEIGHTS: ClassVar = ("w_up_EDW", "w_down_EFO")
    BIASES: ClassVar = ("b_up_EW", "b_down_EO")
    HAS_HIDDEN_ROWS: ClassVar = True

    x_UD: Tensor
    w_up_EDW: Tensor
    w_down_EFO: Tensor
    b_up_EW: Tensor | None
    b_down_EO: Tensor | None
    activation: str
    backend: str
    number: int  # identifies the weights' `GradientSum`; 0: none

    @property
    def width_out(self) -> int:
        """Returns O, the width of an output row."""
        return self.w_down_EFO.shape[2]

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """Returns the shape of the rows that the backward pass reads."""
        return self.num_routes + ROW_SLACK, self.w_up_EDW.shape[2]


@dataclass(frozen=True)
class LinearCall(SortedRoutes):
    """A call of a bank of matrices, W[e]ᵀ x; otherwise like `MLPCall`."""

    WEIGHTS: ClassVar = ("w_EDO",)
    BIASES: ClassVar = ()
    HAS_HIDDEN_ROWS: ClassVar = False

    x_UD: Tensor
    w_EDO: Tensor
    backend: str
    number: int

    @property
    def width_out(self) -> int:
        """Returns O, the width of an output row."""
        return self.w_EDO.shape[2]

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """Returns the shape of the ungated outputs, saved only if they are the narrow side."""
        _, width_in, width_out = self.w_EDO.shape
        return (self.num_routes + ROW_SLACK, width_out) if width_out <= width_in else (0,)


@dataclass(frozen=True)
class GradientBuffers:
    """Buffers for the weights' gradients, in the order of `WEIGHTS`.

    `are_new` buffers are uninitialised, so they are overwritten instead of added to. Only backends
    with `writes` receive them; others receive zeros.
    """

    weights: Sequence[Tensor]
    are_new: bool = False


Into = GradientBuffers  # its former name, which backends of users may import


@dataclass(frozen=True)
class RowGradients:
    """Gradients of a call's rows, gate weights (in route order) and biases.

    `z_NW` is the gradient of a perceptron's rows before the activation, laid out like the saved
    rows. It is set if the weights' gradients are deferred.
    """

    x_UD: Tensor
    weight_N: Tensor
    b_up_EW: Tensor | None = None
    b_down_EO: Tensor | None = None
    z_NW: Tensor | None = None


@dataclass(frozen=True)
class Deferred(Generic[Call]):
    """A call whose weight gradients are deferred, with their operands."""

    call: Call
    grad_TO: Tensor
    saved: Tensor
    z_NW: Tensor | None = None  # perceptrons only


# Backends -----------------------------------------------------------------------------------------


class Backend(ABC):
    """Implements both operations, forward and backward."""

    writes: ClassVar[bool] = False  # overwrites uninitialised gradients of perceptrons' weights

    @abstractmethod
    def mlp_forward(self, call: MLPCall) -> tuple[Tensor, Tensor]:
        """Computes the weighted outputs of all perceptrons, summed per target.

        Returns:
            y (num_targets, O), and the rows that the activation's backward reads, in sorted order:
            (N + ROW_SLACK, W).
        """

    @abstractmethod
    def mlp_backward(
        self, call: MLPCall, grad_TO: Tensor, saved: Tensor, into: GradientBuffers
    ) -> RowGradients:
        """Returns the gradients of rows, gate weights and biases; adds the weights' to `into`."""

    @abstractmethod
    def linear_forward(self, call: LinearCall) -> tuple[Tensor, Tensor]:
        """Computes the weighted outputs of all matrices, summed per target.

        Returns:
            y (num_targets, O), and the ungated outputs (N + ROW_SLACK, O) if O ≤ D, else empty.
        """

    @abstractmethod
    def linear_backward(
        self, call: LinearCall, grad_TO: Tensor, saved: Tensor, into: GradientBuffers
    ) -> RowGradients:
        """Returns the gradients of rows and gate weights; adds the weights' to `into`."""


class DeferringBackend(Backend):
    """A backend that computes the weight gradients of several calls in one product."""

    @abstractmethod
    def mlp_backward_rows(self, call: MLPCall, grad_TO: Tensor, saved: Tensor) -> RowGradients:
        """Computes `mlp_backward` with `z_NW` instead of the weights' gradients."""

    @abstractmethod
    def mlp_weight_gradients(self, calls: Sequence[Deferred[MLPCall]]) -> tuple[Tensor, Tensor]:
        """Computes the gradients of w_up and w_down over all calls."""

    @abstractmethod
    def linear_backward_rows(
        self, call: LinearCall, grad_TO: Tensor, saved: Tensor
    ) -> RowGradients:
        """Computes `linear_backward` without the weights' gradient."""

    @abstractmethod
    def linear_weight_gradients(self, calls: Sequence[Deferred[LinearCall]]) -> tuple[Tensor]:
        """Computes the gradient of w over all calls."""


# Sends of an exchange -----------------------------------------------------------------------------

ROWS, ROUTES, TARGETS = 0, 1, 2  # columns of a table of counts


@dataclass(frozen=True)
class Addresses:
    """N routes and the rank of every expert.

    `into_sources`: the target rows are the source rows.
    """

    source_N: Tensor  # int64, as the following two
    target_N: Tensor
    expert_N: Tensor
    rank_E: Tensor  # int32
    slot_E: Tensor  # int32: its number on that rank
    num_sources: int
    num_targets: int
    num_ranks: int
    into_sources: bool = False


@dataclass(frozen=True)
class SendCounts:
    """Counts the rows, routes and targets for each rank, and numbers the rows that go there.

    An index is −1 where a row does not go to that rank. `number_PT` is None where the target rows
    are the source rows.
    """

    counts_P3: Tensor  # int64: distinct rows, routes, distinct target rows
    destination_N: Tensor  # int32
    number_PU: Tensor  # int32
    number_PT: Tensor | None  # int32


@dataclass(frozen=True)
class RowPairs:
    """Distinct (rank, row) pairs sorted by rank, and their places sorted by row.

    There are at most N pairs; entries after the last are undefined.
    """

    row_N: Tensor  # int32, as the following two
    by_row_N: Tensor  # places in `row_N`, in the order of (row, rank)
    first_U: Tensor  # where every row's places begin in `by_row_N`

    def first(self, num_pairs: int) -> "RowPairs":
        """Returns the lists cut to `num_pairs` pairs."""
        return RowPairs(self.row_N[:num_pairs], self.by_row_N[:num_pairs], self.first_U)


@dataclass(frozen=True)
class PackedSends:
    """Routes packed by destination rank, and the rows sent with them.

    The metadata stores slot, row and target, in the destination's numbering, as the bits of floats.
    One exchange then carries them and the weight, whose gradient returns the same way.
    """

    metadata_N4: Tensor  # of the weights' dtype: slot, row, target, weight
    place_N: Tensor  # int32: each route's row in the metadata
    sources: RowPairs
    targets: RowPairs | None  # None: as `sources`


INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}  # of a weight's width
