"""Why did a collective not end? Names the operation, its number in its group, the group, and the
ranks that did not come.

torch records every collective that a rank issues (the flight recorder: group, number, operation,
sizes; 2 µs each). Here is what makes an answer of it:
  1. every rank has a thread that looks at one key of the store each second, over a connection of
     its own;
  2. a rank whose collective failed sets the key; the threads leave in the store what their ranks
     called last, even where the rank itself hangs, sleeps or waits in another group;
  3. the first that asked compares, and all that failed raise what it found. A rank that died gives
     no answer, and one that ended with an exception has left that in the store: both are said.
So the diagnosis comes ANSWER_S after the timeout of the collective at the latest. While all goes
well it costs one small message per rank and second. (A thread that waits in the store instead
cannot be ended in good order, and aborts its process.)

Gloo raises its timeouts in the rank's own code, where `Process` asks. NCCL's watchdog ends the
process instead, prints the number, operation and group, and leaves every rank's record in a file
(torch's `torchfrtrace` reads them and names who did not come). An NCCL error that reaches Python is
explained here as Gloo's are.
"""

import atexit
import json
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ..layout import spell_ranks

logger = logging.getLogger(__name__)

ANSWER_S = 3.0  # how long ranks are waited for that may be dead
_LOOK_S = 1.0
_ASKED = "trouble/asked"
_FOUND = "trouble/found"
_RECENT = 16  # collectives of each group that a rank tells of
_OVERDUE = 0.9  # of its timeout: a collective as old as that may be the one that timed out
_EQUAL_SIZES = (
    "all_reduce",
    "reduce_scatter",
    "broadcast",
)  # operations whose tensors are alike on all ranks


class CollectiveError(RuntimeError):
    """A collective did not complete; the message names it and the ranks that did not come."""


@dataclass(frozen=True)
class Call:
    """One collective that a rank issued."""

    # the backend and torch's name of the group, the same on all its ranks: each backend counts for
    # itself
    group: str
    description: str
    number: int  # 1 is the group's first
    operation: str
    sizes: tuple[tuple[int, ...], ...]  # of what goes in
    age_s: float = 0.0
    timeout_s: float = float("inf")

    def __str__(self) -> str:
        return f"{self.operation} no. {self.number} of group {self.description!r}"


@dataclass(frozen=True)
class Answer:
    """What one rank says of itself; `ended` is the exception that it ended with, if it did."""

    calls: Sequence[Call] = ()  # oldest first
    ended: str | None = None

    def last_in(self, group: str) -> int:
        return max((call.number for call in self.calls if call.group == group), default=0)

    def find(self, call: Call) -> Call | None:
        return next(
            (own for own in self.calls if (own.group, own.number) == (call.group, call.number)),
            None,
        )


@dataclass(frozen=True)
class Absence:
    """Who keeps one collective from completing."""

    call: Call
    silent: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    unlike: list[int] = field(default_factory=list)  # came with another operation or other sizes

    @property
    def is_certain(self) -> bool:
        """Whether it explains a failure even where the collective is not overdue."""
        return bool(self.silent or self.ended or self.unlike)


class Reporter:
    """The thread that answers for this rank, whatever the rank itself is doing, until `stop` or the
    process' end.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = _own_connection(store), rank
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trouble", daemon=True)
        self._thread.start()
        atexit.register(
            self.stop
        )  # a thread that is inside torch when Python ends aborts the process

    def stop(self) -> None:
        """Ends the thread. Twice is harmless."""
        self._stopped.set()
        self._thread.join(ANSWER_S)
        atexit.unregister(self.stop)

    def _watch(self) -> None:
        try:
            while not self._stopped.wait(_LOOK_S):
                if self._store.check([_ASKED]):
                    if not self._store.check([_answer_key(self._rank)]):
                        self._store.set(_answer_key(self._rank), _encoded(Answer(recorded_calls())))
                    return
        except dist.DistError as problem:
            logger.debug("the store is gone, so the run has ended: %s", problem)


def leave_word(store: Store, rank: int, error: BaseException) -> None:
    """Before a rank ends with an exception of its own: the others will wait for it, and find why."""
    try:
        store.set(_answer_key(rank), _encoded(Answer(recorded_calls(), _first_line(error))))
    except dist.DistError as problem:
        logger.warning("rank %d could not tell the others why it ends: %s", rank, problem)


def explain(error: BaseException, *, store: Store, rank: int, world_size: int) -> str | None:
    """What kept a failed collective from completing; None if `error` is none. Takes at most 2 ×
    ANSWER_S.
    """
    if not isinstance(error, RuntimeError) or not any(
        word in str(error).lower() for word in ("gloo", "nccl")
    ):
        return None
    own = recorded_calls()
    try:
        found = _collect(store, rank, world_size, own)
    except dist.DistError as problem:
        logger.warning(
            "rank %d could not ask the others why a collective failed: %s", rank, problem
        )
        return None
    return f"{found} ({_first_line(error)})"


def recorded_calls() -> list[Call]:
    """The last collectives of this process by torch's flight recorder, oldest first, at most
    _RECENT of each group.
    """
    # Two recorders: torch's general one, which Gloo writes, and one in ProcessGroupNCCL, which only
    # CUDA builds have.
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    entries = [
        entry
        for dump in dumps
        if dump
        for entry in json.loads(dump(True, False)).get("entries", [])
    ]
    now_ns = time.time_ns()
    kept: dict[str, int] = {}
    calls = []
    for entry in sorted(entries, key=lambda entry: -entry["time_created_ns"]):
        call = _call_of(entry, now_ns)
        kept[call.group] = kept.get(call.group, 0) + 1
        if kept[call.group] <= _RECENT:
            calls.append(call)
    return calls[::-1]


def find_absence(
    rank: int, answers: Mapping[int, Answer], members: Mapping[str, Sequence[int]]
) -> Absence | None:
    """The collective of `rank` that others keep from completing: the oldest overdue one, else the
    last that is certain.
    """
    own = [call for call in answers[rank].calls if call.group in members]
    overdue = [call for call in own if call.age_s >= _OVERDUE * call.timeout_s]
    for call in overdue:
        absence = _absence(call, answers, members[call.group])
        if absence.is_certain or absence.behind:
            return absence
    certain = (_absence(call, answers, members[call.group]) for call in reversed(own))
    return next((absence for absence in certain if absence.is_certain), None)


def spell_absence(absence: Absence, answers: Mapping[int, Answer]) -> str:
    """In words, on one line."""
    parts = []
    if absence.behind:
        where = "; ".join(
            f"rank {rank} {_whereabouts(absence.call, answers[rank])}"
            for rank in absence.behind[:4]
        )
        parts.append(
            f"{_ranks(absence.behind)} did not come "
            f"({where}{'; …' if len(absence.behind) > 4 else ''})"
        )
    parts += [f"rank {rank} had ended with {answers[rank].ended}" for rank in absence.ended[:4]]
    if absence.silent:
        parts.append(
            f"{_ranks(absence.silent)} gave no answer (its process has died or is stopped, or its "
            "node is gone)"
        )
    for rank in absence.unlike[:4]:
        other = answers[rank].find(absence.call)
        if other is not None:
            parts.append(
                f"rank {rank} came with {other.operation} of {_spell_sizes(other)} instead"
            )
    return (
        f"{absence.call}, of {_spell_sizes(absence.call)}, did not complete: {', and '.join(parts)}"
    )


# Asking and answering -----------------------------------------------------------------------------------------------


def _collect(store: Store, rank: int, world_size: int, own: list[Call]) -> str:
    """The first rank that asks gathers all answers and finds the cause; the others hear of it."""
    if store.add(_ASKED, 1) > 1:
        try:
            store.wait([_FOUND], timedelta(seconds=2 * ANSWER_S))
        except dist.DistStoreError:
            return f"{_latest(own)} did not complete, and the rank that asked first found no cause"
        return store.get(_FOUND).decode()
    store.set(_answer_key(rank), _encoded(Answer(own)))
    answers = _await_answers(store, world_size) | {rank: Answer(own)}
    members = {call.group: _members(call.group) for call in own}
    absence = find_absence(rank, answers, members)
    found = f"{_latest(own)} did not complete, though every rank of the group came: the network is slow or broken"
    if absence is not None:
        found = spell_absence(absence, answers)
    store.set(_FOUND, found)
    return found


def _await_answers(store: Store, world_size: int) -> dict[int, Answer]:
    keys = [_answer_key(rank) for rank in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=ANSWER_S))
        came = list(range(world_size))
    except dist.DistStoreError:
        came = [rank for rank, key in enumerate(keys) if store.check([key])]
    found = store.multi_get([keys[rank] for rank in came])
    return {rank: _decoded(text) for rank, text in zip(came, found, strict=True)}


def _absence(call: Call, answers: Mapping[int, Answer], members: Sequence[int]) -> Absence:
    absence = Absence(call)
    for rank in members:
        answer = answers.get(rank)
        other = answer and answer.find(call)
        if answer is None:
            absence.silent.append(rank)
        elif answer.last_in(call.group) < call.number:
            (absence.ended if answer.ended else absence.behind).append(rank)
        elif other and (
            other.operation != call.operation
            or (call.operation in _EQUAL_SIZES and other.sizes != call.sizes)
        ):
            absence.unlike.append(rank)
    return absence


def _whereabouts(call: Call, answer: Answer) -> str:
    if not answer.calls:
        return "has called no collective yet"
    last = answer.calls[-1]
    if last.group == call.group:
        return f"last called {last.operation} no. {last.number} there"
    return f"last called {last}"


def _own_connection(store: Store) -> Store:
    """A wait holds its connection: the rank's own must stay free."""
    return store.clone()  # pyright: ignore[reportAttributeAccessIssue]


def _members(group: str) -> list[int]:
    name = group.partition(":")[2]
    resolved = dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore
    return dist.get_process_group_ranks(resolved)


# Reading and writing ------------------------------------------------------------------------------------------------


def _call_of(entry: Mapping[str, Any], now_ns: int) -> Call:
    name, description = entry["process_group"]
    backend, _, operation = entry["profiling_name"].partition(":")
    return Call(
        group=f"{backend}:{name}",
        description="world" if description in ("default_pg", "undefined", "") else description,
        number=entry["collective_seq_id"],
        operation=operation,
        sizes=tuple(tuple(sizes) for sizes in entry["input_sizes"]),
        age_s=(now_ns - entry["time_created_ns"]) / 1e9,
        timeout_s=entry["timeout_ms"] / 1e3,
    )


def _encoded(answer: Answer) -> str:
    calls = [
        (call.group, call.description, call.number, call.operation, call.sizes)
        for call in answer.calls
    ]
    return json.dumps({"calls": calls, "ended": answer.ended})


def _decoded(text: bytes) -> Answer:
    values = json.loads(text)
    calls = [
        Call(group, description, number, operation, tuple(tuple(size) for size in sizes))
        for group, description, number, operation, sizes in values["calls"]
    ]
    return Answer(calls, values["ended"])


def _answer_key(rank: int) -> str:
    return f"trouble/answer/{rank}"


def _latest(calls: Sequence[Call]) -> str:
    return str(calls[-1]) if calls else "a collective"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spell_ranks(ranks)}"


def _spell_sizes(call: Call) -> str:
    return ", ".join(" × ".join(map(str, size)) or "one number" for size in call.sizes) or "nothing"
