"""Judges what a check found, in pure functions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .facts import UNLIMITED, NodeFacts

Verdict = Literal["ok", "warn", "fail"]

LATE_S, BAD_LATE_S = 0.1, 1.0  # clock offset beyond the error of its measurement
GOOD_OPEN_FILES, LEAST_OPEN_FILES = 65_536, 4_096
GOOD_PROCESSES = 16_384
SLOW_TO_SEE_S = 2.0  # until a file is visible on another node
LEAST_FREE_BYTES = 1 << 30  # of the run folder's disk
GOOD_FREE_BYTES = 20 << 30
SLOW_FSYNC_S, BAD_FSYNC_S = 0.05, 1.0  # the journal waits for one at every state
GOOD_SHARED_MEMORY_BYTES = 1 << 30
_NAMED = 8  # nodes that a finding names; the others are counted


@dataclass(frozen=True)
class Finding:
    """Holds the result of one check."""

    check: str
    verdict: Verdict
    found: str  # with the figures
    advice: str = ""  # where it is not ok


@dataclass(frozen=True)
class Offset:
    """Holds a node's clock offset; positive means ahead of ours."""

    seconds: float
    error_s: float  # bound of the measurement error


@dataclass(frozen=True)
class Reached:
    """Holds whether one node reached another's port."""

    seconds: float | None  # None: it was not
    why: str = ""


@dataclass(frozen=True)
class Written:
    """Holds how long one file took to reach the disk, and the free space there."""

    seconds: float
    free_bytes: int


@dataclass(frozen=True)
class FolderTrial:
    """Holds what nodes observed with test files in the shared folder."""

    written: Mapping[str, Written]
    faults: Mapping[str, str]  # why nodes cannot write
    unseen: Mapping[str, str]  # why nodes do not see the first node's file
    seconds_to_see: float  # the longest time until a node saw it
    gaps: Mapping[str, str]  # what nodes saw in the middle of a rename
    winners: int  # nodes that created the same file exclusively


def listed(words: Sequence[str]) -> str:
    """Joins the first words, and counts the others."""
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more


def _named(reasons: Mapping[str, str]) -> str:
    return listed([f"{node}: {why}" for node, why in reasons.items()])


# Facts of nodes -----------------------------------------------------------------------------------


def judge_silent(silent: Mapping[str, str], num_nodes: int, limit_s: float) -> Finding:
    """Judges which nodes answered; `silent` says why others did not."""
    if not silent:
        return Finding("nodes", "ok", f"{num_nodes} of {num_nodes} answer")
    return Finding(
        "nodes",
        "fail",
        f"{len(silent)} of {num_nodes} failed or did not answer within {limit_s:g} s "
        f"({_named(silent)})",
        "see the raylet's log there (/tmp/ray/session_latest/logs), or remove the node from the "
        "cluster; the other checks leave it out",
    )


def judge_versions(facts: Sequence[NodeFacts]) -> Finding:
    """Judges whether all nodes run the same software."""
    differing = []
    for name in facts[0].versions:
        nodes_by_version: dict[str, list[str]] = {}
        for each in facts:
            nodes_by_version.setdefault(each.versions.get(name, "none"), []).append(each.address)
        if len(nodes_by_version) > 1:
            rarest_last = sorted(nodes_by_version.items(), key=lambda item: -len(item[1]))
            spelt = ", ".join(f"{value} on {listed(at)}" for value, at in rarest_last)
            differing.append(f"{name}: {spelt}")
    if differing:
        advice = (
            "install the same versions on every node; if only moebius differs, `moebius submit "
            "--ship WHEEL` sends it"
        )
        return Finding("versions", "fail", "; ".join(differing), advice)
    found = ", ".join(f"{name} {value}" for name, value in facts[0].versions.items())
    if facts[0].versions.get("ray") == "none":
        advice = "`moebius submit` and `cluster` need it: pip install 'moebius[cluster]'"
        return Finding("versions", "warn", found, advice)
    return Finding("versions", "ok", found)


def judge_limits(facts: Sequence[NodeFacts]) -> Finding:
    """Judges the limits of open files and processes."""

    def is_few(value: int, least: int) -> bool:
        return value != UNLIMITED and value < least

    failing = [each for each in facts if is_few(each.open_files, LEAST_OPEN_FILES)]
    warned = [
        each
        for each in facts
        if is_few(each.open_files, GOOD_OPEN_FILES) or is_few(each.processes, GOOD_PROCESSES)
    ]
    least = min(facts, key=lambda each: float("inf") if each.open_files < 0 else each.open_files)
    found = f"at least {_count(least.open_files)} open files, {_count(least.processes)} processes"
    if not warned:
        return Finding("limits", "ok", found)
    at = listed([f"{each.address} ({_count(each.open_files)})" for each in failing or warned])
    advice = "raise them before `ray start` there: ulimit -n 65536 (limits.conf, LimitNOFILE=)"
    return Finding("limits", "fail" if failing else "warn", f"{found}; low on {at}", advice)


def _count(limit: int) -> str:
    return "any number of" if limit == UNLIMITED else f"{limit:,}"


def judge_memory(facts: Sequence[NodeFacts]) -> Finding:
    """Judges the free memory and /dev/shm."""
    least = min(facts, key=lambda each: each.memory_free_bytes / each.memory_total_bytes)
    share = least.memory_free_bytes / least.memory_total_bytes
    found = f"at least {share:.0%} free ({least.memory_free_bytes / 2**30:,.1f} GiB)"
    shared = {each.address: each.shared_memory_bytes for each in facts}
    free = {address: size for address, size in shared.items() if size is not None}
    if free:
        found += f"; /dev/shm: at least {min(free.values()) / 2**30:,.1f} GiB free"
    if small := [address for address, size in free.items() if size < GOOD_SHARED_MEMORY_BYTES]:
        advice = "NCCL and Ray need more: docker run --shm-size=8g"
        return Finding("memory", "warn", f"{found}; less than 1 GiB on {listed(small)}", advice)
    if share < 0.5:
        return Finding("memory", "warn", found, f"check what else is running on {least.address}")
    return Finding("memory", "ok", found)


def judge_gpus(facts: Sequence[NodeFacts]) -> Finding:
    """Judges whether all nodes have the same idle GPUs and driver."""
    kinds = Counter((len(each.gpus), *sorted({gpu.name for gpu in each.gpus})) for each in facts)
    if set(kinds) == {(0,)}:
        return Finding("GPUs", "ok", "none; ranks run on the CPU")
    spelt = "; ".join(
        f"{number} node(s) with {kind[0]} × {', '.join(map(str, kind[1:])) or 'none'}"
        for kind, number in kinds.items()
    )
    drivers = Counter(each.driver for each in facts if each.driver)
    found = f"{spelt}; driver {', '.join(drivers)}"
    if len(kinds) > 1 or len(drivers) > 1:
        return Finding("GPUs", "warn", found, "they differ: the slowest sets the pace")
    busy = [
        each.address
        for each in facts
        if any(gpu.free_bytes < 0.9 * gpu.total_bytes for gpu in each.gpus)
    ]
    if busy:
        return Finding("GPUs", "warn", f"{found}; in use on {listed(busy)}", "run nvidia-smi there")
    return Finding("GPUs", "ok", found)


def judge_interfaces(facts: Sequence[NodeFacts]) -> Finding:
    """Judges the interface that each node's ranks would use, and its MTU."""

    def failed(found: str, advice: str) -> Finding:
        return Finding("interfaces", "fail", found, advice)

    wrong = [
        f"{name}={value} on {each.address}, which has {', '.join(each.interfaces)}"
        for each in facts
        for name, value in each.chosen.items()
        if not _names_one(value, each.interfaces)
    ]
    if wrong:
        return failed(listed(wrong), "set it to an existing interface, or unset it")
    if lost := [each.address for each in facts if each.interface is None]:
        return failed(
            f"no interface has the node's address on {listed(lost)}",
            "start Ray there with --node-ip-address set to an address on the network that ranks "
            "should use",
        )
    used = Counter(
        (each.chosen.get("GLOO_SOCKET_IFNAME", each.interface), each.mtu) for each in facts
    )
    found = "; ".join(f"{name}, MTU {mtu} ({n} node(s))" for (name, mtu), n in used.items())
    if len({mtu for _, mtu in used}) > 1:
        advice = "MTUs differ, so large packets can get lost"
        return Finding("interfaces", "warn", found, advice)
    return Finding("interfaces", "ok", found)


def _names_one(value: str, interfaces: Sequence[str]) -> bool:
    """Returns whether a value of NCCL or Gloo ("eth0,eth1", "=eth0", "^docker") matches an interface."""
    if value.startswith("^"):
        return True
    prefixes = value.removeprefix("=").split(",")
    return any(name.startswith(prefix) for name in interfaces for prefix in prefixes if prefix)


# Between nodes ------------------------------------------------------------------------------------


def judge_clocks(offsets: Mapping[str, Offset]) -> Finding:
    """Judges each node's clock against the median of all."""
    ordered = sorted(offset.seconds for offset in offsets.values())
    usual = ordered[len(ordered) // 2]
    error_s = max(offset.error_s for offset in offsets.values())
    off = {
        node: offset.seconds - usual
        for node, offset in offsets.items()
        if abs(offset.seconds - usual) > LATE_S + offset.error_s
    }
    if not off:
        apart_ms = (ordered[-1] - ordered[0]) * 1e3
        return Finding(
            "clocks", "ok", f"at most {apart_ms:.1f} ms apart (± {error_s * 1e3:.1f} ms)"
        )
    named = listed([f"{node} by {seconds:+.2f} s" for node, seconds in off.items()])
    return Finding(
        "clocks",
        "fail" if max(map(abs, off.values())) > BAD_LATE_S else "warn",
        f"off: {named} (± {error_s * 1e3:.1f} ms)",
        "start a time service there (chronyd, systemd-timesyncd); otherwise logs appear out of "
        "order and storage refuses signed requests",
    )


def judge_ports(reached: Mapping[tuple[str, str], Reached]) -> Finding:
    """Judges whether every node reaches every other; keys: (from, to)."""
    if not reached:
        return Finding("ports", "ok", "only one node")
    closed = {f"{a} → {b}": way.why for (a, b), way in reached.items() if way.seconds is None}
    if closed:
        return Finding(
            "ports",
            "fail",
            f"{len(closed)} of {len(reached)} connections failed ({_named(closed)})",
            "allow connections between the nodes on all ports above 1024 (firewall, security "
            "group)",
        )
    slowest_ms = 1e3 * max(each.seconds or 0.0 for each in reached.values())
    found = f"all {len(reached)} connections work, in both directions; slowest {slowest_ms:.1f} ms"
    return Finding("ports", "ok", found)


def judge_folder(trial: FolderTrial, where: str) -> list[Finding]:
    """Judges a folder's visibility, atomicity, space and speed."""
    found = [_judge_shared(trial, where)]
    if trial.written:
        free = min(written.free_bytes for written in trial.written.values())
        verdict = "fail" if free < LEAST_FREE_BYTES else "warn" if free < GOOD_FREE_BYTES else "ok"
        advice = "" if verdict == "ok" else "check that checkpoint.keep_last + 1 checkpoints fit"
        space = f"{free / 2**30:,.1f} GiB free at {where}"
        found.append(Finding("disk space", verdict, space, advice))
        slowest = max(trial.written, key=lambda node: trial.written[node].seconds)
        found.append(judge_fsync(trial.written[slowest].seconds, f"{where} on {slowest}"))
    return found


def judge_fsync(seconds: float, where: str) -> Finding:
    """Judges how long the disk takes to sync a small file."""
    found = f"{seconds * 1000:.1f} ms at {where}"
    if seconds <= SLOW_FSYNC_S:
        return Finding("fsync", "ok", found)
    verdict = "fail" if seconds > BAD_FSYNC_S else "warn"
    advice = "the journal and checkpoints wait for fsync: use a faster disk for the run folder"
    return Finding("fsync", verdict, found, advice)


def _judge_shared(trial: FolderTrial, where: str) -> Finding:
    def failed(found: str, advice: str) -> Finding:
        return Finding("shared folder", "fail", f"{where}: {found}", advice)

    if trial.faults:
        return failed(
            f"cannot be written ({_named(trial.faults)})",
            "mount it there, or give this user write permission",
        )
    if trial.unseen:
        return failed(
            f"is not shared: other nodes do not see what one node writes ({_named(trial.unseen)})",
            "set --run-dir to a folder that every node sees under the same path",
        )
    if trial.gaps:
        return failed(
            f"renaming does not replace a file atomically ({_named(trial.gaps)} seen in between)",
            "checkpoints rely on atomic renames: choose another file system",
        )
    if trial.winners > 1:
        return failed(
            f"{trial.winners} nodes each created the same file exclusively",
            "a checkpoint could be committed twice: choose a file system that supports O_EXCL",
        )
    found = f"{where}: seen by all {len(trial.written)} node(s) within {trial.seconds_to_see:.2f} s"
    if trial.seconds_to_see > SLOW_TO_SEE_S:
        advice = "its attribute cache is long (mount option actimeo): stops and status are late"
        return Finding("shared folder", "warn", found, advice)
    return Finding("shared folder", "ok", found)
