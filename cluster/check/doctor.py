"""Checks machines before a job starts: asks every node the same questions and judges the answers.

    nodes answer → facts of each → network and shared folder → the self-test

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
    judge_folder,
    judge_gpus,
    judge_memory,
    judge_ports,
    judge_silent,
    judge_versions,
)
from .probe import NodeFacts, NodeFault, Probe, Trial

T = TypeVar("T")

RANKS_PER_NODE = 2  # of the self-test
_AT_ONCE = 64  # nodes that are asked at the same time
_EXCHANGE_LIMIT_S = 180.0
_POLL_S = 0.2
_FAULTS = (NodeFault, OSError)
_JUDGES = (judge_versions, judge_memory, judge_gpus)


class _Nodes:
    """The nodes that still answer."""

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        self.alive = dict(nodes)
        self.silent: dict[str, str] = {}

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


def examine(nodes: Mapping[str, Any], run_dir: Path) -> list[Finding]:
    """Checks nodes and returns the findings.

    Args:
        nodes: a `Probe` or `RemoteProbe` per node, by the address at which the others reach it.
        run_dir: the folder of runs.
    """
    group, findings = _Nodes(nodes), list[Finding]()
    if facts := group.ask(lambda _, node: node.facts()):
        findings += [judge([*facts.values()]) for judge in _JUDGES]
        findings += _try_network_and_folder(group, facts, run_dir)
        who = f"{len(group.alive) * RANKS_PER_NODE} ranks on {len(group.alive)} node(s)"
        findings.append(_self_test("all-to-all", who, group.alive, RANKS_PER_NODE))
    return [judge_silent(group.silent, len(nodes)), *findings]


def _try_network_and_folder(
    group: _Nodes, facts: Mapping[str, NodeFacts], folder: Path
) -> list[Finding]:
    """Lets every node connect to every other and read a file that is written here, as a job does."""

    def attempt(name: str, node: Any) -> Trial:
        others = [(other, each.port) for other, each in facts.items() if other != name]
        return node.attempt(others, wanted)

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with token_in(folder, gpus=0) as wanted:
            trials = group.ask(attempt)
    except OSError as error:
        found = f"{folder} cannot be written here ({error.strerror})"
        return [Finding("shared folder", "fail", found, "choose another --run-dir")]
    return [judge_ports(trials), *judge_folder(trials, str(folder))] if trials else []


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
    speed = NUM_BYTES / measured["seconds"] / 1e9
    return Finding(check, "ok", f"{who}: {speed:.2f} GB/s per rank, all numbers correct")


def _run_exchange(nodes: Mapping[str, Any], ranks_per_node: int, backend: str) -> dict[str, Any]:
    """Runs the self-test's ranks on all nodes; returns what rank 0 measured (exchange.py).

    Raises:
        NodeFault: ranks failed or were too slow, with the first cause; or a node no longer answers.
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
        _Nodes(nodes).ask(lambda _, probe: probe.end_exchange())


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
