"""Judges what a check found, in pure functions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .probe import UNLIMITED, FolderTrial, NodeFacts

Verdict = Literal["ok", "warn", "fail"]

LATE_S, BAD_LATE_S = 0.1, 1.0  # of a clock
GOOD_OPEN_FILES, LEAST_OPEN_FILES = 65_536, 4_096
GOOD_PROCESSES = 16_384
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
        advice = "install the same versions on every node"
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


# Between nodes ------------------------------------------------------------------------------------


def judge_clocks(offsets: Mapping[str, float]) -> Finding:
    """Judges each node's clock against the median of all; offsets in seconds, positive ahead."""
    ordered = sorted(offsets.values())
    usual = ordered[len(ordered) // 2]
    off = {
        node: seconds - usual for node, seconds in offsets.items() if abs(seconds - usual) > LATE_S
    }
    if not off:
        return Finding("clocks", "ok", f"at most {(ordered[-1] - ordered[0]) * 1e3:.1f} ms apart")
    return Finding(
        "clocks",
        "fail" if max(map(abs, off.values())) > BAD_LATE_S else "warn",
        f"off: {listed([f'{node} by {seconds:+.2f} s' for node, seconds in off.items()])}",
        "start a time service there (chronyd, systemd-timesyncd); otherwise logs appear out of "
        "order and storage refuses signed requests",
    )


def judge_ports(unreached: Mapping[str, Sequence[str]]) -> Finding:
    """Judges whether every node reaches every other; `unreached` lists those it does not reach."""
    num_ways = len(unreached) * (len(unreached) - 1)
    closed = [f"{node} → {other}" for node, others in unreached.items() for other in others]
    if closed:
        return Finding(
            "ports",
            "fail",
            f"{len(closed)} of {num_ways} connections failed ({listed(closed)})",
            "allow connections between the nodes on all ports above 1024 (firewall, security "
            "group)",
        )
    found = f"all {num_ways} connections work, in both directions" if num_ways else "only one node"
    return Finding("ports", "ok", found)


def judge_folder(trials: Mapping[str, FolderTrial], where: str) -> list[Finding]:
    """Judges whether all nodes share a folder, its free space and its speed."""
    if faults := {node: trial.fault for node, trial in trials.items() if trial.fault}:
        advice = "mount it on every node under the same path, writable for this user"
        return [Finding("shared folder", "fail", _named(faults), advice)]
    if not trials:
        return []
    shared = Finding("shared folder", "ok", f"{where}: shared by {len(trials)} node(s)")
    free = min(trial.free_bytes for trial in trials.values())
    verdict = "fail" if free < LEAST_FREE_BYTES else "warn" if free < GOOD_FREE_BYTES else "ok"
    advice = "" if verdict == "ok" else "check that checkpoint.keep_last + 1 checkpoints fit"
    space = Finding("disk space", verdict, f"{free / 2**30:,.1f} GiB free at {where}", advice)
    slowest = max(trials, key=lambda node: trials[node].fsync_s)
    return [shared, space, _judge_fsync(trials[slowest].fsync_s, f"{where} on {slowest}")]


def _judge_fsync(seconds: float, where: str) -> Finding:
    found = f"{seconds * 1000:.1f} ms at {where}"
    if seconds <= SLOW_FSYNC_S:
        return Finding("fsync", "ok", found)
    verdict = "fail" if seconds > BAD_FSYNC_S else "warn"
    advice = "the journal and checkpoints wait for fsync: use a faster disk for the run folder"
    return Finding("fsync", verdict, found, advice)
