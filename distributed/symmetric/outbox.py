"""Exchanges messages between the ranks of one machine through memory that the others read.

`open_outbox` is collective and returns alike on all ranks: an outbox, or the reason why these ranks
cannot have one (another machine, container or user, or no compiler). exchange.cpp implements and
documents the messages; this module adds waiting, errors and tensors.

Legend: P ranks, U source rows, T target rows, N routes, M received rows, D width.
"""

import ctypes
import functools
import os
import secrets
import sys
import time
import weakref
from collections.abc import Sequence
from ctypes import byref, c_int, c_uint32
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.cpu.build import CppLibrary, LoadedLibrary
from ...model.routing import Routes
from ..layout import spell_ranks
from ..process.diagnosis import CollectiveError
from ..process.json_messages import all_gather_json

_AGAIN, _DIED, _LEFT, _MISMATCH, _TOO_MANY, _NO_MEMORY, _OUT_OF_RANGE = range(1, 8)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # tells machines apart
_SUMMED = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}
LIBRARY = CppLibrary(
    name="moebius_exchange",
    sources=[Path(__file__).with_name("exchange.cpp")],
    flags=["-O3", "-std=c++17"],
    otherwise="mesh.dispatcher=dedup works without it",
)


def reason_against() -> str | None:
    """Returns why this machine cannot exchange rows through shared memory, or None if it can."""
    if sys.platform != "linux":
        return f"it needs Linux (memfd, futex), and this is {sys.platform}"
    return LIBRARY.reason_against()


@functools.cache
def load_library() -> LoadedLibrary:
    """Loads exchange.cpp, compiling it if needed.

    Raises:
        ValueError: compilation failed; contains the compiler's output.
    """
    return LIBRARY.load()


class OutboxError(RuntimeError):
    """Raised if two ranks disagree about an exchange, or the machine has no memory for it."""


@dataclass(frozen=True)
class RoutePlan:
    """The destinations of one pass's routes, in exchange.cpp's layout."""

    table: Tensor  # int64; layout of exchange.cpp's `Plan`
    num_sources: int
    num_targets: int
    num_routes: int


@dataclass(frozen=True)
class ReceivedRows:
    """Received rows in rank order, and the routes that read them."""

    rows_MD: Tensor
    weight_N: Tensor
    places_3N: Tensor  # int64: source row, slot, target row
    starts_3P1: Tensor  # int64: bounds of each rank's rows, routes and targets


class Outbox:
    """One rank's messages to and from the ranks of a group.

    Every rank posts and takes the same messages in the same order. Methods that wait raise
    `CollectiveError` if a rank died, left or did not come in time, and `OutboxError` if one posted a
    different message.
    """

    def __init__(self, handle: int, ranks: Sequence[int], rank: int, timeout_s: float) -> None:
        self._library, self._handle = load_library(), handle
        self.ranks, self.rank, self.num_ranks = tuple(ranks), rank, len(ranks)
        self._timeout_s = timeout_s
        self.waited_s = 0.0  # total time waited for messages
        self.close = weakref.finalize(self, self._library.call, "exchange_close", handle)

    def check(self, checking: bool) -> None:
        """Turns checksums of this rank's future messages on or off."""
        self._call("check", checking)

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of shared memory that this rank's messages take."""
        return self._call("bytes")

    def plan(
        self, routes: Routes, num_sources: int, *, rank_E: Tensor, slot_E: Tensor
    ) -> RoutePlan:
        """Plans a pass.

        Args:
            routes: this rank's routes.
            num_sources: number of source rows.
            rank_E, slot_E: int32, rank and slot of every expert.

        Raises:
            ValueError: a route is out of range.
        """
        source_N, target_N = routes.source_N.contiguous(), routes.target_N.contiguous()
        sizes = num_sources, routes.num_targets, source_N.shape[0]
        same = routes.target_N is routes.source_N and routes.num_targets == num_sources
        words = self._call("plan_words", *sizes, same)
        plan = RoutePlan(torch.empty(words, dtype=torch.int64), *sizes)
        self._checked(
            "plan",
            *(plan.table, *sizes, rank_E.shape[0], same),
            *(source_N, target_N, routes.expert_N.contiguous(), rank_E, slot_E),
        )
        return plan

    def sent(self, plan: RoutePlan) -> list[list[int]]:
        """Returns the numbers of rows, routes and targets of a pass per destination rank, (3, P)."""
        counts_3P = torch.empty((3, self.num_ranks), dtype=torch.int64)
        self._call("sent", plan.table, counts_3P)
        return counts_3P.tolist()

    def post_rows(self, plan: RoutePlan, x_UD: Tensor, weight_N: Tensor) -> int:
        """Posts rows and their routes; returns the message's number."""
        return self._post_out(plan, x_UD, weight_N, weight_N.element_size())

    def post_gradients(self, plan: RoutePlan, grad_TD: Tensor) -> int:
        """Posts the gradients of answers; returns the message's number."""
        return self._post_out(plan, grad_TD, None, 0)

    def take_rows(self, number: int, like: Tensor, weight_dtype: torch.dtype) -> ReceivedRows:
        """Waits for every rank's message and copies the part for this rank."""
        row_bytes, weight_bytes = _row_bytes(like), weight_dtype.itemsize
        self._wait(number)
        starts_3P1 = torch.empty((3, self.num_ranks + 1), dtype=torch.int64)
        self._checked("sizes", number, row_bytes, weight_bytes, starts_3P1)
        num_rows, num_routes = (starts[-1] for starts in starts_3P1.tolist()[:2])
        received = ReceivedRows(
            like.new_empty(num_rows, like.shape[1]),
            torch.empty(num_routes, dtype=weight_dtype),
            torch.empty((3, num_routes), dtype=torch.int64),
            starts_3P1,
        )
        places = received.places_3N.unbind(0) if num_routes else (None, None, None)
        self._checked(
            "take_out",
            *(number, row_bytes, weight_bytes, received.rows_MD, *places, received.weight_N),
        )
        return received

    def take_gradients(self, number: int, num_rows: int, like: Tensor) -> Tensor:
        """Waits for every rank's gradients of answers; returns them in rank order."""
        self._wait(number)
        rows = like.new_empty(num_rows, like.shape[1])
        self._checked("take_out", number, _row_bytes(like), 0, rows, None, None, None, None)
        return rows

    def post_answers(self, rows: Tensor, starts_3P1: Tensor) -> int:
        """Posts one row per received target; returns the message's number."""
        return self._post_back(rows, starts_3P1[2], None, None, 0)

    def post_row_gradients(self, rows: Tensor, weight_N: Tensor, starts_3P1: Tensor) -> int:
        """Posts the gradients of received rows and weights; returns the message's number."""
        came, routes, _ = starts_3P1.unbind(0)
        return self._post_back(rows, came, weight_N, routes, weight_N.element_size())

    def sum_answers(self, plan: RoutePlan, number: int, like: Tensor) -> Tensor:
        """Waits for the answers and sums them in rank order, (T, D)."""
        sums = like.new_empty(plan.num_targets, like.shape[1])
        return self._sum_back(plan, number, sums, None, 0)

    def sum_gradients(
        self, plan: RoutePlan, number: int, like: Tensor, grad_weight_N: Tensor
    ) -> Tensor:
        """Waits for the rows' gradients and sums them, (U, D); fills `grad_weight_N`."""
        sums = like.new_empty(plan.num_sources, like.shape[1])
        return self._sum_back(plan, number, sums, grad_weight_N, grad_weight_N.element_size())

    def _post_out(
        self, plan: RoutePlan, rows: Tensor, weights: Tensor | None, weight_bytes: int
    ) -> int:
        number = c_uint32()
        given = plan.table, rows, _row_bytes(rows), weights, weight_bytes
        self._checked("post_out", *given, byref(number))
        return number.value

    def _post_back(
        self,
        rows: Tensor,
        starts: Tensor,
        weights: Tensor | None,
        route_starts: Tensor | None,
        weight_bytes: int,
    ) -> int:
        number = c_uint32()
        given = rows, _row_bytes(rows), starts, weights, route_starts, weight_bytes
        self._checked("post_back", *given, byref(number))
        return number.value

    def _sum_back(
        self, plan: RoutePlan, number: int, sums: Tensor, weights: Tensor | None, weight_bytes: int
    ) -> Tensor:
        self._wait(number)
        given = number, _row_bytes(sums), weight_bytes, _SUMMED[sums.dtype]
        self._checked("sum_back", plan.table, *given, sums, weights)
        return sums

    def _wait(self, number: int) -> None:
        """Waits until every rank has posted a message, and checks that they are alive."""
        who, began = c_int(), time.monotonic()
        while status := self._call("wait", number, byref(who)):
            rank = self.ranks[who.value]
            what = f"exchange no. {number} of the ranks {spell_ranks(self.ranks)}"
            if status == _DIED:
                raise CollectiveError(f"rank {rank} has died; {what} waited for it")
            if status == _LEFT:
                raise CollectiveError(f"rank {rank} has ended its run; {what} waited for it")
            if time.monotonic() > began + self._timeout_s:
                raise CollectiveError(
                    f"{what} did not complete: rank {rank} did not come within {self._timeout_s:g} s"
                )
        self.waited_s += time.monotonic() - began

    def _call(self, name: str, *arguments: Any) -> int:
        return self._library.call(f"exchange_{name}", self._handle, *arguments)

    def _checked(self, name: str, *arguments: Any) -> None:
        """Calls a function that returns 0 on success, and raises its error."""
        status = self._call(name, *arguments)
        if status == 0:
            return
        if status == _TOO_MANY:
            raise OutboxError("1,024 exchanges are in flight: their rows were never waited for")
        if status == _NO_MEMORY:
            raise OutboxError(
                f"no shared memory for another message: this rank already has {self.num_bytes} bytes"
            )
        said = ctypes.string_at(self._call("fault")).decode()
        raise (ValueError if status == _OUT_OF_RANGE else OutboxError)(said)


def open_outbox(group: dist.ProcessGroup, *, timeout_s: float) -> Outbox | str:
    """Opens the outboxes of a group's ranks. Collective.

    Returns:
        This rank's outbox, or the reason why there is none, the same on every rank.
    """
    reason = reason_against()
    handle, nonce = 0, secrets.randbits(63)
    if reason is None:
        handle = load_library().call("exchange_create", nonce, group.rank(), group.size())
        if not handle:
            reason = "the system provides no anonymous memory (memfd_create)"
    file = load_library().call("exchange_file", handle) if handle else 0
    mine = reason is None, os.getpid(), nonce, _BOOT_ID.read_text(), os.getuid(), file
    others = all_gather_json(mine, group)
    if reason is None:
        reason = _connect(handle, group.rank(), others)
    return _agreed(group, reason, handle, timeout_s)


def _connect(handle: int, rank: int, others: Sequence[Sequence[Any]]) -> str | None:
    """Maps the other ranks' memory; returns why it cannot, or None."""
    for who, (is_ready, pid, nonce, machine, user, file) in enumerate(others):
        if not is_ready:
            return None  # that rank reports the reason
        if machine != others[rank][3]:
            return "the ranks are on several machines"
        if user != others[rank][4]:
            return f"the ranks belong to several users ({others[rank][4]} and {user})"
        status = load_library().call("exchange_connect", handle, who, pid, file, nonce)
        if status > 0:
            return (
                f"the memory of process {pid} cannot be opened ({os.strerror(status)}): "
                "the ranks are in several containers, or cannot read each other's /proc"
            )
        if status < 0:
            return f"process {pid} is not the expected rank: are the ranks in several containers?"
    return None


def _agreed(
    group: dist.ProcessGroup, reason: str | None, handle: int, timeout_s: float
) -> Outbox | str:
    """Returns an outbox on all ranks, or the same reason on all ranks. Collective."""
    ranks, said = dist.get_process_group_ranks(group), all_gather_json(reason, group)
    refusals = [f"rank {rank}: {word}" for rank, word in zip(ranks, said, strict=True) if word]
    if not refusals:
        return Outbox(handle, ranks, group.rank(), timeout_s)
    if handle:
        load_library().call("exchange_close", handle)
    return refusals[0]


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1] * rows.element_size()
