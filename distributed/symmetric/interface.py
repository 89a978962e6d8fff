"""What the symmetric dispatcher asks of memory that the ranks share: four kinds of messages.

`Outbox` (outbox.py) has it for processes of one machine.

Legend: P ranks, C chunks, U source rows, T target rows, N routes, M rows that came, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...model.routing import Routes


class Room(NamedTuple):
    """For how many rows, routes and target rows there is room."""

    rows: int
    routes: int
    targets: int


class OutboxError(RuntimeError):
    """Two ranks disagree about what they exchange, or the machine has no memory for it."""


class ExchangePlan(Protocol):
    """Where every route of one pass goes; what else it holds is its maker's own."""

    @property
    def num_chunks(self) -> int: ...
    @property
    def num_sources(self) -> int: ...
    @property
    def num_targets(self) -> int: ...
    @property
    def num_routes(self) -> int: ...
    @property
    def room(self) -> Room | None:
        """For what comes, where nobody asks how much that is."""
        ...

    @property
    def sent_P3(self) -> Tensor | None:
        """With room: rows, routes and targets for every rank, int64 on the device."""
        ...


@dataclass(frozen=True)
class ReceivedRows:
    """Rows that came, in the order of ranks, and the routes that read them.

    With `num_targets` there was room for more: what is unused of it names the first row, slot and
    target row past the end.
    """

    rows_MD: Tensor
    weight_N: Tensor
    places_3N: Tensor  # int64: source row, slot, target row
    # int64: where rows, routes and targets of a rank begin, and end. On the host; with `num_targets`
    # on the device
    starts_3P1: Tensor
    num_targets: int | None = None  # for how many there was room; None: they are as many as came
    is_over: Tensor | None = None  # bool, scalar: there was too little, and no place is used


class RowOutbox(Protocol):
    """One rank's messages for the ranks of a group, and theirs for it.

    Every rank posts and takes the same messages in the same order. What waits raises
    `CollectiveError` where a rank died, left or did not come in time, and `OutboxError` where one
    posted something else.
    """

    rank: int
    num_ranks: int
    waited_s: float  # for messages that were not there yet

    def plan(
        self,
        routes: Routes,
        num_sources: int,
        *,
        rank_E: Tensor,
        slot_E: Tensor,
        num_slots: int,
        num_chunks: int,
        rows_per_token: int,
        of_token: Sequence[int] | None = None,
        room: float | None = None,
    ) -> Any:
        """Writes down where every route goes; returns an `ExchangePlan`.

        Args:
            rank_E, slot_E: int32, where every expert is.
            num_slots: of this rank.
            rows_per_token: neighbouring source rows that travel in one chunk.
            of_token: rows, routes and targets of every token for every rank, where all ranks know
                that they have equally many tokens and it is the same for each.
            room: where all ranks have equally many rows and routes: for how many routes that come
                there is to be room, as a multiple of those that a rank sends; so nobody needs to
                read how many come. Devices only; without meaning on CPUs, which know it for nothing.

        Raises:
            ValueError: a route is out of range, or the chunks are too many.
        """
        ...

    def check(self, checking: bool) -> None:
        """Lets messages be compared from now on, or not."""
        ...

    def sent(self, plan: Any) -> list[list[int]]:
        """Counts the rows, routes and targets of a pass by the rank that they go to, (3, P).

        Asked after its rows were taken.
        """
        ...

    def post_rows(self, plan: Any, chunk: int, x_UD: Tensor, weight_N: Tensor) -> int:
        """Posts one chunk of rows and the routes that read them; returns the message's number."""
        ...

    def take_rows(self, number: int, like: Tensor, weight_dtype: torch.dtype) -> ReceivedRows:
        """Waits for a message of every rank, and copies what is for this one."""
        ...

    def post_answers(self, rows: Tensor, starts_3P1: Tensor) -> int:
        """Posts one row for every target that came; returns the message's number."""
        ...

    def sum_answers(self, plan: Any, numbers: Sequence[int], like: Tensor) -> Tensor:
        """Waits for the answers to all chunks and adds them up, (T, D), in the order of ranks."""
        ...

    def post_gradients(self, plan: Any, chunk: int, grad_TD: Tensor) -> int:
        """Posts the gradients of one chunk's answers; returns the message's number."""
        ...

    def take_gradients(self, number: int, num_rows: int, like: Tensor) -> Tensor:
        """Waits for the gradients of answers of every rank, in the order of ranks."""
        ...

    def post_row_gradients(self, rows: Tensor, weight_N: Tensor, starts_3P1: Tensor) -> int:
        """Posts the gradients of rows and weights that came; returns the message's number."""
        ...

    def sum_gradients(
        self, plan: Any, numbers: Sequence[int], like: Tensor, grad_weight_N: Tensor
    ) -> Tensor:
        """Waits for the gradients of all chunks' rows and adds them up, (U, D).

        The weights' gradients are written into `grad_weight_N`.
        """
        ...
