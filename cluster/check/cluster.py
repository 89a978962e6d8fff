"""Checks a cluster before money is spent there: asks all nodes the same, and judges what they say.

    nodes answer → facts of each → clocks → ports between all → the shared folder → the self-test

It knows nothing of Ray: nodes are given (ray_probes.py), or pretended by tests. A node that is
silent, or cannot do what it is asked for, becomes a finding and is left out of what follows; nothing
waits for it longer than its limit. The self-test runs ranks under the job's own agents.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..job import Launch
from ..nodes.assignment import Assignment
from .facts import NodeFacts
from .findings import Finding
from .folder import PREFIX
from .judgements import (
    FolderTrial,
    Offset,
    judge_all_gpus,
    judge_clocks,
    judge_equal_versions,
    judge_folder,
    judge_interfaces,
    judge_limits,
    judge_link_class,
    judge_machines,
    judge_memory,
    judge_ports,
    judge_py_spy,
    judge_silent,
)
from .pairs import Fit, Link, Times, summarise
from .probe import NodeFault, NodeProbe, NodeSilent, Reached

T = TypeVar("T")

_AT_ONCE = 64  # nodes that are asked at the same time
_CLOCK_ASKED = 8  # times; the quickest answer tells most
_EXCHANGE_LIMIT_S = 180.0
_POLL_S = 0.2
_SEEN_LIMIT_S = 5.0  # how late a network file system may show a new file


@dataclass(frozen=True)
class Settings:
    """Says what is to be checked."""

    run_dir: str  # where runs are to go
    ranks_per_node: int = 2  # of the self-test
    limit_s: float = 30.0  # for a node to answer
    connect_limit_s: float = 5.0


@dataclass
class Examination:
    """Collects what is found out about a cluster."""

    findings: list[Finding] = field(default_factory=list)
    links: dict[str, Any] | None = None  # what the planner reads, and more


class _Nodes:
    """The nodes that still answer."""

    def __init__(self, nodes: Mapping[str, NodeProbe], silent: Mapping[str, str]) -> None:
        self.alive = dict(nodes)
        self.silent = dict(silent)

    @property
    def names(self) -> list[str]:
        return list(self.alive)

    def ask(self, what: Callable[[str, NodeProbe], T], *, of: Sequence[str] = ()) -> dict[str, T]:
        """Asks nodes (all, where none are named) at the same time; who is silent is left out."""
        asked = [name for name in of or self.names if name in self.alive]

        def one(name: str) -> T | NodeSilent | NodeFault:
            try:
                return what(name, self.alive[name])
            except (NodeSilent, NodeFault) as error:
                return error

        with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(asked)))) as pool:
            answers = dict(zip(asked, pool.map(one, asked), strict=True))
        given: dict[str, T] = {}
        for name, answer in answers.items():
            if isinstance(answer, NodeSilent | NodeFault):
                self.silent[name] = str(answer)
                del self.alive[name]
            else:
                given[name] = answer
        return given


def examine(
    nodes: Mapping[str, NodeProbe],
    settings: Settings,
    *,
    fit: Fit,
    silent: Mapping[str, str] | None = None,
    tell: Callable[[str], None] = lambda doing: None,
) -> Examination:
    """Checks the nodes of a cluster.

    Args:
        nodes: by the address at which the others reach them.
        settings: what is checked.
        fit: finds α and β of measured times.
        silent: nodes that did not even begin to answer, and why.
        tell: called with what is being done.
    """
    group, done = _Nodes(nodes, silent or {}), Examination()
    tell("facts of each node")
    facts = group.ask(lambda _, node: node.facts())
    if facts:
        _judge_facts(done, [*facts.values()])
        tell("clocks")
        if offsets := group.ask(lambda _, node: _offset(node)):
            done.findings.append(judge_clocks(offsets))
        tell("ports between all nodes")
        done.findings.append(judge_ports(_try_ports(group, settings.connect_limit_s)))
        tell("the shared folder")
        done.findings += judge_folder(_try_folder(group, settings.run_dir), settings.run_dir)
        tell("self-test: ranks on all nodes")
        _exchange(done, group, settings, fit)
    num_nodes = len(nodes) + len(silent or {})
    done.findings.insert(0, judge_silent(group.silent, num_nodes, settings.limit_s))
    return done


def _judge_facts(done: Examination, facts: list[NodeFacts]) -> None:
    judges = (
        judge_equal_versions,
        judge_machines,
        judge_limits,
        judge_memory,
        judge_all_gpus,
        judge_interfaces,
        judge_py_spy,
    )
    done.findings += [judge(facts) for judge in judges]


def _offset(node: NodeProbe) -> Offset:
    """Reads a clock as Cristian did: half of the quickest round trip is the error's bound."""
    best = Offset(0.0, float("inf"))
    for _ in range(_CLOCK_ASKED):
        asked = time.time(), time.monotonic()
        theirs = node.clock()
        half_s = (time.monotonic() - asked[1]) / 2
        if half_s < best.error_s:
            best = Offset(theirs - (asked[0] + half_s), half_s)
    return best


def _try_ports(group: _Nodes, limit_s: float) -> dict[tuple[str, str], Reached]:
    """Lets every node connect to every other, one listener after the other."""
    ports = group.ask(lambda _, node: node.listen())
    reached = {}
    for there, port in ports.items():
        others = [name for name in group.names if name != there]
        if not others:
            continue
        answers = group.ask(
            lambda _, node, at=there, port=port: node.connect(at, port, limit_s), of=others
        )
        reached |= {(here, there): answer for here, answer in answers.items()}
    return reached


# The shared folder --------------------------------------------------------------------------------


def _try_folder(group: _Nodes, where: str) -> FolderTrial:
    token = secrets.token_hex(8)
    path = f"{where}/{PREFIX}{token}"
    first, others = group.names[0], group.names[1:]
    written, faults = _write(group, path)
    unseen, gaps, seconds, winners = {}, {}, [0.0], 1
    if not faults and others:
        seen = _await(group, others, f"{path}-{first}", first, None)
        unseen = {node: each.why for node, each in seen.items() if each.seconds is None}
        seconds += [each.seconds for each in seen.values() if each.seconds is not None]
    if not faults and others and not unseen:
        winners = sum(group.ask(lambda _, node: node.claim(f"{path}-claimed")).values())
        gaps = _try_rename(group, f"{path}-{first}", first)
    group.ask(lambda _, node: _quietly(lambda: node.clean(where, token)))
    return FolderTrial(written, faults, unseen, max(seconds), gaps, winners)


def _write(group: _Nodes, path: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Lets every node write a file with its own name into the folder."""
    faults: dict[str, str] = {}

    def write(name: str, node: NodeProbe) -> Any:
        try:
            return node.publish(f"{path}-{name}", name)
        except NodeFault as error:
            faults[name] = str(error)

    answers = group.ask(write)
    return {name: each for name, each in answers.items() if each is not None}, faults


def _await(
    group: _Nodes, readers: Sequence[str], path: str, text: str, before: str | None
) -> dict[str, Any]:
    return group.ask(lambda _, node: node.await_text(path, text, _SEEN_LIMIT_S, before), of=readers)


def _try_rename(group: _Nodes, path: str, first: str) -> dict[str, str]:
    """Replaces the first node's file while all others look at it; returns what they saw between."""
    others, text = [name for name in group.names if name != first], secrets.token_hex(2048)
    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(_await, group, others, path, text, first)
        time.sleep(_POLL_S)  # who begins to look later sees less, and nothing wrong
        _quietly(lambda: group.alive[first].publish(path, text))
        seen = looking.result()
    return {node: each.gap for node, each in seen.items() if each.gap}


def _quietly(act: Callable[[], object]) -> None:
    """What fails here has been found out before, or leaves an empty file behind."""
    try:
        act()
    except NodeFault:
        return


# The self-test ------------------------------------------------------------------------------------


def _exchange(done: Examination, group: _Nodes, settings: Settings, fit: Fit) -> None:
    """Runs ranks on all nodes, and judges the links by what they measure."""
    names = group.names
    try:
        measured = _run_ranks(group, settings)
    except (NodeSilent, NodeFault) as error:
        advice = "see the findings above; `moebius submit` would fail in the same way"
        done.findings.append(Finding("self-test", "fail", str(error), advice))
        return
    finally:
        group.ask(lambda _, node: _quietly(node.end_exchange), of=names)
    world = len(names) * settings.ranks_per_node
    if not measured["sound"]:
        advice = "memory, a cable or a card is faulty: split the nodes and look again"
        found = f"{world} ranks on {len(names)} node(s) got wrong numbers"
        done.findings.append(Finding("self-test", "fail", found, advice))
        return
    done.links = links_record(measured, names, settings.ranks_per_node, fit)
    done.findings.append(_judge_all_to_all(done.links, world, len(names)))
    on_nodes, between = links_of(measured)
    if on_nodes:
        done.findings.append(judge_link_class("links on a node", summarise(on_nodes, fit), names))
    if between:
        done.findings.append(
            judge_link_class("links between nodes", summarise(between, fit), names)
        )


def _run_ranks(group: _Nodes, settings: Settings) -> dict[str, Any]:
    """Returns what rank 0 has measured.

    Raises:
        NodeFault: ranks have failed, or were not done in time; with the first cause.
        NodeSilent: a node does not answer any more.
    """
    names, nodes = group.names, list(group.alive.values())
    launch = Launch(
        run_dir=f"/tmp/moebius-doctor-{secrets.token_hex(8)}",
        num_nodes=len(nodes),
        ranks_per_node=settings.ranks_per_node,
        name="doctor",
        warm_start=False,
    )
    port, secret = nodes[0].free_port(), secrets.token_hex(32)
    attempts = [
        Assignment(launch, 1, number, names[0], port, name, secret=secret)
        for number, name in enumerate(names)
    ]
    for node, attempt in zip(nodes, attempts, strict=True):
        node.start_exchange(attempt)
    deadline = time.monotonic() + _EXCHANGE_LIMIT_S
    while True:
        reports = [node.exchange_report() for node in nodes]
        for name, report in zip(names, reports, strict=True):
            if report is not None and not report.ok:
                raise NodeFault(f"the ranks on {name} failed: {_why(report)}")
        if None not in reports:
            return json.loads(nodes[0].exchange_result())
        if time.monotonic() > deadline:
            late = [name for name, report in zip(names, reports, strict=True) if report is None]
            raise NodeFault(f"no end after {_EXCHANGE_LIMIT_S:.0f} s on {', '.join(late)}")
        time.sleep(_POLL_S)


def _why(report: Any) -> str:
    failure = next(iter(report.failures), None)
    if failure is None:
        return report.message or "without a word"
    return f"rank {failure.rank}: {failure.error or f'exit code {failure.exit_code}'}"


def links_of(measured: Mapping[str, Any]) -> tuple[list[Link], list[Link]]:
    """Returns the links that were measured: on nodes, and between two nodes."""
    links = [
        Link(first, second, times)
        for first, row in enumerate(measured["pairs"])
        for second, quartiles in enumerate(row)
        if (times := _times(measured["pair_sizes"], quartiles))
    ]
    return (
        [link for link in links if link.first == link.second],
        [link for link in links if link.first != link.second],
    )


def _times(sizes: Sequence[int], quartiles: Sequence[Sequence[float]]) -> tuple[Times, ...]:
    if not any(quartiles[0]):
        return ()  # of nodes that have not measured each other in this direction
    return tuple(Times(size, *three) for size, three in zip(sizes, quartiles, strict=True))


def links_record(
    measured: Mapping[str, Any], names: Sequence[str], ranks_per_node: int, fit: Fit
) -> dict[str, Any]:
    """Returns the file that `moebius plan --measured` reads, with more for people and scripts."""
    rows = measured["rows"]
    widest = max(row["world"] for row in rows)
    fitted = fit([(row["bytes"], row["seconds"]) for row in rows if row["world"] == widest])
    record: dict[str, Any] = {
        "rows": rows,
        "ranks_per_node": ranks_per_node,
        "alpha_s": fitted.alpha_s,
        "beta_s_per_byte": fitted.beta_s_per_byte,
        "nodes": list(names),
        "classes": {},
        "pairs": [],
    }
    for kind, links in zip(("on a node", "between nodes"), links_of(measured), strict=True):
        if not links:
            continue
        usual = summarise(links, fit)
        record["classes"][kind] = {
            "alpha_s": usual.alpha_s,
            "beta_s_per_byte": usual.beta_s_per_byte,
            "spread": usual.spread,
        }
        record["pairs"] += [_pair_record(link, names, fit) for link in links]
    return record


def _pair_record(link: Link, names: Sequence[str], fit: Fit) -> dict[str, Any]:
    fitted = fit(link.points())
    return {
        "nodes": [names[link.first], names[link.second]],
        "alpha_s": fitted.alpha_s,
        "beta_s_per_byte": fitted.beta_s_per_byte,
        "times": [
            {"bytes": each.num_bytes, "quartiles_s": [each.low_s, each.median_s, each.high_s]}
            for each in link.times
        ],
    }


def _judge_all_to_all(links: Mapping[str, Any], world: int, num_nodes: int) -> Finding:
    beta = links["beta_s_per_byte"]
    rate = 1 / beta / 1e9 if beta else float("inf")
    found = (
        f"{world} ranks on {num_nodes} node(s): α {links['alpha_s'] * 1e6:,.0f} µs, "
        f"1/β {rate:,.2f} GB/s, every number right"
    )
    return Finding("all-to-all", "ok", found)
