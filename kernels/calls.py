"""The records that kernels are called with, and the class that every backend of the experts
implements.

A call is one flat frozen record, so that an operator's schema is the list of its fields (ops.py) and
nothing is taken apart by position.

Legend: U source rows, N routes, E experts, D input width, F hidden width, W columns before the
activation (F, or 2F where it is gated), O output width. Of an exchange: P ranks, T target rows, B
blocks of routes, b blocks of rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

ROW_SLACK = 64  # rows that a backend's saved rows have past the end
Call = TypeVar("Call")  # MLPCall or LinearCall


# Lists of routes ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sorting:
    """Holds N routes sorted by expert, within an expert in their old order.

    It is made once (permute.py) and used by all. `order_N` and `place_N` are None where the routes
    stand in that order already.
    """

    order_N: Tensor | None  # int32: the route that stands at a sorted place
    place_N: Tensor | None  # int32: the sorted place of a route
    # int32, on the routes' device: expert e has the places starts[e] … starts[e+1] − 1
    starts_E1: Tensor


class RouteList(Protocol):
    """Declares what an operation reads of a list of routes (the model's `Routes` is one).

    Route n reads row source_N[n], goes through expert_N[n], is weighed by weight_N[n] and added into
    row target_N[n]. Where `per_source`, `per_target` or `per_expert` is k > 0, route n belongs to
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
    """Checks a route list's claim that all experts have equally many routes.

    Raises:
        ValueError: they cannot.
    """
    num_routes = routes.expert_N.shape[0]
    if routes.per_expert and routes.per_expert * num_experts != num_routes:
        raise ValueError(
            f"per_expert={routes.per_expert} is not that of {num_routes} routes over {num_experts} "
            "experts: "
            "give their quotient, or 0 where the counts differ"
        )


# Calls --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SortedRoutes:
    """Holds what a backend gets of a list of routes.

    `weight_N`, `source_N` and `target_N` are in route order. The indices are None where a rule
    stands for them: route n then belongs to source row n // per_source, or to target row
    n // per_target.
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
        """Returns the gate weight at each sorted place in that dtype, (N,)."""
        return self._sorted(self.weight_N).to(dtype)

    def starts(self) -> list[int]:
        """Returns `starts_E1` on the host.

        It is known, or read from the device: the one synchronisation of backends that loop.
        """
        if self.per_expert:
            return [expert * self.per_expert for expert in range(self.num_experts + 1)]
        return self.starts_E1.tolist()

    def unsorted(self, values_N: Tensor) -> Tensor:
        """Brings values from sorted order into the order of the routes."""
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

    Rows, weights and gradients are of one dtype, gate weights of float32 or wider; all are
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
    number: int  # of the weights' `GradientSum`, or 0

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
    """A call of a bank of matrices, W[e]ᵀ x; otherwise as `MLPCall`."""

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
        """Returns the shape of the ungated outputs, which are kept where they are the narrow side."""
        _, width_in, width_out = self.w_EDO.shape
        return (self.num_routes + ROW_SLACK, width_out) if width_out <= width_in else (0,)


@dataclass(frozen=True)
class Into:
    """What a backend adds the gradients of a bank's weights to, in the order of `WEIGHTS`.

    `are_new`: nobody has written them yet, so they are written and not added to. Only for a backend
    that `writes`; others get zeros.
    """

    weights: Sequence[Tensor]
    are_new: bool = False


@dataclass(frozen=True)
class RowGradients:
    """The other gradients of a call: of the rows, the gate weights (in route order) and the biases.

    `z_NW`: of a perceptron's rows before the activation, laid out as the saved rows are, where the
    weights' gradients come later.
    """

    x_UD: Tensor
    weight_N: Tensor
    b_up_EW: Tensor | None = None
    b_down_EO: Tensor | None = None
    z_NW: Tensor | None = None


@dataclass(frozen=True)
class Deferred(Generic[Call]):
    """A call whose weights' gradients come later, and what they are made of."""

    call: Call
    grad_TO: Tensor
    saved: Tensor
    z_NW: Tensor | None = None  # of perceptrons


# Backends -----------------------------------------------------------------------------------------


class Backend(ABC):
    """Implements both operations, forward and backward."""

    writes: ClassVar[bool] = False  # gradients of perceptrons' weights into memory without zeros

    @abstractmethod
    def mlp_forward(self, call: MLPCall) -> tuple[Tensor, Tensor]:
        """Computes all perceptrons' weighted outputs, summed per target.

        Returns:
            y (num_targets, O), and in sorted order what the activation's backward reads: rows of W
            columns, N + ROW_SLACK of them.
        """

    @abstractmethod
    def mlp_backward(
        self, call: MLPCall, grad_TO: Tensor, saved: Tensor, into: Into
    ) -> RowGradients:
        """Computes the gradients of rows, gate weights and biases.

        Those of the weights are added to `into`, or written there where `are_new`.
        """

    @abstractmethod
    def linear_forward(self, call: LinearCall) -> tuple[Tensor, Tensor]:
        """Computes all matrices' weighted outputs, summed per target.

        Returns:
            y (num_targets, O), and the ungated outputs (N + ROW_SLACK, O) if O ≤ D, else empty.
        """

    @abstractmethod
    def linear_backward(
        self, call: LinearCall, grad_TO: Tensor, saved: Tensor, into: Into
    ) -> RowGradients:
        """Computes the gradients of rows and gate weights; the weights' is added to `into`."""


class DeferringBackend(Backend):
    """A backend that makes the weights' gradients of several calls in one product."""

    @abstractmethod
    def mlp_backward_rows(self, call: MLPCall, grad_TO: Tensor, saved: Tensor) -> RowGradients:
        """Computes what `mlp_backward` does, with `z_NW` in place of the weights' gradients."""

    @abstractmethod
    def mlp_weight_gradients(self, calls: Sequence[Deferred[MLPCall]]) -> tuple[Tensor, Tensor]:
        """Computes the gradients of w_up and w_down, over all calls."""

    @abstractmethod
    def linear_backward_rows(
        self, call: LinearCall, grad_TO: Tensor, saved: Tensor
    ) -> RowGradients:
        """Computes what `linear_backward` does, without the weights' gradient."""

    @abstractmethod
    def linear_weight_gradients(self, calls: Sequence[Deferred[LinearCall]]) -> tuple[Tensor]:
        """Computes the gradient of w, over all calls."""


# What an exchange sends: to which rank every route goes, and what is written down of it -----------

# What is counted of an exchange, as columns.
ROWS, ROUTES, TARGETS = 0, 1, 2


@dataclass(frozen=True)
class Addresses:
    """Holds N routes and the rank of every expert.

    `into_sources`: the target rows are the source rows, one by one.
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
    """What each rank receives, and the index of every row among the rows that go there.

    An index is −1 where a row does not go to that rank. `number_PT` is None where the target rows
    are the source rows.
    """

    counts_P3: Tensor  # int64: distinct rows, routes, distinct target rows
    destination_N: Tensor  # int32
    number_PU: Tensor  # int32
    number_PT: Tensor | None  # int32


@dataclass(frozen=True)
class RowPairs:
    """Lists distinct (rank, row) pairs by rank, and their places in it by row.

    There are at most N; what stands after the last has no meaning.
    """

    row_N: Tensor  # int32, as the following two
    by_row_N: Tensor  # places in `row_N`, in the order of (row, rank)
    first_U: Tensor  # where every row's places begin in `by_row_N`

    def first(self, num_pairs: int) -> "RowPairs":
        """Returns the lists without what stands after the last pair."""
        return RowPairs(self.row_N[:num_pairs], self.by_row_N[:num_pairs], self.first_U)


@dataclass(frozen=True)
class PackedSends:
    """Holds what travels: the routes by rank, and which rows go with them.

    The integers of the metadata (slot, row, target, as numbers of the rank's own) are the
    bits of floats, so that the weight's gradient comes back the same way.
    """

    metadata_N4: Tensor  # of the weights' dtype: slot, row, target, weight
    place_N: Tensor  # int32: where each route stands in it
    sources: RowPairs
    targets: RowPairs | None  # None: as `sources`


INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}  # as wide as a weight
