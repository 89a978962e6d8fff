"""Judges what a check found, in pure functions."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .probe import NodeFacts, Trial

LEAST_FREE_BYTES = 1 << 30  # of the run folder's disk
GOOD_FREE_BYTES = 20 << 30
GOOD_SHARED_MEMORY_BYTES = 1 << 30
_NAMED = 8  # nodes that a finding names; the others are counted


@dataclass(frozen=True)
class Finding:
    """Holds the result of one check."""

    check: str
    verdict: Literal["ok", "warn", "fail"]
    found: str  # with the figures
    advice: str = ""  # where it is not ok


def listed(words: Sequence[str]) -> str:
    """Joins the first words, and counts the others."""
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more


def _named(reasons: Mapping[str, str]) -> str:
    return listed([f"{node}: {why}" for node, why in reasons.items()])


def judge_silent(silent: Mapping[str, str], num_nodes: int) -> Finding:
    """Judges which nodes answered; `silent` says why others did not."""
    if not silent:
        return Finding("nodes", "ok", f"{num_nodes} of {num_nodes} answer")
    return Finding(
        "nodes",
        "fail",
        f"{len(silent)} of {num_nodes} failed or did not answer ({_named(silent)})",
        "see the raylet's log there (/tmp/ray/session_latest/logs), or remove the node from the "
        "cluster; the other checks leave it out",
    )


def _groups(facts: Sequence[NodeFacts], text: Callable[[NodeFacts], str]) -> list[str]:
    """Returns each text that describes a node, with the nodes it describes; the rarest last."""
    nodes_by_text: dict[str, list[str]] = defaultdict(list)
    for each in facts:
        nodes_by_text[text(each)].append(each.address)
    rarest_last = sorted(nodes_by_text.items(), key=lambda item: -len(item[1]))
    return [f"{words} on {listed(nodes)}" for words, nodes in rarest_last]


def judge_versions(facts: Sequence[NodeFacts]) -> Finding:
    """Judges whether all nodes run the same software."""

    def spell(each: NodeFacts) -> str:
        return ", ".join(f"{name} {value}" for name, value in each.versions.items())

    kinds = _groups(facts, spell)
    if len(kinds) > 1:
        advice = "install the same versions on every node"
        return Finding("versions", "fail", "; ".join(kinds), advice)
    if facts[0].versions.get("ray") == "none":
        advice = "`moebius submit` and `cluster` need it: pip install 'moebius[cluster]'"
        return Finding("versions", "warn", spell(facts[0]), advice)
    return Finding("versions", "ok", spell(facts[0]))


def judge_memory(facts: Sequence[NodeFacts]) -> Finding:
    """Judges the free memory and /dev/shm."""
    least = min(facts, key=lambda each: each.memory_free_bytes / each.memory_total_bytes)
    share = least.memory_free_bytes / least.memory_total_bytes
    found = f"at least {share:.0%} free ({least.memory_free_bytes / 2**30:,.1f} GiB)"
    small = [
        each.address
        for each in facts
        if each.shared_memory_bytes is not None
        and each.shared_memory_bytes < GOOD_SHARED_MEMORY_BYTES
    ]
    if small:
        found += f"; /dev/shm: less than 1 GiB on {listed(small)}"
        advice = "NCCL and Ray need more: docker run --shm-size=8g"
        return Finding("memory", "warn", found, advice)
    if share < 0.5:
        return Finding("memory", "warn", found, f"check what else is running on {least.address}")
    return Finding("memory", "ok", found)


def judge_gpus(facts: Sequence[NodeFacts]) -> Finding:
    """Judges whether all nodes have the same idle GPUs and driver."""
    if not any(each.gpus for each in facts):
        return Finding("GPUs", "ok", "none; ranks run on the CPU")

    def spell(each: NodeFacts) -> str:
        names = ", ".join(sorted({gpu.name for gpu in each.gpus})) or "none"
        return f"{len(each.gpus)} × {names}, driver {each.driver or 'none'}"

    kinds = _groups(facts, spell)
    found = "; ".join(kinds)
    if len(kinds) > 1:
        return Finding("GPUs", "warn", found, "they differ: the slowest sets the pace")
    busy = [
        each.address
        for each in facts
        if any(gpu.free_bytes < 0.9 * gpu.total_bytes for gpu in each.gpus)
    ]
    if busy:
        advice = "another process holds their memory: nvidia-smi there"
        return Finding("GPUs", "warn", f"{found}; in use on {listed(busy)}", advice)
    return Finding("GPUs", "ok", found)


def judge_ports(trials: Mapping[str, Trial]) -> Finding:
    """Judges whether every node reaches every other."""
    num_ways = len(trials) * (len(trials) - 1)
    closed = [f"{node} → {other}" for node, trial in trials.items() for other in trial.unreached]
    if closed:
        found = f"{len(closed)} of {num_ways} connections failed ({listed(closed)})"
        advice = (
            "allow connections between the nodes on all ports above 1024 (firewall, security group)"
        )
        return Finding("ports", "fail", found, advice)
    found = f"all {num_ways} connections work, in both directions" if num_ways else "only one node"
    return Finding("ports", "ok", found)


def judge_folder(trials: Mapping[str, Trial], where: str) -> list[Finding]:
    """Judges whether all nodes share a folder, and its free space."""
    if faults := {node: trial.fault for node, trial in trials.items() if trial.fault}:
        advice = "mount it on every node under the same path, writable for this user"
        return [Finding("shared folder", "fail", _named(faults), advice)]
    shared = Finding("shared folder", "ok", f"{where}: shared by {len(trials)} node(s)")
    free = min(trial.free_bytes for trial in trials.values())
    verdict = "fail" if free < LEAST_FREE_BYTES else "warn" if free < GOOD_FREE_BYTES else "ok"
    advice = "" if verdict == "ok" else "check that checkpoint.keep_last + 1 checkpoints fit"
    space = Finding("disk space", verdict, f"{free / 2**30:,.1f} GiB free at {where}", advice)
    return [shared, space]
