"""Is a cluster good enough? Judgements of what its nodes say: pure functions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .facts import UNLIMITED, NodeFacts
from .findings import GOOD_FREE_BYTES, LEAST_FREE_BYTES, Finding, judge_fsync
from .folder import Written
from .pairs import LinkClass
from .probe import Reached

LATE_S, BAD_LATE_S = 0.1, 1.0  # a clock, beyond the error of its measurement
GOOD_OPEN_FILES, LEAST_OPEN_FILES = 65_536, 4_096
GOOD_PROCESSES = 16_384
SLOW_TO_SEE_S = 2.0  # a file that another node has written
_NAMED = 8  # nodes or pairs that a finding names; the others are counted


@dataclass(frozen=True)
class Offset:
    """Says by how much a node's clock is ahead of ours, as an exchange could tell."""

    seconds: float
    error_s: float  # the true offset is at most so far away


def listed(words: Sequence[str]) -> str:
    """Returns the first words in a line, and how many more there are."""
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return ", ".join(words[:_NAMED]) + more


def judge_silent(silent: Mapping[str, str], num_nodes: int, limit_s: float) -> Finding:
    """Judges which nodes answered at all; `silent`: why the others did not."""
    if not silent:
        return Finding("nodes", "ok", f"{num_nodes} of {num_nodes} answer")
    why = listed([f"{node}: {reason}" for node, reason in silent.items()])
    return Finding(
        "nodes",
        "fail",
        f"{len(silent)} of {num_nodes} fail or give no answer within {limit_s:g} s ({why})",
        "look at the raylet's log there (/tmp/ray/session_latest/logs), or take the node out of "
        "the cluster; what follows is about the others",
    )


def judge_machines(facts: Sequence[NodeFacts]) -> Finding:
    """Judges whether nodes are machines of their own, and alike."""
    machines = Counter(each.machine for each in facts)
    sizes = Counter((each.cpus, round(each.memory_total_bytes / 2**30)) for each in facts)
    spelt = "; ".join(f"{n} × {cpus} CPUs, {gib} GiB" for (cpus, gib), n in sizes.items())
    if len(machines) < len(facts):
        found = f"{spelt}; {len(facts)} nodes pretend on {len(machines)} machine(s)"
        return Finding("machines", "ok", found, "what links give is that of a machine with itself")
    if len(sizes) > 1:
        return Finding("machines", "warn", spelt, "the smallest sets the pace of all")
    return Finding("machines", "ok", spelt)


def judge_equal_versions(facts: Sequence[NodeFacts]) -> Finding:
    """Judges whether all nodes run the same software."""
    differing = []
    for name in facts[0].versions:
        nodes_by_version: dict[str, list[str]] = {}
        for each in facts:
            nodes_by_version.setdefault(each.versions.get(name, "none"), []).append(each.address)
        if len(nodes_by_version) > 1:
            rarest = sorted(nodes_by_version.items(), key=lambda item: -len(item[1]))
            differing.append(
                f"{name}: " + ", ".join(f"{value} on {listed(at)}" for value, at in rarest)
            )
    if differing:
        advice = (
            "install the same on every node; another moebius alone: `moebius submit --ship` "
            "brings this one along"
        )
        return Finding("versions", "fail", "; ".join(differing), advice)
    found = ", ".join(f"{name} {value}" for name, value in facts[0].versions.items())
    return Finding("versions", "ok", f"the same everywhere: {found}")


def judge_clocks(offsets: Mapping[str, Offset]) -> Finding:
    """Judges how far the nodes' clocks are apart: each against the clock of most, their median."""
    ordered = sorted(offset.seconds for offset in offsets.values())
    usual = ordered[len(ordered) // 2]
    error_s = max(offset.error_s for offset in offsets.values())
    off = {
        node: offset.seconds - usual
        for node, offset in offsets.items()
        if abs(offset.seconds - usual) > LATE_S + offset.error_s
    }
    if not off:
        apart_s = ordered[-1] - ordered[0]
        return Finding(
            "clocks", "ok", f"at most {apart_s * 1e3:.1f} ms apart (± {error_s * 1e3:.1f} ms)"
        )
    worst_s = max(abs(seconds) for seconds in off.values())
    named = listed([f"{node} by {seconds:+.2f} s" for node, seconds in off.items()])
    return Finding(
        "clocks",
        "fail" if worst_s > BAD_LATE_S else "warn",
        f"off: {named} (± {error_s * 1e3:.1f} ms)",
        "start a time service there (chronyd, systemd-timesyncd): logs come in a wrong order, and "
        "signed requests to storage are refused",
    )


def judge_limits(facts: Sequence[NodeFacts]) -> Finding:
    """Judges how many files and processes may be open."""

    def few(value: int, least: int) -> bool:
        return value != UNLIMITED and value < least

    failing = [each for each in facts if few(each.open_files, LEAST_OPEN_FILES)]
    warned = [
        each
        for each in facts
        if few(each.open_files, GOOD_OPEN_FILES) or few(each.processes, GOOD_PROCESSES)
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
    """Judges the memory that is free, and /dev/shm."""
    least = min(facts, key=lambda each: each.memory_free_bytes / each.memory_total_bytes)
    share = least.memory_free_bytes / least.memory_total_bytes
    found = f"at least {share:.0%} free ({least.memory_free_bytes / 2**30:,.1f} GiB)"
    shared = [each for each in facts if each.shared_memory_bytes is not None]
    small = [each.address for each in shared if (each.shared_memory_bytes or 0) < 1 << 30]
    if shared:
        least_shm = min(each.shared_memory_bytes or 0 for each in shared)
        found += f"; /dev/shm: at least {least_shm / 2**30:,.1f} GiB free"
    if small:
        advice = "NCCL and Ray want more: docker run --shm-size=8g"
        return Finding("memory", "warn", f"{found}; less than 1 GiB on {listed(small)}", advice)
    if share < 0.5:
        advice = f"see what else runs on {least.address}"
        return Finding("memory", "warn", found, advice)
    return Finding("memory", "ok", found)


def judge_all_gpus(facts: Sequence[NodeFacts]) -> Finding:
    """Judges whether nodes have the same GPUs and driver, and whether somebody uses them."""
    kinds = Counter((len(each.gpus), *sorted({gpu.name for gpu in each.gpus})) for each in facts)
    if set(kinds) == {(0,)}:
        return Finding("GPUs", "ok", "none anywhere: ranks will compute on the CPU")
    spelt = "; ".join(
        f"{number} node(s) with {kind[0]} × {', '.join(map(str, kind[1:])) or 'none'}"
        for kind, number in kinds.items()
    )
    drivers = Counter(each.driver for each in facts if each.driver)
    found = f"{spelt}; driver {', '.join(drivers)}"
    busy = [
        each.address
        for each in facts
        if any(gpu.free_bytes < 0.9 * gpu.total_bytes for gpu in each.gpus)
    ]
    if len(kinds) > 1 or len(drivers) > 1:
        return Finding("GPUs", "warn", found, "unlike ones: the slowest sets the pace")
    if busy:
        return Finding("GPUs", "warn", f"{found}; in use on {listed(busy)}", "see nvidia-smi there")
    return Finding("GPUs", "ok", found)


def judge_interfaces(facts: Sequence[NodeFacts]) -> Finding:
    """Judges through which interface the ranks of each node would talk, and its MTU."""
    wrong = [
        f"{name}={value} on {each.address}, which has {', '.join(each.interfaces)}"
        for each in facts
        for name, value in each.chosen.items()
        if not _names_one(value, each.interfaces)
    ]
    if wrong:
        return Finding("interfaces", "fail", listed(wrong), "name one that is there, or unset it")
    lost = [each.address for each in facts if each.interface is None]
    if lost:
        return Finding(
            "interfaces",
            "fail",
            f"no interface has the node's own address on {listed(lost)}",
            "start Ray there with --node-ip-address of the network that ranks shall use",
        )
    used = Counter(
        (each.chosen.get("GLOO_SOCKET_IFNAME", each.interface), each.mtu) for each in facts
    )
    found = "; ".join(f"{name}, MTU {mtu} ({n} node(s))" for (name, mtu), n in used.items())
    if len({mtu for _, mtu in used}) > 1:
        return Finding(
            "interfaces", "warn", found, "unlike MTUs: large packets get lost on the way"
        )
    return Finding("interfaces", "ok", found)


def _names_one(value: str, interfaces: Sequence[str]) -> bool:
    """Whether NCCL's and Gloo's lists ("eth0,eth1", "=eth0", "^docker", a prefix) name one there."""
    if value.startswith("^"):
        return True
    prefixes = value.removeprefix("=").split(",")
    return any(name.startswith(prefix) for name in interfaces for prefix in prefixes if prefix)


def judge_py_spy(facts: Sequence[NodeFacts]) -> Finding:
    """Judges whether the stacks of a rank that answers nothing can be read."""
    without = [each.address for each in facts if not each.py_spy]
    if not without:
        return Finding("py-spy", "ok", "on every node")
    return Finding(
        "py-spy",
        "ok",
        f"not on {listed(without)}: a rank that is stopped, or hangs in C++, will show no stacks",
        "pip install 'moebius[spy]'",
    )


def judge_ports(reached: Mapping[tuple[str, str], Reached]) -> Finding:
    """Judges whether every node reaches every other; keys: from, to."""
    refused = {pair: each for pair, each in reached.items() if each.seconds is None}
    if refused:
        ways = listed([f"{a} → {b}: {each.why}" for (a, b), each in refused.items()])
        return Finding(
            "ports",
            "fail",
            f"{len(refused)} of {len(reached)} ways are closed ({ways})",
            "let the nodes reach each other on all ports above 1024 (firewall, security group)",
        )
    if not reached:
        return Finding("ports", "ok", "one node: there is nobody else to reach")
    slowest = max(each.seconds or 0.0 for each in reached.values())
    found = f"all {len(reached)} ways are open, both directions; slowest {slowest * 1e3:.1f} ms"
    return Finding("ports", "ok", found)


@dataclass(frozen=True)
class FolderTrial:
    """Holds what became of the files that nodes wrote into the shared folder."""

    written: Mapping[str, Written]
    faults: Mapping[str, str]  # of nodes that cannot write
    unseen: Mapping[str, str]  # why, of nodes that do not see what the first has written
    seconds_to_see: float  # at most; of those that do
    gaps: Mapping[str, str]  # of nodes that saw a rename as something else than a replacement
    winners: int  # of nodes that created the same file


def judge_folder(trial: FolderTrial, where: str) -> list[Finding]:
    """Judges whether a folder is shared and keeps its promises, its space and its speed."""
    found = [_judge_shared(trial, where)]
    if trial.written:
        free = min(trial.written.values(), key=lambda each: each.free_bytes).free_bytes
        verdict = "fail" if free < LEAST_FREE_BYTES else "warn" if free < GOOD_FREE_BYTES else "ok"
        advice = "" if verdict == "ok" else "compare it with checkpoint.keep_last + 1 checkpoints"
        found.append(Finding("disk space", verdict, f"{free / 2**30:,.1f} GiB free", advice))
        slowest = max(trial.written, key=lambda node: trial.written[node].seconds)
        found.append(judge_fsync(trial.written[slowest].seconds, f"{where} on {slowest}"))
    return found


def _judge_shared(trial: FolderTrial, where: str) -> Finding:
    def failed(found: str, advice: str) -> Finding:
        return Finding("shared folder", "fail", f"{where}: {found}", advice)

    if trial.faults:
        named = listed([f"{node}: {why}" for node, why in trial.faults.items()])
        return failed(f"cannot be written ({named})", "mount it there, or give this user the right")
    if trial.unseen:
        named = listed([f"{node} ({why})" for node, why in trial.unseen.items()])
        return failed(
            f"is not shared: what one node writes is not seen on {named}",
            "--run-dir must be a folder that every node reaches under the same path",
        )
    if trial.gaps:
        named = listed([f"{node}: {gap}" for node, gap in trial.gaps.items()])
        return failed(
            f"a rename is no replacement there ({named} seen in between)",
            "checkpoints rely on it: choose another file system",
        )
    if trial.winners > 1:
        return failed(
            f"{trial.winners} nodes created the same file, each as the only one",
            "a checkpoint could be committed twice: choose a file system that knows O_EXCL",
        )
    found = f"{where}: seen by all {len(trial.written)} node(s) within {trial.seconds_to_see:.2f} s"
    if trial.seconds_to_see > SLOW_TO_SEE_S:
        advice = "its attribute cache is long (mount option actimeo): stops and status come late"
        return Finding("shared folder", "warn", found, advice)
    return Finding("shared folder", "ok", found)


def judge_link_class(kind: str, links: LinkClass, names: Sequence[str]) -> Finding:
    """Judges links of one kind; who is SLOW times worse than usual is named."""
    rate = 1 / links.beta_s_per_byte / 1e9 if links.beta_s_per_byte else float("inf")
    found = (
        f"median α {links.alpha_s * 1e6:,.0f} µs, 1/β {rate:,.2f} GB/s; "
        f"quartiles at most {links.spread:.0%} apart"
    )
    if not links.slow:
        return Finding(kind, "ok", found)
    named = listed([f"{_pair(link.first, link.second, names)}: {how}" for link, how in links.slow])
    return Finding(
        kind, "warn", f"{found}; slow: {named}", "look at its cable, port and neighbours; or leave "
        "the node out"
    )  # fmt: skip


def _pair(first: int, second: int, names: Sequence[str]) -> str:
    return names[first] if first == second else f"{names[first]} – {names[second]}"
