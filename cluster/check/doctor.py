"""Checks machines before a job starts: asks every node the same questions and judges the answers.

    nodes answer → facts of each → clocks → ports between all → the shared folder → the self-test

Nodes are those of a Ray cluster (probe.py), or this machine as the only node. A node that is silent or
cannot do what it is asked becomes a finding and takes no further part. The self-test runs ranks under the
job's own agents.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ..job import Launch
from ..nodes.assignment import AgentReport, Assignment
from ..nodes.node_check import token_in
from .exchange import NUM_BYTES
from .findings import (
    Finding,
    judge_clocks,
    judge_folder,
    judge_gpus,
    judge_limits,
    judge_memory,
    judge_ports,
    judge_silent,
    judge_versions,
)
from .probe import NodeFault, NodeSilent, Probe

T = TypeVar("T")

RANKS_PER_NODE = 2  # of the self-test
_AT_ONCE = 64  # nodes that are asked at the same time
_CLOCK_ASKED = 8  # times; the quickest answer is the most exact
_EXCHANGE_LIMIT_S = 180.0
_POLL_S = 0.2
_FAULTS = (NodeSilent, NodeFault, OSError)
_JUDGES = (judge_versions, judge_limits, judge_memory, judge_gpus)


class _Nodes:
    """The nodes that still answer."""

    def __init__(self, nodes: Mapping[str, Any], silent: Mapping[str, str]) -> None:
        self.alive = dict(nodes)
        self.silent = dict(silent)

    @property
    def names(self) -> list[str]:
        return list(self.alive)

    def ask(self, what: Callable[[str, Any], T]) -> dict[str, T]:
        """Asks all nodes concurrently; a silent node takes no further part."""
        given: dict[str, T] = {}
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            answers = {name: pool.submit(what, name, node) for name, node in self.alive.items()}
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
) -> list[Finding]:
    """Checks nodes and returns the findings.

    Args:
        nodes: a `Probe` or `RemoteProbe` per node, by the address at which the others reach it.
        run_dir: the folder of runs.
        limit_s: for a node to answer.
        silent: nodes that never began to answer, and why.
        tell: called with the name of each check.
    """
    group, findings = _Nodes(nodes, silent or {}), list[Finding]()
    tell("facts of each node")
    if facts := group.ask(lambda _, node: node.facts()):
        findings += [judge([*facts.values()]) for judge in _JUDGES]
        tell("clocks")
        if offsets := group.ask(lambda _, node: _offset(node)):
            findings.append(judge_clocks(offsets))
        tell("ports between all nodes")
        findings.append(judge_ports(_try_ports(group)))
        tell("the shared folder")
        findings += _try_folder(group, run_dir)
        tell("self-test: ranks on all nodes")
        names = group.names
        who = f"{len(names) * RANKS_PER_NODE} ranks on {len(names)} node(s)"
        findings.append(_self_test("all-to-all", who, group.alive, RANKS_PER_NODE))
    num_nodes = len(nodes) + len(silent or {})
    return [judge_silent(group.silent, num_nodes, limit_s), *findings]


def _offset(node: Any) -> float:
    """Returns how far a node's clock is ahead, in seconds; the quickest answer is the most exact."""
    rounds = []
    for _ in range(_CLOCK_ASKED):
        asked = time.time()
        theirs = node.clock()
        took = time.time() - asked
        rounds.append((took, theirs - asked - took / 2))
    return min(rounds)[1]


def _try_ports(group: _Nodes) -> dict[str, list[str]]:
    """Connects every node to every other; returns which ones each does not reach."""
    ports = group.ask(lambda _, node: node.listen())

    def unreached(name: str, node: Any) -> list[str]:
        others = [address for address in ports.items() if address[0] != name]
        return [others[place][0] for place in node.unreachable(others)]

    return group.ask(unreached)


def _try_folder(group: _Nodes, run_dir: str) -> list[Finding]:
    """Writes a file into the folder from here and lets every node read it, as a job does."""
    folder = Path(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with token_in(folder, gpus=0) as wanted:
            return judge_folder(group.ask(lambda _, node: node.try_folder(wanted)), run_dir)
    except OSError as error:
        found = f"{run_dir} cannot be written here ({error.strerror})"
        return [Finding("shared folder", "fail", found, "choose another --run-dir")]


# The self-test ------------------------------------------------------------------------------------


def _self_test(
    check: str, who: str, nodes: Mapping[str, Any], ranks_per_node: int, *, backend: str = "gloo"
) -> Finding:
    """Runs ranks on all nodes, which exchange numbers and verify them."""
    try:
        measured = _run_exchange(nodes, ranks_per_node, backend)
    except _FAULTS as error:
        advice = "see the findings above, and run it again with NCCL_DEBUG=INFO on GPUs"
        return Finding(check, "fail", str(error), advice)
    if not measured["sound"]:
        advice = (
            "memory, a cable or a card is faulty: check half of the nodes, `nvidia-smi topo -m`"
        )
        return Finding(check, "fail", f"{who} received wrong numbers", advice)
    took = f"{NUM_BYTES >> 20} MiB in {measured['seconds'] * 1e6:,.0f} µs"
    return Finding(check, "ok", f"{who}: {took}, all numbers correct")


def _run_exchange(nodes: Mapping[str, Any], ranks_per_node: int, backend: str) -> dict[str, Any]:
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
        _Nodes(nodes, {}).ask(lambda _, probe: probe.end_exchange())


def _await_exchange(nodes: Mapping[str, Any]) -> None:
    deadline = time.monotonic() + _EXCHANGE_LIMIT_S
    while True:
        reports = {name: probe.poll() for name, probe in nodes.items()}
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


def look_at_gpus() -> Iterator[Finding]:
    """Checks the kernels and NCCL on the GPUs that this process sees, and yields each finding.

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
    for dtype in TOLERANCE:
        check = check_kernels(device, dtype)
        verdict = "ok" if check.is_ok else "fail"
        yield Finding(check.name, verdict, check.found, check.advice)
    here, world = "127.0.0.1", torch.cuda.device_count()
    nodes = {here: Probe(here)}
    yield _self_test("NCCL", f"{world} GPU(s)", nodes, world, backend="nccl")
