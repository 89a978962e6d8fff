"""Diagnoses a collective that does not complete: its operation, number and group, and the absent ranks.

torch's flight recorder logs every collective that a rank issues (group, number, operation, sizes;
2 µs each). This module turns these records into an answer:
  1. on every rank a thread polls one key of the store each second, over its own connection;
  2. a rank whose collective fails sets the key. All threads then post their rank's last collectives,
     even if the rank hangs, sleeps or waits in another group;
  3. the first rank that asked compares the reports, and all ranks that failed raise its result. A rank
     that died leaves no report; one that ended with an exception has posted it. Both are named.
The diagnosis arrives at most REPORT_S after the collective's timeout. Without failures it costs one
small message per rank and second. (A thread that blocks in the store instead of polling cannot be
stopped cleanly and aborts its process.)

Gloo raises timeouts in the rank's own code, where `Process` calls `explain`. NCCL's watchdog instead
ends the process, prints number, operation and group, and writes every rank's record to a file, which
torch's `torchfrtrace` analyses. NCCL errors that reach Python are explained here like Gloo's.
"""

import atexit
import json
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from ..layout import named_ranks

logger = logging.getLogger(__name__)

REPORT_S = 3.0  # how long to wait for reports of ranks that may be dead
_LOOK_S = 1.0
_CONNECT_S = timedelta(seconds=30)
_REQUESTED = "diagnosis/requested"
_FOUND = "diagnosis/found"
_MISMATCH = "diagnosis/mismatch"
# Gloo's error for a message longer than its receiver expects, with the bytes of both
_GLOO_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_RECENT = 16  # collectives of each group that a rank reports
# One of Gloo's errors lacks its name: if several collectives time out together, the first closes the
# connection and the others fail with "Application timeout caused pair closure".
_BACKENDS_SAY = ("gloo", "nccl", "pair closure")
_OVERDUE = 0.9  # fraction of its timeout after which a collective may be the one that timed out
# operations whose tensors have equal sizes on all ranks
_EQUAL_SIZES = ("all_reduce", "reduce_scatter", "broadcast")


class CollectiveError(RuntimeError):
    """Raised if a collective did not complete; names it and the ranks that did not come."""


@dataclass(frozen=True)
class CollectiveCall:
    """One collective that a rank issued."""

    group: (
        str  # backend and torch's name, the same on all its ranks; each backend numbers for itself
    )
    description: str
    number: int  # 1 is the group's first
    operation: str
    sizes: tuple[tuple[int, ...], ...]  # of the inputs
    age_s: float = 0.0
    timeout_s: float = float("inf")
    is_over: bool = False  # completed or failed; the recorder does not distinguish them

    def __str__(self) -> str:
        return f"{self.operation} no. {self.number} of group {self.description!r}"


@dataclass(frozen=True)
class RankReport:
    """The last collectives that a rank issued, and the exception that ended it, if any."""

    calls: Sequence[CollectiveCall] = ()  # oldest first
    ended: str | None = None

    def last_in(self, group: str) -> int:
        """Returns the number of the rank's last collective in a group, or 0."""
        return max((call.number for call in self.calls if call.group == group), default=0)

    def find(self, call: CollectiveCall) -> CollectiveCall | None:
        """Returns the rank's call with the same number in the same group, if any."""
        return next(
            (own for own in self.calls if (own.group, own.number) == (call.group, call.number)),
            None,
        )


@dataclass(frozen=True)
class BlockedCollective:
    """A collective that does not complete, and the ranks that block it."""

    call: CollectiveCall
    silent: list[int] = field(default_factory=list)  # posted no report
    ended: list[int] = field(default_factory=list)  # ended with an exception
    behind: list[int] = field(default_factory=list)  # have not issued it yet
    unlike: list[int] = field(default_factory=list)  # issued another operation or other sizes

    @property
    def is_certain(self) -> bool:
        """Returns whether this explains a failure even if the collective is not overdue."""
        return bool(self.silent or self.ended or self.unlike)

    @property
    def is_shown(self) -> bool:
        """Returns whether a rank's report shows that the collective did not complete."""
        return bool(self.behind or self.ended or self.unlike)


class Reporter:
    """A thread that reports this rank's last collectives on request, whatever the rank is doing.

    It runs until `stop` or the end of the process.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = _own_connection(store), rank
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._answer_when_asked, name="diagnosis", daemon=True
        )
        self._thread.start()
        # A thread inside torch aborts the process at interpreter shutdown.
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stops the thread; may be called more than once."""
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
    """Posts the exception that ends this rank, for the ranks that will wait for it."""
    try:
        store.set(_report_key(rank), _encoded(RankReport(recorded_calls(), _first_line(error))))
    except dist.DistError as problem:
        logger.warning("rank %d could not report to the others why it ends: %s", rank, problem)


def explain(error: BaseException, *, store: Store, rank: int, world_size: int) -> str | None:
    """Explains why a collective failed, within 2 × REPORT_S.

    Returns None if `error` is not a collective's, or the store is unreachable.
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
    """Returns whether an error's text comes from a backend's collective."""
    return any(word in text.lower() for word in _BACKENDS_SAY)


def recorded_calls() -> list[CollectiveCall]:
    """Returns this process's last collectives from the flight recorder, oldest first, 16 per group."""
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
    """Returns this process's progress in each of its groups, as plain values for JSON.

    Keys: `group` (the same on all its ranks), `description`, `members` (global ranks), `issued` (number
    of the last collective), and `pending` (number, operation and sizes of the oldest unfinished one, or
    None).
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
    """Finds the collective of `rank` that other ranks block, if any.

    It is the oldest overdue one that a report shows to be incomplete. If instead ranks posted no
    report, it is the last one that is over, because its failure ended the wait, or else the oldest
    overdue one. If none is overdue, it is the last whose cause is certain.

    Args:
        rank: the rank whose collective failed.
        reports: reports by rank.
        members: ranks of every group by its name.
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
    """Describes in one line the blocked collective and what the other ranks did instead."""
    parts = []
    if blocked.behind:
        where = "; ".join(
            f"rank {rank} {_whereabouts(blocked.call, reports[rank])}"
            for rank in blocked.behind[:4]
        )
        parts.append(
            f"{named_ranks(blocked.behind)} did not come "
            f"({where}{'; …' if len(blocked.behind) > 4 else ''})"
        )
    parts += [f"rank {rank} had ended with {reports[rank].ended}" for rank in blocked.ended[:4]]
    if blocked.silent:
        parts.append(
            f"{named_ranks(blocked.silent)} gave no answer (the process has died or is stopped, or its node is gone; "
            "Gloo also ends a process that is sent more than it expects, and the end of its log says so)"
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
    """Returns the cause of a failure: the first rank to ask finds it, the others wait for its result."""
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
    """Explains Gloo's error about a message longer than expected, if `text` is one."""
    found = _GLOO_MISMATCH.search(text)
    if found is None:
        return None
    came, expected = found.groups()
    return (
        f"the ranks disagree about sizes: rank {rank} was sent {came} bytes where it expected {expected}, in "
        f"{_latest(own)}. The sender's input split and the receiver's output split of an all-to-all must be "
        "equal; other collectives need equal tensors (mesh.check_every=1 compares the splits of expert "
        "parallelism before it sends rows)"
    )


def _gather_reports(store: Store, world_size: int) -> dict[int, RankReport]:
    """Returns the reports posted within REPORT_S, by rank."""
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
    """Opens another connection to the store, because a wait occupies one.

    Connecting may take `_CONNECT_S`, however short the store's own timeout is.
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
    """Returns the entries of torch's general recorder (Gloo) and of ProcessGroupNCCL's (CUDA builds)."""
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
    return json.dumps(asdict(report))


def _decoded(text: bytes) -> RankReport:
    values = json.loads(text)
    for call in values["calls"]:
        call["sizes"] = tuple(map(tuple, call["sizes"]))
    return RankReport([CollectiveCall(**call) for call in values["calls"]], values["ended"])


def _report_key(rank: int) -> str:
    return f"diagnosis/report/{rank}"


def _latest(calls: Sequence[CollectiveCall]) -> str:
    return str(calls[-1]) if calls else "a collective"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _spell_sizes(call: CollectiveCall) -> str:
    return ", ".join(" × ".join(map(str, size)) or "one number" for size in call.sizes) or "nothing"
