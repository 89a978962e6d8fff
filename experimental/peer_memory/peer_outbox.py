"""Messages through memory that the devices of a group read from each other: no collective, and one
read on the host for a pass; or none, where it is known how many come, or is left to chance.

A message is written into the own memory, all ranks meet, and each reads what is its own from the
others (peers.py). Messages alternate between two halves of the memory: who meets for a
message has read the one before, so the half of the one before that is free. Therefore one message
is under way at a time, and rows go in one chunk.

Where a message has no room its header says so, and how much is wanted; all ranks see that of each
other, take larger memory together, and write the message again. What the following messages of the
pass will want is known from the same headers, so that those always fit.

Left to chance (`room`): where all ranks have equally many rows and routes, each has room for some
multiple of the routes that it sends, whose number nobody asks. What comes may be more: then the pass
computes nothing, says so on the device (`ReceivedRows.is_over`), and the step must be made again with
more room. With P times as many there is always enough.

Legend: P ranks, U source rows, T target rows, N routes, M rows that came, D width.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from experimental.peer_memory.peers import (
    NUM_ROUTES,
    NUM_ROWS,
    NUM_TARGETS,
    NUMBER,
    ROW_BYTES,
    TABLE,
    WEIGHT_BYTES,
    Layout,
    Peers,
    Room,
    read_headers,
    sum_rows,
    take_routes,
    take_rows,
    take_weights,
)
from experimental.peer_memory.symmetric_memory import PeerMemory, SymmetricMemory
from moebius.distributed.symmetric.interface import OutboxError, ReceivedRows
from moebius.kernels.calls import ROUTES, ROWS, TARGETS, Addresses, PackedSends, SendCounts
from moebius.kernels.sends import count_sends, pack_sends
from moebius.kernels.triton.available import reason_against
from moebius.model.routing import Routes

_ROOM = 1.25  # taken more than is wanted


@dataclass
class PeerPlan:
    """Where every route of one pass goes."""

    addresses: Addresses
    counts: SendCounts
    num_slots: int  # of this rank
    # rows, routes and targets for every rank, where all ranks have the same; else None
    known: list[int] | None = None
    room: Room | None = None  # for what comes, where nobody asks how much that is
    num_chunks: int = field(default=1, init=False)
    sent_3P: list[list[int]] | None = field(default=None, init=False)
    _packed: PackedSends | None = field(default=None, init=False)

    @property
    def sent_P3(self) -> Tensor | None:
        """With room: returns rows, routes and targets for every rank, on the device."""
        return None if self.room is None else self.counts.counts_V3

    @property
    def num_sources(self) -> int:
        """Returns U."""
        return self.addresses.num_sources

    @property
    def num_targets(self) -> int:
        """Returns T."""
        return self.addresses.num_targets

    @property
    def num_routes(self) -> int:
        """Returns N."""
        return len(self.addresses.expert_N)

    def packed(self, weight_N: Tensor | None = None) -> PackedSends:
        """Returns what is sent; it is written down once, without weights where none are given."""
        if self._packed is None:
            if weight_N is None:  # a recomputed pass, which sends no routes
                weight_N = torch.zeros(self.num_routes, device=self.addresses.expert_N.device)
            self._packed = pack_sends(self.addresses, self.counts, weight_N)
        return self._packed


@dataclass
class _Message:
    """What this rank has posted, or is about to."""

    number: int
    row_bytes: int
    weight_bytes: int
    num_rows: int
    num_targets: int
    num_routes: int
    table: Tensor  # of the header: counts (P, 3), or starts (3, P + 1)
    sections: Callable[[Layout], Sequence[tuple[int, Tensor]]]  # where each begins
    plan: PeerPlan | None = None


class PeerOutbox:
    """One rank's messages for the ranks of a group whose memory it reads.

    Args:
        allocate: takes memory of so many bytes, together with all ranks of the group.
    """

    def __init__(
        self,
        allocate: Callable[[int], PeerMemory],
        ranks: Sequence[int],
        rank: int,
        *,
        routes: int = 1024,
        row_bytes: int = 1 << 20,
    ) -> None:
        self.ranks, self.rank, self.num_ranks = tuple(ranks), rank, len(ranks)
        self.waited_s = 0.0
        self._allocate, self._checking = allocate, False
        self._next = 0
        self._posted: _Message | None = None
        self._wanted_rows = 0  # of one rank: answers, and gradients of answers, of the pass
        self._take_memory(Layout(self.num_ranks, routes, row_bytes))

    def check(self, checking: bool) -> None:
        """Lets every message's number and sizes be compared, at the cost of a read on the host."""
        self._checking = checking

    @property
    def num_bytes(self) -> int:
        """Returns how long this rank's memory is."""
        return 2 * self._layout.num_bytes

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
    ) -> PeerPlan:
        """Writes down where every route goes.

        Args:
            of_token, room: as `RowOutbox` says; with one of them the pass reads nothing on the host.

        Raises:
            ValueError: several chunks are asked for.
        """
        if num_chunks > 1:
            raise ValueError(
                f"overlap_chunks={num_chunks}: rows go through the memory of devices in one chunk; "
                'set mesh.overlap_chunks=1, or mesh.dispatcher="dedup"'
            )
        addresses = Addresses(
            routes.source_N,
            routes.target_N,
            routes.expert_N,
            rank_E,
            slot_E,
            num_sources,
            routes.num_targets,
            self.num_ranks,
            rows_per_token=rows_per_token,
            into_sources=routes.target_N is routes.source_N and routes.num_targets == num_sources,
        )
        counts = None
        if of_token is not None:
            num_tokens = num_sources // max(1, rows_per_token)
            counts = [num_tokens * count for count in of_token]
            room = None
        places = None if room is None else self._room(addresses, room)
        return PeerPlan(addresses, count_sends(addresses), num_slots, counts, places)

    def _room(self, to: Addresses, factor: float) -> Room:
        """Returns the room for what may come to one rank: there are no more rows and target rows than
        routes, nor than all ranks have.
        """
        num_routes, num_ranks = len(to.expert_N), self.num_ranks
        routes = min(num_ranks * num_routes, math.ceil(factor * num_routes))
        return Room(
            min(num_ranks * to.num_sources, routes),
            routes,
            min(num_ranks * to.num_targets, routes),
        )

    def sent(self, plan: PeerPlan) -> list[list[int]]:
        """Counts the rows, routes and targets of a pass by the rank that they go to, (3, P).

        Asked after its rows were taken; a recomputed pass reads it from the device.
        """
        if plan.sent_3P is None:
            plan.sent_3P = plan.counts.counts_V3.T.tolist()
        return plan.sent_3P

    def post_rows(self, plan: PeerPlan, chunk: int, x_UD: Tensor, weight_N: Tensor) -> int:
        """Posts the rows and the routes that read them; returns the message's number."""
        del chunk
        packed = plan.packed(weight_N)
        if (room := plan.room) is not None:  # the same on all ranks
            self._wanted_rows = max(plan.num_targets, room.targets)
            most_rows = max(plan.num_sources, room.rows)
            self._fit(max(plan.num_routes, room.routes), most_rows * _row_bytes(x_UD))
        return self._post(
            _Message(
                self._next,
                _row_bytes(x_UD),
                weight_N.element_size(),
                x_UD.shape[0],
                plan.num_targets,
                plan.num_routes,
                plan.counts.counts_V3,
                lambda layout: (
                    (layout.list_at, packed.sources.row_N),
                    (layout.routes_at, packed.metadata_N4),
                    (layout.rows_at, x_UD),
                ),
                plan,
            )
        )

    def take_rows(self, number: int, like: Tensor, weight_dtype: torch.dtype) -> ReceivedRows:
        """Waits for a message of every rank, and copies what is for this one.

        Raises:
            OutboxError: a rank posted something else.
        """
        posted, header_PW = self._posted, self._meet(number)
        assert posted is not None
        plan = posted.plan
        assert plan is not None, f"message {number} is not of rows"
        if plan.room is not None:
            self._posted = None
            return self._take(plan, plan.room, header_PW, like, weight_dtype)
        heads = self._heads(posted, header_PW)
        if self._grow(heads):
            self._write(posted)
            header_PW = self._meet(number)
        self._posted = None
        counts_PP3 = [
            [head[TABLE + 3 * rank : TABLE + 3 * rank + 3] for rank in range(self.num_ranks)]
            for head in heads
        ]
        own = counts_PP3[self.rank]
        plan.sent_3P = [[count[column] for count in own] for column in range(3)]
        came_P3 = [counts[self.rank] for counts in counts_PP3]
        starts = [[0] for _ in range(3)]
        for count in came_P3:
            for column in (ROWS, ROUTES, TARGETS):
                starts[column].append(starts[column][-1] + count[column])
        came = Room(*(start[-1] for start in starts))
        found = self._take(plan, came, header_PW, like, weight_dtype)
        return ReceivedRows(found.rows_MD, found.weight_N, found.places_3N, torch.tensor(starts))

    def _take(
        self,
        plan: PeerPlan,
        room: Room,
        header_PW: Tensor,
        like: Tensor,
        weight_dtype: torch.dtype,
    ) -> ReceivedRows:
        """Copies what is for this rank, as much as there is room for."""
        rows = take_rows(self._peers, header_PW, ROWS, room.rows, like)
        weight_like = like.new_empty(0, dtype=weight_dtype)
        found = take_routes(self._peers, header_PW, room, plan.num_slots, weight_like)
        return ReceivedRows(
            rows,
            found.weight_R,
            found.places_3R,
            found.starts_3P1,
            room.targets,
            found.is_over,
        )

    def post_answers(self, rows: Tensor, starts_3P1: Tensor) -> int:
        """Posts one row for every target that came; returns the message's number."""
        self._fit(0, self._wanted_rows * _row_bytes(rows))  # the same on all ranks
        return self._post_back(rows, None, starts_3P1)

    def sum_answers(self, plan: PeerPlan, numbers: Sequence[int], like: Tensor) -> Tensor:
        """Waits for the answers and adds them up, (T, D), in the order of ranks."""
        header_PW = self._meet_fitting(numbers[0])
        counts = plan.counts
        number_PT = counts.number_VU if counts.number_VT is None else counts.number_VT
        return sum_rows(self._peers, header_PW, TARGETS, number_PT, like)

    def post_gradients(self, plan: PeerPlan, chunk: int, grad_TD: Tensor) -> int:
        """Posts the gradients of answers; returns the message's number."""
        del chunk
        packed = plan.packed()
        lists = packed.sources if packed.targets is None else packed.targets
        return self._post(
            _Message(
                self._next,
                _row_bytes(grad_TD),
                0,
                grad_TD.shape[0],
                plan.num_targets,
                plan.num_routes,
                plan.counts.counts_V3,
                lambda layout: ((layout.list_at, lists.row_N), (layout.rows_at, grad_TD)),
            )
        )

    def take_gradients(self, number: int, num_rows: int, like: Tensor) -> Tensor:
        """Waits for the gradients of answers of every rank, in the order of ranks."""
        return take_rows(self._peers, self._meet_fitting(number), TARGETS, num_rows, like)

    def post_row_gradients(self, rows: Tensor, weight_N: Tensor, starts_3P1: Tensor) -> int:
        """Posts the gradients of rows and weights that came; returns the message's number."""
        return self._post_back(rows, weight_N, starts_3P1)

    def sum_gradients(
        self, plan: PeerPlan, numbers: Sequence[int], like: Tensor, grad_weight_N: Tensor
    ) -> Tensor:
        """Waits for the gradients of rows and adds them up, (U, D); fills `grad_weight_N`."""
        header_PW, counts = self._meet_fitting(numbers[0]), plan.counts
        grad_weight_N.copy_(
            take_weights(
                self._peers,
                header_PW,
                counts.destination_N,
                plan.packed().place_N,
                counts.counts_V3,
                grad_weight_N[:0],
            )
        )
        return sum_rows(self._peers, header_PW, ROWS, counts.number_VU, like)

    def _post_back(self, rows: Tensor, weight_N: Tensor | None, starts_3P1: Tensor) -> int:
        sections = [rows] if weight_N is None else [rows, weight_N]
        return self._post(
            _Message(
                self._next,
                _row_bytes(rows),
                0 if weight_N is None else weight_N.element_size(),
                rows.shape[0],
                0,
                0 if weight_N is None else len(weight_N),
                starts_3P1.to(rows.device, non_blocking=True),
                lambda layout: list(
                    zip((layout.rows_at, layout.routes_at), sections, strict=False)
                ),
            )
        )

    def _post(self, message: _Message) -> int:
        if self._posted is not None:
            raise OutboxError(
                f"message {message.number} is posted before message {self._posted.number} was "
                "taken: two exchanges at a time do not go through the memory of devices"
            )
        self._next += 1
        self._posted = message
        self._write(message)
        return message.number

    def _write(self, message: _Message) -> None:
        """Writes the header; and the sections, if they have room."""
        own, layout = self._peers.messages[self.rank], self._layout
        header_W = own[: 8 * layout.words].view(torch.int64)
        table = message.table.flatten()
        header_W[NUMBER].fill_(message.number)
        header_W[ROW_BYTES:TABLE].copy_(
            _head(
                *(message.row_bytes, message.weight_bytes, message.num_rows, message.num_targets),
                *(message.num_routes, own.device),
            )
        )
        header_W[TABLE : TABLE + len(table)].copy_(table)
        if (
            message.num_routes > layout.routes
            or message.num_rows * message.row_bytes > layout.row_bytes
        ):
            return
        for at, section in message.sections(layout):
            section = section.contiguous()
            num_bytes = section.numel() * section.element_size()
            if num_bytes:
                own[at : at + num_bytes].copy_(section.flatten().view(torch.uint8))

    def _meet(self, number: int) -> Tensor:
        if self._posted is None or self._posted.number != number:
            raise OutboxError(f"message {number} was not posted, or has been taken already")
        self._memory.meet()
        return read_headers(self._peers)

    def _meet_fitting(self, number: int) -> Tensor:
        """Meets for a message that has room, and returns the headers."""
        posted, header_PW = self._posted, self._meet(number)
        if self._checking:
            self._compare(header_PW.tolist())
        assert posted is not None
        fits = posted.num_routes <= self._layout.routes
        if not fits or posted.num_rows * posted.row_bytes > self._layout.row_bytes:
            raise OutboxError(
                f"message {number} of {posted.num_rows} rows of {posted.row_bytes} bytes has no "
                f"room in {self._layout.row_bytes}, which its pass should have taken"
            )
        self._posted = None
        return header_PW

    def _heads(self, posted: _Message, header_PW: Tensor) -> list[list[int]]:
        """Reads all ranks' headers on the host: the one read of a pass. Or returns them unread, where
        all are like the own one.
        """
        known = None if posted.plan is None else posted.plan.known
        if known is not None and not self._checking:
            own = [posted.number, posted.row_bytes, posted.weight_bytes]
            own += [posted.num_rows, posted.num_targets, posted.num_routes]
            return [own + known * self.num_ranks] * self.num_ranks
        began = time.perf_counter()
        heads = header_PW.tolist()
        self.waited_s += time.perf_counter() - began
        self._compare(heads)
        return heads

    def _compare(self, heads: Sequence[Sequence[int]]) -> None:
        own = heads[self.rank]
        for rank, head in zip(self.ranks, heads, strict=True):
            for word, what in (
                (NUMBER, "message number"),
                (ROW_BYTES, "bytes of a row"),
                (WEIGHT_BYTES, "bytes of a weight"),
            ):
                if head[word] != own[word]:
                    raise OutboxError(
                        f"the ranks {list(self.ranks)} exchange different things: {what} "
                        f"{own[word]} on rank {self.ranks[self.rank]}, {head[word]} on rank {rank}"
                    )

    def _grow(self, heads: Sequence[Sequence[int]]) -> bool:
        """Takes larger memory if this message, or what answers it, wants it; the same on all ranks.

        Returns:
            Whether the message must be written again.
        """
        received = [
            [
                sum(head[TABLE + 3 * rank + column] for head in heads)
                for column in (ROWS, ROUTES, TARGETS)
            ]
            for rank in range(self.num_ranks)
        ]
        most_targets = max(head[NUM_TARGETS] for head in heads)
        self._wanted_rows = max(most_targets, *(count[TARGETS] for count in received))
        most_rows = max(*(head[NUM_ROWS] for head in heads), *(count[ROWS] for count in received))
        most_routes = max(
            *(head[NUM_ROUTES] for head in heads), *(count[ROUTES] for count in received)
        )
        wanted = most_rows * heads[self.rank][ROW_BYTES]
        return self._fit(most_routes, wanted)

    def _fit(self, routes: int, row_bytes: int) -> bool:
        """Takes larger memory if this is larger, as it then is on all ranks; returns whether it was."""
        if routes <= self._layout.routes and row_bytes <= self._layout.row_bytes:
            return False
        self._take_memory(self._larger(routes, row_bytes))
        return True

    def _larger(self, routes: int, row_bytes: int) -> Layout:
        layout = self._layout
        return Layout(
            self.num_ranks,
            layout.routes if routes <= layout.routes else int(routes * _ROOM),
            layout.row_bytes if row_bytes <= layout.row_bytes else int(row_bytes * _ROOM),
        )

    def _take_memory(self, layout: Layout) -> None:
        self._layout = layout
        self._memory = self._allocate(2 * layout.num_bytes)
        self._halves = [
            Peers(
                layout,
                [
                    memory[half * layout.num_bytes : (half + 1) * layout.num_bytes]
                    for memory in self._memory.memories
                ],
                self._memory.address_P + half * layout.num_bytes,
                self.rank,
            )
            for half in range(2)
        ]

    @property
    def _peers(self) -> Peers:
        """Returns the half of the message that was posted last."""
        return self._halves[(self._next - 1) % 2]


@lru_cache(maxsize=1024)
def _head(*values: int | torch.device) -> Tensor:
    *words, device = values
    assert isinstance(device, torch.device)
    return torch.tensor(words, dtype=torch.int64, device=device)


def _row_bytes(rows: Tensor) -> int:
    return rows.shape[1] * rows.element_size()


def open_peer_outbox(
    group: dist.ProcessGroup, device: torch.device, *, timeout_s: float
) -> PeerOutbox | str:
    """Opens the messages of a group whose GPUs read each other's memory. Collective.

    Returns:
        This rank's; or why there is none.
    """

    if not torch.cuda.is_available():
        return "the GPUs cannot read each other's memory: there is none here"
    if reason := reason_against("cuda", torch.float32):
        return (
            f"what is in the GPUs' memory is read by Triton's kernels, which cannot run: {reason}"
        )

    def allocate(num_bytes: int) -> PeerMemory:
        return SymmetricMemory(num_bytes, group, device, timeout_s)

    try:
        return PeerOutbox(allocate, dist.get_process_group_ranks(group), group.rank())
    except (ImportError, RuntimeError) as error:
        return f"the GPUs cannot read each other's memory: {error}"
