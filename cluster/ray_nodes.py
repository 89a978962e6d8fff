"""A job's nodes as Ray has them: one bundle per node, spread strictly, an agent actor in each.

Bundles and actors are detached: they live on when the supervisor dies, and the ranks train on. Their
names begin with the job's, so that the next supervisor finds them. Each call carries the number of
the supervisor that makes it (recovery/term.py), and a node refuses one that has a successor. Should
no supervisor come any more, because somebody has ended it for good, the nodes end themselves.

Cost: one process of about 80 MB per node; one remote call per node every 0.2 s (about 1 ms each).
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray._private.state import state as cluster_state
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..train.in_place.orders import RoundOrder
from .agent import AgentReport, Attempt, Node
from .generations import POLL_S
from .job import Launch
from .nodes import Capacity, NodeHandle, NodeLost, NodesUnavailable
from .prepare import IN_FLIGHT_PER_CPU
from .ray_session import NAMESPACE, nodes_of
from .recovery.control_store import listens
from .recovery.doors import Door
from .recovery.life import beat
from .recovery.node_check import NodeCheck
from .recovery.term import ReplacedError
from .watching.evidence import Evidence
from .watching.heartbeats import RankState

# of a call to a node: it answers within milliseconds, or within seconds when processes resist
CALL_TIMEOUT_S = 30.0
BEAT_EVERY_S = 5.0  # while an answer is waited for
_NODE_ID = "ray.io/node-id"  # the label that Ray gives to each node
ADOPT_TIMEOUT_S = 5.0  # of a predecessor's node, for its first answer
ORPHANED_LOOK_S = 30.0  # between two looks of a node for its supervisor


def actor_name(run_dir: str) -> str:
    """Returns the name of the job's supervisor and placement group: one per folder and cluster."""
    return f"supervisor-{_key(run_dir)}"


def _key(run_dir: str) -> str:
    return hashlib.sha256(run_dir.encode()).hexdigest()[:16]


class NodeAgent(Node):
    """Runs one node's agents, as an actor in the node's bundle."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(ray.util.get_node_ip_address(), launch)
        self._term = 0
        context = ray.get_runtime_context()
        self._me, self._node_id = context.current_actor, context.get_node_id()
        self._door = _door_of(self._node_id)
        threading.Thread(target=self._end_without_supervisor, args=(launch,), daemon=True).start()

    def serve(self, term: int, method: str, *arguments: Any) -> Any:
        """Calls a method of this node for the supervisor of this number.

        Raises:
            ReplacedError: a later one has called.
        """
        if term < self._term:
            raise ReplacedError(f"supervisor {term} was replaced by {self._term}")
        self._term = term
        return getattr(self, method)(*arguments)

    def describe(self) -> dict[str, Any]:
        """Returns what every node tells, its name in the cluster, and where others can knock."""
        return super().describe() | {"node_id": self._node_id, "door": self._door}

    def _end_without_supervisor(self, launch: Launch) -> None:
        """Gives the node back once Ray knows of no supervisor that could come back."""
        name = actor_name(launch.run_dir)
        while True:
            time.sleep(min(ORPHANED_LOOK_S, launch.supervisor_timeout_s))
            try:
                ray.get_actor(name, namespace=NAMESPACE)
            except ValueError:
                break
            except RayError:
                continue  # the control store does not answer
        self.end()
        _remove_group(name)
        ray.kill(self._me)


@dataclass(frozen=True)
class _Bundle:
    """What a job takes of each of its nodes."""

    cpus: int
    gpus: int

    @classmethod
    def of(cls, launch: Launch) -> "_Bundle":
        return cls(launch.ranks_per_node, launch.gpus_per_node or 0)

    def resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def fits(self, node: Mapping[str, Any]) -> bool:
        return node["Alive"] and self.fits_in(node["Resources"])

    def fits_in(self, resources: Mapping[str, float]) -> bool:
        return resources.get("CPU", 0) >= self.cpus and resources.get("GPU", 0) >= self.gpus

    def __str__(self) -> str:
        return f"{self.cpus} CPUs" + (f" and {self.gpus} GPUs" if self.gpus else "")


class RayNodeProvider:
    """Provides a job's nodes: one Ray bundle per node, spread strictly, a node agent in each."""

    def __init__(self, launch: Launch, term: int):
        self._launch = launch
        self._term = term
        self._started = 0  # agents, for their names
        self._bundle = _Bundle.of(launch)
        self._control_store = ray.get_runtime_context().gcs_address
        self._capacity = Capacity(0, 0)
        self._group: PlacementGroup | None = None
        self._nodes: list[RemoteNode | None] = []
        self._excluded: set[str] = set()  # nodes with processes that cannot be killed

    def capacity(self) -> Capacity:
        """Returns how many nodes are large enough, and how many of them we have or could have.

        While the cluster's control store does not answer that is what it said last: to ask it would
        be to wait for it.
        """
        if listens(self._control_store):
            self._capacity = self._ask_capacity()
        return self._capacity

    def _ask_capacity(self) -> Capacity:
        alive = [node for node in ray.nodes() if node["Alive"]]
        leaving = _leaving()
        fitting = {node["NodeID"] for node in alive if self._bundle.fits(node)}
        fitting -= leaving | self._excluded
        free = {
            node_id
            for node_id, resources in available_resources_per_node().items()
            if self._bundle.fits_in(resources)
        }
        ours = {node.node_id for node in self._nodes if node is not None}
        return Capacity(
            leaving=tuple(
                node["NodeManagerAddress"] for node in alive if node["NodeID"] in ours & leaving
            ),
            could=len(fitting),
            free=len(fitting & (free | ours | nodes_of(self._group))),
            what=str(self._bundle),
            have=", ".join(_spell_node(node) for node in alive),
        )

    def provide_nodes(
        self, num_nodes: int, while_waiting: Callable[[str], None]
    ) -> Sequence[NodeHandle]:
        """Returns an agent per bundle; reserves the bundles first, and replaces what was lost."""
        unwanted = _leaving() | self._excluded
        if len(self._nodes) != num_nodes or any(
            node is not None and node.node_id in unwanted for node in self._nodes
        ):
            self._give_back()
        if self._group is None:
            while_waiting(f"waiting for {num_nodes} node(s) with {self._bundle} each")
            self._nodes = [None] * num_nodes
            self._group = self._reserve(num_nodes, while_waiting)
        for number, node in enumerate(self._nodes):
            if node is None or not node.is_alive():
                if node is not None:
                    node.forget()
                self._nodes[number] = None
                self._nodes[number] = self._start_agent(self._group, number, while_waiting)
        nodes = [node for node in self._nodes if node is not None]
        check_versions([node.describe() for node in nodes])
        return nodes

    def adopt_nodes(self) -> Sequence[NodeHandle]:
        """Returns the living nodes of an earlier supervisor of this job; they stay reserved."""
        try:
            group = ray.util.get_placement_group(actor_name(self._launch.run_dir))
        except ValueError:
            return ()
        run_dir = Path(self._launch.run_dir)
        agents = self._agents()
        found = [(number, RemoteNode(actor, self._term, run_dir)) for number, actor in agents]
        nodes: list[RemoteNode | None] = [None] * group.bundle_count
        for number, node in found:
            if node.is_up(timeout_s=ADOPT_TIMEOUT_S) and nodes[number] is None:
                nodes[number] = node
            else:
                node.end()
        living = [node for node in nodes if node is not None]
        if living:
            self._group, self._nodes = group, nodes
        return living

    def where_to_prepare(self) -> list[str]:
        """Returns the preparer's arguments: tasks on the CPUs that the bundles leave.

        Raises:
            NodesUnavailable: they leave none.
        """
        cpus = sum(node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"])
        left = int(cpus) - len(self._nodes) * self._bundle.cpus
        if left < 1:
            raise NodesUnavailable(
                f"the ranks reserve all {cpus:g} CPUs of the cluster, and preparing data beside "
                "them (train.start_when) needs one more: add a node, lower job.ranks_per_node, or "
                "leave out train.start_when"
            )
        address = ray.get_runtime_context().gcs_address
        return ["--address", address, "--capacity", str(IN_FLIGHT_PER_CPU * left)]

    def exclude(self, node: NodeHandle, why: str) -> None:
        """Reserves no bundle on a node any more; a supervisor that is started anew asks again."""
        assert isinstance(node, RemoteNode), "the nodes of this provider are remote"
        self._excluded.add(node.node_id)

    def release(self) -> None:
        """Ends the agents and gives the bundles back."""
        self._give_back()

    def _give_back(self) -> None:
        for node in self._nodes:
            if node is not None:
                node.end()
        self._nodes = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _sweep_predecessor(self) -> None:
        """Ends what an earlier supervisor has left, of this submission or of one before."""
        for _, actor in self._agents():
            ray.kill(actor)
        _remove_group(actor_name(self._launch.run_dir))

    def _agents(self) -> list[tuple[int, Any]]:
        """Returns the job's agent actors that Ray knows of, with the numbers of their bundles."""
        prefix = f"node-{_key(self._launch.run_dir)}-"
        named: Any = ray.util.list_named_actors(all_namespaces=True)
        found = []
        for actor in named:
            if actor["namespace"] == NAMESPACE and actor["name"].startswith(prefix):
                with contextlib.suppress(ValueError):  # it has just ended
                    handle = ray.get_actor(actor["name"], namespace=NAMESPACE)
                    found.append((int(actor["name"].split("-")[2]), handle))
        return found

    def _reserve(self, num_nodes: int, while_waiting: Callable[[str], None]) -> PlacementGroup:
        """Reserves the bundles; waits as long as other jobs hold what is needed."""
        self._sweep_predecessor()
        elsewhere = {_NODE_ID: f"!in({','.join(sorted(self._excluded))})"}
        # Ray refuses an empty list
        where: Any = [elsewhere] * num_nodes if self._excluded else None
        group = placement_group(
            [self._bundle.resources()] * num_nodes,
            bundle_label_selector=where,
            strategy="STRICT_SPREAD",
            name=actor_name(self._launch.run_dir),
            lifetime="detached",
        )
        self._group = (
            group  # so that release() gives it back when the waiting ends with an exception
        )
        started = time.monotonic()
        while not group.wait(timeout_seconds=POLL_S):
            busy = time.monotonic() - started > self._launch.place_timeout_s
            while_waiting(
                "the nodes that fit are busy with other work; waiting for them" if busy else ""
            )
        return group

    def _start_agent(
        self, group: PlacementGroup, number: int, while_waiting: Callable[[str], None]
    ) -> "RemoteNode":
        """Starts the agent actor of a bundle; after a node was lost its bundle points to the dead
        node for a while.
        """
        while True:
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            self._started += 1
            key = _key(self._launch.run_dir)
            options: dict[str, Any] = {
                "name": f"node-{key}-{number}-{self._term}.{self._started}",
                "namespace": NAMESPACE,
                "lifetime": "detached",
                "num_cpus": self._bundle.cpus,
                "num_gpus": self._bundle.gpus,
                "max_concurrency": 4,
            }
            node = RemoteNode(
                ray.remote(NodeAgent)
                .options(**options, scheduling_strategy=strategy)
                .remote(self._launch),
                self._term,
                Path(self._launch.run_dir),
            )
            try:
                while not node.is_up(timeout_s=POLL_S):
                    while_waiting("")
                    if node.is_dead:
                        break
                else:
                    return node
            except BaseException:
                node.end()  # nobody waits for it any more
                raise
            while_waiting(f"the agent of node {number} could not be started; trying again")
            time.sleep(POLL_S)


class RemoteNode:
    """Stands for a node agent; every failure of actor, node or network is NodeLost."""

    def __init__(self, actor: Any, term: int, run_dir: Path):
        self._actor = actor
        self._term = term
        self._run_dir = run_dir
        self._address = ""
        self._ready = actor.serve.remote(term, "describe")
        self.is_dead = False
        self.node_id = ""  # in the cluster, once it is up

    def is_up(self, *, timeout_s: float) -> bool:
        """Returns whether the actor has started; waits at most `timeout_s`."""
        try:
            told: Any = ray.get(self._ready, timeout=timeout_s)
            self.node_id, self._address = told["node_id"], told["address"]
        except GetTimeoutError:
            return False
        except RayError:
            self.is_dead = True
            return False
        return True

    def is_alive(self) -> bool:
        """Returns whether the actor answers."""
        try:
            self.describe()
        except NodeLost:
            return False
        return True

    def describe(self) -> dict[str, Any]:
        """Calls `Node.describe` there."""
        return self._call("describe")

    def check(self, wanted: NodeCheck) -> str:
        """Calls `Node.check` there."""
        return self._call("check", wanted)

    def unkillable(self, run_dir: str) -> str:
        """Calls `Node.unkillable` there."""
        return self._call("unkillable", run_dir)

    def free_port(self) -> int:
        """Calls `Node.free_port` there."""
        return self._call("free_port")

    def start(self, attempt: Attempt) -> None:
        """Calls `Node.start` there."""
        self._call("start", attempt)

    def poll(self) -> AgentReport | None:
        """Calls `Node.poll` there."""
        return self._call("poll")

    def heartbeats(self) -> list[RankState]:
        """Calls `Node.heartbeats` there."""
        return self._call("heartbeats")

    def gather_evidence(self) -> list[Evidence]:
        """Calls `Node.gather_evidence` there."""
        return self._call("gather_evidence")

    def unreached(self, doors: Sequence[Door]) -> list[int]:
        """Calls `Node.unreached` there."""
        return self._call("unreached", doors)

    def order_round(self, order: RoundOrder) -> None:
        """Calls `Node.order_round` there."""
        self._call("order_round", order)

    def running_ranks(self) -> list[int]:
        """Calls `Node.running_ranks` there."""
        return self._call("running_ranks")

    def kill_rank(self, rank: int) -> bool:
        """Calls `Node.kill_rank` there."""
        return self._call("kill_rank", rank)

    def stop(self) -> None:
        """Calls `Node.stop` there."""
        self._call("stop")

    def end(self) -> None:
        """Ends the ranks, the template and the actor."""
        if self.node_id:  # else the actor waits for its place, and would not answer
            with contextlib.suppress(NodeLost):  # then nothing is left to end
                self._call("end")
        self.forget()

    def forget(self) -> None:
        """Lets Ray end the actor, now or when the network to it is back: its place is another's."""
        ray.kill(self._actor)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return self._await(self._actor.serve.remote(self._term, method, *arguments))
        except RayTaskError as error:
            if isinstance(error.cause, ReplacedError):
                raise ReplacedError(str(error.cause)) from None
            raise NodeLost(f"its agent failed in {method}: {error.cause!r}") from error
        except GetTimeoutError as error:
            raise NodeLost(
                f"its agent at {self._address} did not answer {method} within "
                f"{CALL_TIMEOUT_S:.0f} s"
            ) from error
        except RayError as error:
            at = f" at {self._address}" if self._address else ""
            raise NodeLost(f"its agent actor died{at} ({_first_line(error)})") from error

    def _await(self, answer: Any) -> Any:
        """Waits for an answer, and shows meanwhile that the supervisor lives: where the network to
        a node is cut, Ray says so after a minute only.
        """
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while True:
            left_s = deadline - time.monotonic()
            try:
                return ray.get(answer, timeout=max(0.0, min(BEAT_EVERY_S, left_s)))
            except GetTimeoutError:
                if left_s <= BEAT_EVERY_S:
                    raise
                beat(self._run_dir)


def _remove_group(name: str) -> None:
    with contextlib.suppress(ValueError):  # there is none
        remove_placement_group(ray.util.get_placement_group(name))


def _door_of(node_id: str) -> Door:
    """Returns where a node's raylet listens for the others."""
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def _leaving() -> set[str]:
    """Returns the nodes that Ray was told to drain: they will be preempted, or are idle."""
    return set(cluster_state.get_draining_nodes())


def check_versions(nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raises NodesUnavailable when the nodes do not all run the same moebius, torch and Python."""
    first = nodes[0]
    for node in nodes[1:]:
        differing = [
            key for key, value in first["versions"].items() if node["versions"].get(key) != value
        ]
        if differing:
            said = "; ".join(_spell_versions(key, first, node) for key in differing)
            raise NodesUnavailable(
                f"the nodes do not run the same software ({said}): install the same versions on "
                "every node"
            )


def _spell_versions(key: str, *nodes: Mapping[str, Any]) -> str:
    return f"{key}: " + ", ".join(
        f"{node['versions'].get(key)} on {node['host']}" for node in nodes
    )


def _spell_node(node: Mapping[str, Any]) -> str:
    has = node["Resources"]
    return f"{node['NodeManagerAddress']} ({has.get('CPU', 0):g} CPUs, {has.get('GPU', 0):g} GPUs)"


def _first_line(error: Exception) -> str:
    """What Ray says, without what its libraries say: that is half a page."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.partition("; last error")[0]
