"""Checks machines before a job starts: asks every node the same questions and judges the answers.

    nodes answer → facts of each → clocks → ports between all → the shared folder → the self-test

Nodes are those of a Ray cluster (ray_probes.py), or this machine as the only node. A node that is silent or
cannot do what it is asked becomes a finding and takes no further part. The self-test runs ranks under the
job's own agents.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..job import Launch
from ..nodes.assignment import AgentReport, Assignment
from .facts import NodeFacts
from .findings import (
    Finding,
    FolderTrial,
    Offset,
    Reached,
    Written,
    judge_clocks,
    judge_folder,
    judge_gpus,
    judge_interfaces,
    judge_limits,
    judge_memory,
    judge_ports,
    judge_silent,
    judge_versions,
)
from .probe import PREFIX, NodeFault, NodeSilent, Probe, Seen

T = TypeVar("T")

CONNECT_LIMIT_S = 5.0
RANKS_PER_NODE = 2  # of the self-test
_AT_ONCE = 64  # nodes that are asked at the same time
_CLOCK_ASKED = 8  # times; the quickest answer is the most exact
_EXCHANGE_LIMIT_S = 180.0
_POLL_S = 0.2
_SEEN_LIMIT_S = 5.0  # how late a network file system may show a new file
_FAULTS = (NodeSilent, NodeFault, OSError)


@dataclass
class Examination:
    """Collects the findings and measurements of a check."""

    findings: list[Finding] = field(default_factory=list)
    links: dict[str, Any] | None = None  # the file for `moebius plan --measured`


class _Nodes:
    """The nodes that still answer."""

    def __init__(self, nodes: Mapping[str, Any], silent: Mapping[str, str]) -> None:
        self.alive = dict(nodes)
        self.silent = dict(silent)

    @property
    def names(self) -> list[str]:
        return list(self.alive)

    def ask(
        self, what: Callable[[str, Any], T], *, of: Sequence[str] | None = None
    ) -> dict[str, T]:
        """Asks nodes (default: all) concurrently; a silent node takes no further part."""
        asked = [name for name in (self.names if of is None else of) if name in self.alive]
        given: dict[str, T] = {}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = {name: pool.submit(what, name, self.alive[name]) for name in asked}
            for name, answer in answers.items():
                try:
                    given[name] = answer.result()
                except _FAULTS as error:
                    self.silent[name] = str(error)
                    del self.alive[name]
        return given


def examine(
    nodes: Mapping[str, Any],
    run_dir: str,
    *,
    limit_s: float,
    silent: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda doing: None,
) -> Examination:
    """Checks nodes and returns the findings.

    Args:
        nodes: a `Probe` or `RemoteProbe` per node, by the address at which the others reach it.
        run_dir: the folder of runs.
        limit_s: for a node to answer.
        silent: nodes that never began to answer, and why.
        tell: called with the name of each check.
    """
    group, done = _Nodes(nodes, silent or {}), Examination()
    tell("facts of each node")
    if facts := group.ask(lambda _, node: node.facts()):
        done.findings += _judge_facts([*facts.values()])
        tell("clocks")
        if offsets := group.ask(lambda _, node: _offset(node)):
            done.findings.append(judge_clocks(offsets))
        tell("ports between all nodes")
        done.findings.append(judge_ports(_try_ports(group)))
        tell("the shared folder")
        done.findings += judge_folder(_try_folder(group, run_dir), run_dir)
        tell("self-test: ranks on all nodes")
        _self_test(done, group)
    num_nodes = len(nodes) + len(silent or {})
    done.findings.insert(0, judge_silent(group.silent, num_nodes, limit_s))
    return done


def _judge_facts(facts: list[NodeFacts]) -> list[Finding]:
    judges = (judge_versions, judge_limits, judge_memory, judge_gpus, judge_interfaces)
    return [judge(facts) for judge in judges]


def _offset(node: Any) -> Offset:
    """Reads a node's clock by Cristian's method: half the shortest round trip bounds the error."""
    best = Offset(0.0, float("inf"))
    for _ in range(_CLOCK_ASKED):
        asked = time.time(), time.monotonic()
        theirs = node.clock()
        half_s = (time.monotonic() - asked[1]) / 2
        if half_s < best.error_s:
            best = Offset(theirs - (asked[0] + half_s), half_s)
    return best


def _try_ports(group: _Nodes) -> dict[tuple[str, str], Reached]:
    """Connects every node to every other, one listener after the other."""
    reached = {}
    for there, port in group.ask(lambda _, node: node.listen()).items():
        others = [name for name in group.names if name != there]
        answers = group.ask(
            lambda _, node, at=there, port=port: node.connect(at, port, CONNECT_LIMIT_S), of=others
        )
        reached |= {(here, there): answer for here, answer in answers.items()}
    return reached


# The shared folder --------------------------------------------------------------------------------


def _try_folder(group: _Nodes, where: str) -> FolderTrial:
    token = secrets.token_hex(8)
    path = f"{where}/{PREFIX}{token}"
    first, others = group.names[0], group.names[1:]
    written, faults = _write(group, path)
    unseen: dict[str, str] = {}
    gaps: dict[str, str] = {}
    seconds, winners = [0.0], 1
    if not faults and others:
        seen = _await(group, others, f"{path}-{first}", first, None)
        unseen = {node: each.why for node, each in seen.items() if each.seconds is None}
        seconds += [each.seconds for each in seen.values() if each.seconds is not None]
    if not faults and others and not unseen:
        winners = sum(group.ask(lambda _, node: node.claim(f"{path}-claimed")).values())
        gaps = _try_rename(group, f"{path}-{first}", first)
    group.ask(lambda _, node: _quietly(lambda: node.clean(where, token)))
    return FolderTrial(written, faults, unseen, max(seconds), gaps, winners)


def _write(group: _Nodes, path: str) -> tuple[dict[str, Written], dict[str, str]]:
    """Writes a file named after each node into the folder."""
    faults: dict[str, str] = {}

    def write(name: str, node: Any) -> Written | None:
        try:
            return node.publish(f"{path}-{name}", name)
        except (NodeFault, OSError) as error:
            faults[name] = str(error)
        return None

    answers = group.ask(write)
    return {name: each for name, each in answers.items() if each is not None}, faults


def _await(
    group: _Nodes, readers: Sequence[str], path: str, text: str, before: str | None
) -> dict[str, Seen]:
    return group.ask(lambda _, node: node.await_text(path, text, _SEEN_LIMIT_S, before), of=readers)


def _try_rename(group: _Nodes, path: str, first: str) -> dict[str, str]:
    """Replaces the first node's file while the others read it; returns what they saw in between."""
    others, text = [name for name in group.names if name != first], secrets.token_hex(2048)
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(_await, group, others, path, text, first)
        time.sleep(_POLL_S)  # a reader that starts late only sees less
        _quietly(lambda: group.alive[first].publish(path, text))
        seen = looking.result()
    return {node: each.gap for node, each in seen.items() if each.gap}


def _quietly(act: Callable[[], object]) -> None:
    """Ignores a failure that was reported before, or that leaves only an empty file."""
    try:
        act()
    except (NodeFault, OSError):
        return


# The self-test ------------------------------------------------------------------------------------


def _self_test(done: Examination, group: _Nodes) -> None:
    """Runs ranks on all nodes and reports what they measure."""
    names = group.names
    try:
        measured = run_exchange(group.alive, RANKS_PER_NODE)
    except _FAULTS as error:
        advice = "see the findings above; `moebius submit` would fail the same way"
        done.findings.append(Finding("self-test", "fail", str(error), advice))
        return
    ranks = f"{len(names) * RANKS_PER_NODE} ranks on {len(names)} node(s)"
    if not measured["sound"]:
        advice = "memory, a cable or a network card is faulty: check half of the nodes"
        found = f"{ranks} received wrong numbers"
        done.findings.append(Finding("self-test", "fail", found, advice))
        return
    rows = measured["rows"]
    done.links = {"rows": rows, "ranks_per_node": RANKS_PER_NODE, "nodes": names}
    done.findings.append(Finding("all-to-all", "ok", f"{ranks}: {_largest(rows)}"))


def _largest(rows: Sequence[Mapping[str, Any]]) -> str:
    """Says how long the largest exchange of the widest group took, which is measured last."""
    microseconds = f"{rows[-1]['seconds'] * 1e6:,.0f} µs"
    return f"{rows[-1]['bytes'] / 2**20:.0f} MiB in {microseconds}, all numbers correct"


def run_exchange(
    nodes: Mapping[str, Any], ranks_per_node: int, *, backend: str = "gloo"
) -> dict[str, Any]:
    """Runs the self-test's ranks on all nodes; returns what rank 0 measured (exchange.py).

    Raises:
        NodeFault: ranks failed or were too slow; with the first cause.
        NodeSilent: a node no longer answers.
    """
    names, probes = list(nodes), list(nodes.values())
    launch = Launch(
        run_dir=f"/tmp/moebius-doctor-{secrets.token_hex(8)}",
        num_nodes=len(probes),
        ranks_per_node=ranks_per_node,
        name="doctor",
        warm_start=False,
    )
    port, secret = probes[0].free_port(), secrets.token_hex(32)
    try:
        for number, (name, probe) in enumerate(nodes.items()):
            assignment = Assignment(launch, 1, number, names[0], port, name, secret=secret)
            probe.start_exchange(assignment, backend)
        _await_exchange(nodes)
        return json.loads(probes[0].exchange_result())
    finally:
        _Nodes(nodes, {}).ask(lambda _, probe: _quietly(probe.end_exchange))


def _await_exchange(nodes: Mapping[str, Any]) -> None:
    deadline = time.monotonic() + _EXCHANGE_LIMIT_S
    while True:
        reports = {name: probe.exchange_report() for name, probe in nodes.items()}
        for name, report in reports.items():
            if report is not None and not report.ok:
                raise NodeFault(f"the ranks on {name} failed: {_why(report)}")
        if None not in reports.values():
            return
        if time.monotonic() > deadline:
            late = [name for name, report in reports.items() if report is None]
            raise NodeFault(f"not finished after {_EXCHANGE_LIMIT_S:.0f} s on {', '.join(late)}")
        time.sleep(_POLL_S)


def _why(report: AgentReport) -> str:
    failure = next(iter(report.failures), None)
    if failure is None:
        return report.message or "no error message"
    return f"rank {failure.rank}: {failure.error or f'exit code {failure.exit_code}'}"


# GPUs ---------------------------------------------------------------------------------------------


def look_at_gpus() -> list[Finding]:
    """Checks the kernels and NCCL on the GPUs that this process sees.

    Raises:
        ValueError: it sees none.
    """
    import torch

    from ...train.gpu_check import TOLERANCE, check_kernels

    if not torch.cuda.is_available():
        raise ValueError(
            f"--gpu: torch sees no GPU here (torch {torch.__version__}, built for CUDA "
            f"{torch.version.cuda}): install a CUDA build of torch, or check nvidia-smi; without "
            "--gpu, `moebius doctor` checks the rest"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    checks = [check_kernels(device, dtype) for dtype in TOLERANCE]
    findings = [
        Finding(check.name, "ok" if check.is_ok else "fail", check.found, check.advice)
        for check in checks
    ]
    return [*findings, _look_at_nccl(torch.cuda.device_count())]


def _look_at_nccl(world: int) -> Finding:
    """Exchanges numbers between all GPUs of this machine over NCCL."""
    here = "127.0.0.1"
    try:
        measured = run_exchange({here: Probe(here)}, world, backend="nccl")
    except NodeFault as error:
        return Finding("NCCL", "fail", str(error), "run it again with NCCL_DEBUG=INFO")
    if not measured["sound"]:
        found = f"{world} GPUs received wrong numbers"
        return Finding("NCCL", "fail", found, "check `nvidia-smi topo -m`")
    if not measured["rows"]:
        return Finding("NCCL", "ok", "only one GPU")
    return Finding("NCCL", "ok", f"all-to-all of {world} GPUs: {_largest(measured['rows'])}")
