"""Checks machines before a job starts: asks every node the same questions and judges the answers.

    nodes answer → facts of each → network and shared folder → the self-test

Nodes are those of a Ray cluster (probe.py), or this machine as the only node. A node that is silent or
cannot do what it is asked becomes a finding and takes no further part.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ..nodes.node_check import token_in
from .exchange import NUM_BYTES, Exchange
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
_FAULTS = (NodeFault, OSError, RuntimeError)  # torch and broken process pools raise the last
_JUDGES = (judge_versions, judge_memory, judge_gpus)


class _Nodes:
    """The nodes that still answer."""

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        self.alive = dict(nodes)
        self.silent: dict[str, str] = {}

    def ask(self, what: Callable[[str, Any], T]) -> dict[str, T]:
        """Asks all nodes concurrently; a silent node takes no further part."""
        given: dict[str, T] = {}
        with ThreadPoolExecutor(max(1, len(self.alive))) as pool:  # ranks wait for all others
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
        if group.alive:
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
    group, numbers = _Nodes(nodes), {name: number for number, name in enumerate(nodes)}
    ports = group.ask(lambda _, node: node.free_port())
    found: dict[str, tuple[bool, float]] = {}
    if not group.silent:
        meets_at = next(iter(ports.items()))
        exchange = Exchange(ranks_per_node, len(nodes) * ranks_per_node, meets_at, backend)
        found = group.ask(lambda name, node: node.run_ranks(exchange, numbers[name]))
    if group.silent:
        why = "; ".join(f"the ranks on {name} failed: {why}" for name, why in group.silent.items())
        advice = "see the findings above, and run it again with NCCL_DEBUG=INFO on GPUs"
        return Finding(check, "fail", why, advice)
    if not all(sound for sound, _ in found.values()):
        advice = (
            "memory, a cable or a card is faulty: check half of the nodes, `nvidia-smi topo -m`"
        )
        return Finding(check, "fail", f"{who} received wrong numbers", advice)
    speed = NUM_BYTES / max(seconds for _, seconds in found.values()) / 1e9
    return Finding(check, "ok", f"{who}: {speed:.2f} GB/s per rank, all numbers correct")


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
