"""Why did a collective not end? Names the operation, its number in its group, the group, and the
ranks that did not come.

torch records every collective that a rank issues (the flight recorder: group, number, operation,
sizes; 2 µs each). Here is what makes an answer of it:
  1. every rank has a thread that looks at one key of the store each second, over a connection of
     its own;
  2. a rank whose collective failed sets the key; the threads leave in the store what their ranks
     called last, even where the rank itself hangs, sleeps or waits in another group;
  3. the first that asked compares, and all that failed raise what it found. A rank that died leaves
     no report, and one that ended with an exception has left that in the store: both are named.
So the diagnosis comes REPORT_S after the timeout of the collective at the latest. While all goes
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
import re
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

REPORT_S = 3.0  # how long ranks are waited for that may be dead
_LOOK_S = 1.0
_CONNECT_S = timedelta(seconds=30)
_REQUESTED = "diagnosis/requested"
_FOUND = "diagnosis/found"
_MISMATCH = "diagnosis/mismatch"
# what Gloo says where a message is longer than its receiver expects: the bytes of both
_GLOO_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_RECENT = 16  # collectives of each group that a rank tells of
# Of Gloo's errors one lacks its name: where several collectives time out together, the first closes
# the connection and the others hear "Application timeout caused pair closure".
_BACKENDS_SAY = ("gloo", "nccl", "pair closure")
_OVERDUE = 0.9  # of its timeout: a collective as old as that may be the one that timed out
# operations whose tensors are alike on all ranks
_EQUAL_SIZES = ("all_reduce", "reduce_scatter", "broadcast")


class CollectiveError(RuntimeError):
    """Raised where a collective did not complete; names it and the ranks that did not come."""


@dataclass(frozen=True)
class CollectiveCall:
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
    is_over: bool = False  # it completed or failed: the recorder does not tell one from the other

    def __str__(self) -> str:
        return f"{self.operation} no. {self.number} of group {self.description!r}"


@dataclass(frozen=True)
class RankReport:
    """The collectives that one rank issued last, and the exception that ended it, if one did."""

    calls: Sequence[CollectiveCall] = ()  # oldest first
    ended: str | None = None

    def last_in(self, group: str) -> int:
        """Returns the number of the rank's last collective in a group; 0: it issued none there."""
        return max((call.number for call in self.calls if call.group == group), default=0)

    def find(self, call: CollectiveCall) -> CollectiveCall | None:
        """Returns the rank's own call of the same number in the same group, if it issued one."""
        return next(
            (own for own in self.calls if (own.group, own.number) == (call.group, call.number)),
            None,
        )


@dataclass(frozen=True)
class BlockedCollective:
    """A collective that does not complete, and the ranks that keep it from completing."""

    call: CollectiveCall
    silent: list[int] = field(default_factory=list)  # left no report
    ended: list[int] = field(default_factory=list)  # by an exception of their own
    behind: list[int] = field(default_factory=list)  # have not issued it yet
    unlike: list[int] = field(default_factory=list)  # came with another operation or other sizes

    @property
    def is_certain(self) -> bool:
        """Tells whether this explains a failure even where the collective is not overdue."""
        return bool(self.silent or self.ended or self.unlike)

    @property
    def is_shown(self) -> bool:
        """Tells whether a rank's report shows that the collective did not complete."""
        return bool(self.behind or self.ended or self.unlike)


class Reporter:
    """The thread that reports what this rank called last, whatever the rank itself is doing.

    It lives until `stop`, or until the process ends.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = _own_connection(store), rank
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._answer_when_asked, name="diagnosis", daemon=True
        )
        self._thread.start()
        # A thread that is inside torch when Python ends aborts the process.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the thread; may be called more than once."""
        self._stopped.set()
        self._thread.join(REPORT_S)
        atexit.unregister(self.stop)

    def _answer_when_asked(self) -> None:
        try:
            while not self._stopped.wait(_LOOK_S):
                if self._store.check([_REQUESTED]):
                    if not self._store.check([_report_key(self._rank)]):
                        self._store.set(
                            _report_key(self._rank), _encoded(RankReport(recorded_calls()))
                        )
                    return
        except dist.DistError as problem:
            logger.debug("the store is gone, so the run has ended: %s", problem)


def report_exception(store: Store, rank: int, error: BaseException) -> None:
    """Leaves in the store with what exception this rank ends.

    The others will wait for it, and find there why it does not come.
    """
    try:
        store.set(_report_key(rank), _encoded(RankReport(recorded_calls(), _first_line(error))))
    except dist.DistError as problem:
        logger.warning("rank %d could not tell the others why it ends: %s", rank, problem)


def explain(error: BaseException, *, store: Store, rank: int, world_size: int) -> str | None:
    """Returns what kept a failed collective from completing, in words, after at most 2 × REPORT_S.

    Returns None if `error` is not of a collective, or the store cannot be reached.
    """
    if not isinstance(error, RuntimeError) or not is_of_a_collective(str(error)):
        return None
    own = recorded_calls()
    try:
        if mismatch := _spell_mismatch(str(error), rank, own):
            store.set(_MISMATCH, mismatch)
        found = _collect(store, rank, world_size, own)
    except dist.DistError as problem:
        logger.warning(
            "rank %d could not ask the others why a collective failed: %s", rank, problem
        )
        return None
    return f"{found} ({_first_line(error)})"


def is_of_a_collective(text: str) -> bool:
    """Whether an error's text is a backend's about a collective that did not complete."""
    return any(word in text.lower() for word in _BACKENDS_SAY)


def recorded_calls() -> list[CollectiveCall]:
    """Returns this process's last collectives by torch's flight recorder, oldest first.

    They are at most _RECENT of each group.
    """
    now_ns = time.time_ns()
    kept: dict[str, int] = {}
    calls = []
    for entry in sorted(_recorded_entries(), key=lambda entry: -entry["time_created_ns"]):
        call = _call_of(entry, now_ns)
        kept[call.group] = kept.get(call.group, 0) + 1
        if kept[call.group] <= _RECENT:
            calls.append(call)
    return calls[::-1]


def positions_in_groups() -> list[dict[str, Any]]:
    """Returns how far this process has come in each of its groups, as plain values for JSON.

    For each: `group` (the same on all its ranks), `description`, `members` (global ranks), `issued`
    (the number of the last collective), and `pending`: number, operation and sizes of the oldest
    that has not ended; None if all have.
    """
    groups: dict[str, dict[str, Any]] = {}
    now_ns = time.time_ns()
    entries = (entry for entry in _recorded_entries() if not entry["is_p2p"])
    for entry in sorted(entries, key=lambda entry: entry["collective_seq_id"]):
        call = _call_of(entry, now_ns)
        position = groups.setdefault(
            call.group,
            {"group": call.group, "description": call.description, "members": _members(call.group)},
        )
        position["issued"] = call.number
        position.setdefault("pending", None)
        if not entry["retired"] and position["pending"] is None:
            position["pending"] = [call.number, call.operation, _spell_sizes(call)]
    return list(groups.values())


def find_blocked(
    rank: int, reports: Mapping[int, RankReport], members: Mapping[str, Sequence[int]]
) -> BlockedCollective | None:
    """Returns the collective of `rank` that others keep from completing, if there is one.

    It is the oldest overdue one that a report shows not to have completed. A rank that left no
    report may have come to any of them: then it is the last that is over, for it was the failure
    that ended the waiting; and where none is over, the oldest. Where none is overdue, it is the
    last whose cause is certain.

    Args:
        rank: the one whose collective failed.
        reports: of every rank that left one, by rank.
        members: the ranks of every group, by its name.
    """
    own = [call for call in reports[rank].calls if call.group in members]
    overdue = [call for call in own if call.age_s >= _OVERDUE * call.timeout_s]
    blocked_or_not = [_blocked(call, reports, members[call.group]) for call in overdue]
    for blocked in blocked_or_not:
        if blocked.is_shown:
            return blocked
    silent = [blocked for blocked in blocked_or_not if blocked.silent]
    if silent:
        return next((blocked for blocked in reversed(silent) if blocked.call.is_over), silent[0])
    certain = (_blocked(call, reports, members[call.group]) for call in reversed(own))
    return next((blocked for blocked in certain if blocked.is_certain), None)


def describe_blocked(blocked: BlockedCollective, reports: Mapping[int, RankReport]) -> str:
    """Spells on one line which collective did not complete, and what every rank did instead."""
    parts = []
    if blocked.behind:
        where = "; ".join(
            f"rank {rank} {_whereabouts(blocked.call, reports[rank])}"
            for rank in blocked.behind[:4]
        )
        parts.append(
            f"{_ranks(blocked.behind)} did not come "
            f"({where}{'; …' if len(blocked.behind) > 4 else ''})"
        )
    parts += [f"rank {rank} had ended with {reports[rank].ended}" for rank in blocked.ended[:4]]
    if blocked.silent:
        parts.append(
            f"{_ranks(blocked.silent)} gave no answer (its process has died or is stopped, or its "
            "node is gone; where a rank is sent more than it expects Gloo ends its process, and the "
            "end of its log says so)"
        )
    for rank in blocked.unlike[:4]:
        other = reports[rank].find(blocked.call)
        if other is not None:
            parts.append(
                f"rank {rank} came with {other.operation} of {_spell_sizes(other)} instead"
            )
    return (
        f"{blocked.call}, of {_spell_sizes(blocked.call)}, did not complete: {', and '.join(parts)}"
    )


# Gathering reports ------------------------------------------------------------------------------


def _collect(store: Store, rank: int, world_size: int, own: list[CollectiveCall]) -> str:
    """Returns the cause of a failure, which the first rank that asks finds in all ranks' reports.

    The other ranks wait for what it found.
    """
    if store.add(_REQUESTED, 1) > 1:
        try:
            store.wait([_FOUND], timedelta(seconds=2 * REPORT_S))
        except dist.DistStoreError:
            return f"{_latest(own)} did not complete, and the rank that asked first found no cause"
        return store.get(_FOUND).decode()
    store.set(_report_key(rank), _encoded(RankReport(own)))
    reports = _gather_reports(store, world_size) | {rank: RankReport(own)}
    members = {call.group: _members(call.group) for call in own}
    blocked = find_blocked(rank, reports, members)
    found = (
        f"{_latest(own)} did not complete, though every rank of the group came: the network is "
        "slow or broken"
    )
    if blocked is not None:
        found = describe_blocked(blocked, reports)
    if store.check([_MISMATCH]) and not (blocked and blocked.unlike):
        found = store.get(_MISMATCH).decode()
    store.set(_FOUND, found)
    return found


def _spell_mismatch(text: str, rank: int, own: Sequence[CollectiveCall]) -> str | None:
    """Spells that a rank got more than it expected, if that is what the backend's error says."""
    found = _GLOO_MISMATCH.search(text)
    if found is None:
        return None
    came, expected = found.groups()
    return (
        f"the ranks disagree about sizes: rank {rank} was sent {came} bytes where it expected "
        f"{expected}, in {_latest(own)}. In an all-to-all the sender's input split and the "
        "receiver's output split must be equal, in other collectives all tensors "
        "(mesh.check_every=1 compares the splits of expert parallelism before rows travel)"
    )


def _gather_reports(store: Store, world_size: int) -> dict[int, RankReport]:
    """Returns the reports that came within REPORT_S, by rank."""
    keys = [_report_key(rank) for rank in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=REPORT_S))
        answered = list(range(world_size))
    except dist.DistStoreError:
        answered = [rank for rank, key in enumerate(keys) if store.check([key])]
    found = store.multi_get([keys[rank] for rank in answered])
    return {rank: _decoded(text) for rank, text in zip(answered, found, strict=True)}


def _blocked(
    call: CollectiveCall, reports: Mapping[int, RankReport], members: Sequence[int]
) -> BlockedCollective:
    blocked = BlockedCollective(call)
    for rank in members:
        report = reports.get(rank)
        other = report and report.find(call)
        if report is None:
            blocked.silent.append(rank)
        elif report.last_in(call.group) < call.number:
            (blocked.ended if report.ended else blocked.behind).append(rank)
        elif other and _differs(other, call):
            blocked.unlike.append(rank)
    return blocked


def _differs(other: CollectiveCall, call: CollectiveCall) -> bool:
    if other.operation != call.operation:
        return True
    return call.operation in _EQUAL_SIZES and other.sizes != call.sizes


def _whereabouts(call: CollectiveCall, report: RankReport) -> str:
    if not report.calls:
        return "has called no collective yet"
    last = report.calls[-1]
    if last.group == call.group:
        return f"last called {last.operation} no. {last.number} there"
    return f"last called {last}"


def _own_connection(store: Store) -> Store:
    """Opens another connection to the store: a wait holds its own, the rank's must stay free.

    Connecting has at least `_CONNECT_S`, however short the waits at the store are to be.
    """
    timeout: timedelta = store.timeout  # pyright: ignore[reportAttributeAccessIssue]
    store.set_timeout(max(timeout, _CONNECT_S))
    try:
        own = store.clone()  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        store.set_timeout(timeout)
    own.set_timeout(timeout)
    return own


def _members(group: str) -> list[int]:
    name = group.partition(":")[2]
    resolved = dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore
    return dist.get_process_group_ranks(resolved)


# Reading and writing ----------------------------------------------------------------------------


def _recorded_entries() -> list[Mapping[str, Any]]:
    """Returns what torch's two recorders hold: the general one, which Gloo writes, and that of
    ProcessGroupNCCL, which only CUDA builds have.
    """
    entries: list[Mapping[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(c10d, name, None)
        if dump is not None:
            entries += json.loads(dump(True, False)).get("entries", [])
    return entries


def _call_of(entry: Mapping[str, Any], now_ns: int) -> CollectiveCall:
    name, description = entry["process_group"]
    backend, _, operation = entry["profiling_name"].partition(":")
    return CollectiveCall(
        group=f"{backend}:{name}",
        description="world" if description in ("default_pg", "undefined", "") else description,
        number=entry["collective_seq_id"],
        operation=operation,
        sizes=tuple(tuple(sizes) for sizes in entry["input_sizes"]),
        age_s=(now_ns - entry["time_created_ns"]) / 1e9,
        timeout_s=entry["timeout_ms"] / 1e3,
        is_over=bool(entry["retired"]),
    )


def _encoded(report: RankReport) -> str:
    calls = [
        (call.group, call.description, call.number, call.operation, call.sizes)
        for call in report.calls
    ]
    return json.dumps({"calls": calls, "ended": report.ended})


def _decoded(text: bytes) -> RankReport:
    values = json.loads(text)
    calls = [
        CollectiveCall(group, description, number, operation, tuple(tuple(size) for size in sizes))
        for group, description, number, operation, sizes in values["calls"]
    ]
    return RankReport(calls, values["ended"])


def _report_key(rank: int) -> str:
    return f"diagnosis/report/{rank}"


def _latest(calls: Sequence[CollectiveCall]) -> str:
    return str(calls[-1]) if calls else "a collective"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spell_ranks(ranks)}"


def _spell_sizes(call: CollectiveCall) -> str:
    return ", ".join(" × ".join(map(str, size)) or "one number" for size in call.sizes) or "nothing"
