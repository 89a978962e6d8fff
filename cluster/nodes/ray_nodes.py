"""Provides a job's nodes from Ray: one bundle per node, strictly spread, with an agent actor in each.

Bundles and actors are detached, so ranks continue to train when the supervisor dies. Their names begin with
the job's, by which the next supervisor finds them. Every call carries the caller's supervisor number
(job.py), and a node refuses a replaced supervisor. If no supervisor can come any more, the
nodes end themselves.

Cost: one process of about 80 MB per node; one remote call per node every 0.2 s (about 1 ms each).
"""

import contextlib
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from ray.autoscaler.v2.schema import NodeInfo
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..job import Launch, ReplacedError
from ..liveness import beat
from ..places.ray_session import NAMESPACE, nodes_of
from ..ray_tasks import tasks_for
from ..supervise.job_supervisor import POLL_S
from .node import Address, Node, can_connect
from .provider import Capacity, NodeHandle, NodeLost, NodesUnavailable

_NODE_ID = "ray.io/node-id"  # Ray's label of a node
_DRAINING = "DRAINING"  # the state of a node that will be preempted, or is idle
TOLD_AFTER_S = 10.0  # without the control store
_RAY_WAITS_S = 60  # for it: RAY_gcs_rpc_server_reconnect_timeout_s
ADOPT_TIMEOUT_S = 5.0  # for the first answer of a predecessor's node
ORPHANED_LOOK_S = 30.0  # between two checks for the supervisor
# A node answers within milliseconds, or within seconds if processes are slow to end.
CALL_TIMEOUT_S = 30.0
BEAT_EVERY_S = 5.0  # while waiting for an answer

P = ParamSpec("P")
R = TypeVar("R")


def actor_name(run_dir: str) -> str:
    """Returns the name of a job's supervisor and placement group, unique per run folder."""
    return f"supervisor-{_key(run_dir)}"


def _key(run_dir: str) -> str:
    return hashlib.sha256(run_dir.encode()).hexdigest()[:16]


class NodeAgent(Node):
    """Runs one node's agents as an actor in the node's bundle."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(ray.util.get_node_ip_address(), launch)
        self._supervisor = 0  # the number of the last caller
        context = ray.get_runtime_context()
        self._me, self._node_id = context.current_actor, context.get_node_id()
        self._listens_at = _address_of(self._node_id)
        threading.Thread(target=self._end_without_supervisor, args=(launch,), daemon=True).start()

    def serve(self, supervisor: int, method: str, *arguments: Any) -> Any:
        """Calls a method of this node for the supervisor with this number.

        Raises:
            ReplacedError: a later supervisor has called.
        """
        if supervisor < self._supervisor:
            raise ReplacedError(f"supervisor {supervisor} was replaced by {self._supervisor}")
        self._supervisor = supervisor
        return getattr(self, method)(*arguments)

    def describe(self) -> dict[str, Any]:
        """Adds the node's id in the cluster and its listening address to `Node.describe`."""
        own = {"node_id": self._node_id, "listens_at": self._listens_at}
        return super().describe() | own

    def _end_without_supervisor(self, launch: Launch) -> None:
        """Releases the node once Ray knows no supervisor that could return."""
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


def _remote(method: Callable[Concatenate[Node, P], R]) -> Callable[Concatenate["RemoteNode", P], R]:
    """Returns a method that calls a method of `Node` on the other machine."""

    def call(node: "RemoteNode", *arguments: P.args, **named: P.kwargs) -> R:
        if named:
            raise TypeError(f"{method.__name__} takes arguments by position alone, not {[*named]}")
        return node._call(method.__name__, *arguments)

    return call


class RemoteNode:
    """Stands for a node on another machine; every failure of actor, node or network is NodeLost."""

    def __init__(self, actor: Any, supervisor: int, run_dir: Path):
        self._actor = actor
        self._supervisor = supervisor
        self._run_dir = run_dir
        self._address = ""
        self._ready = actor.serve.remote(supervisor, "describe")
        self.is_dead = False
        self.node_id = ""  # set once it is up

    describe = _remote(Node.describe)
    check = _remote(Node.check)
    unkillable = _remote(Node.unkillable)
    unreachable = _remote(Node.unreachable)
    free_port = _remote(Node.free_port)
    start = _remote(Node.start)
    poll = _remote(Node.poll)
    heartbeats = _remote(Node.heartbeats)
    gather_evidence = _remote(Node.gather_evidence)
    starved_s = _remote(Node.starved_s)
    running_ranks = _remote(Node.running_ranks)
    kill_rank = _remote(Node.kill_rank)
    stop = _remote(Node.stop)

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

    def end(self) -> None:
        """Ends the ranks, the template and the actor."""
        if self.node_id:  # otherwise the actor waits for its place and would not answer
            with contextlib.suppress(NodeLost):  # nothing is left to end
                self._call("end")
        self.forget()

    def forget(self) -> None:
        """Kills the actor, now or when its network is back, to free its place."""
        ray.kill(self._actor)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return self._await(self._actor.serve.remote(self._supervisor, method, *arguments))
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
        """Waits for an answer while sending heartbeats: Ray reports a cut network only after a minute."""
        deadline = time.monotonic() + CALL_TIMEOUT_S
        while True:
            left_s = deadline - time.monotonic()
            try:
                return ray.get(answer, timeout=max(0.0, min(BEAT_EVERY_S, left_s)))
            except GetTimeoutError:
                if left_s <= BEAT_EVERY_S:
                    raise
                beat(self._run_dir)


def _first_line(error: Exception) -> str:
    """Returns the first line of Ray's message, without half a page from its libraries."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.partition("; last error")[0]


@dataclass(frozen=True)
class _Bundle:
    """What a job reserves on each node."""

    cpus: int
    gpus: int

    @classmethod
    def of(cls, launch: Launch) -> "_Bundle":
        return cls(launch.ranks_per_node, launch.gpus_per_node or 0)

    def resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def fits_in(self, resources: Mapping[str, float]) -> bool:
        return resources.get("CPU", 0) >= self.cpus and resources.get("GPU", 0) >= self.gpus

    def __str__(self) -> str:
        return f"{self.cpus} CPUs" + (f" and {self.gpus} GPUs" if self.gpus else "")


class RayNodeProvider:
    """Provides a job's nodes: one Ray bundle per node, with an agent actor in each."""

    def __init__(self, launch: Launch, supervisor: int):
        self._launch = launch
        self._supervisor = supervisor
        self._bundle = _Bundle.of(launch)
        self._control_store = ray.get_runtime_context().gcs_address
        self._capacity = Capacity(0, 0)
        self._heard_at_s = time.monotonic()  # of the control store
        self._group: PlacementGroup | None = None
        self._nodes: list[RemoteNode | None] = []
        self._excluded: set[str] = set()  # ids of nodes with processes that cannot be killed

    def capacity(self) -> Capacity:
        """Returns how many nodes are large enough, and how many of them are free or the job's own.

        While the control store does not answer, returns the last values instead of waiting. After a minute, Ray
        ends every process of the cluster.
        """
        host, _, port = self._control_store.rpartition(":")
        now_s = time.monotonic()
        with contextlib.suppress(RayError):  # it has just ended
            if can_connect((host, int(port)), timeout_s=2.0):
                self._capacity, self._heard_at_s = self._ask_capacity(), now_s
        if now_s - self._heard_at_s >= TOLD_AFTER_S:
            trouble = (
                f"the cluster's control store at {self._control_store} does not answer. Ray ends "
                f"all its processes, including this job's, when it has waited {_RAY_WAITS_S} s; "
                "then start the cluster again and run `moebius resume`"
            )
            return replace(self._capacity, trouble=trouble)
        return self._capacity

    def _ask_capacity(self) -> Capacity:
        alive = self._live_nodes()
        leaving = {node_id for node_id, node in alive.items() if node.node_status == _DRAINING}
        usable = alive.keys() - leaving - self._excluded
        fitting = {one for one in usable if self._bundle.fits_in(alive[one].total_resources())}
        free = {one for one in fitting if self._bundle.fits_in(alive[one].available_resources())}
        ours = {node.node_id for node in self._nodes if node is not None}
        return Capacity(
            leaving=tuple(alive[one].ip_address for one in ours & leaving),
            could=len(fitting),
            free=len(free | fitting & (ours | nodes_of(self._group))),
            what=str(self._bundle),
            have=", ".join(map(_spell_node, alive.values())),
        )

    def _live_nodes(self) -> dict[str, NodeInfo]:
        """Returns the cluster's live nodes by their ids, as `ray status` sees them."""
        status = get_cluster_status(self._control_store)
        return {str(node.node_id): node for node in (*status.active_nodes, *status.idle_nodes)}

    def provide_nodes(
        self, num_nodes: int, while_waiting: Callable[[str], None]
    ) -> Sequence[NodeHandle]:
        """Returns an agent per bundle; reserves the bundles first, and replaces lost nodes."""
        if len(self._nodes) != num_nodes:
            self.release()
        self._drop_dead()
        if self._holds_unwanted():
            self.release()
        if self._group is None:
            while_waiting(f"waiting for {num_nodes} node(s) with {self._bundle} each")
            self._nodes = [None] * num_nodes
            self._group = self._reserve(num_nodes, while_waiting)
        self._start_agents(self._group, while_waiting)
        nodes = [node for node in self._nodes if node is not None]
        check_versions([node.describe() for node in nodes])
        return nodes

    def _drop_dead(self) -> None:
        for number, node in enumerate(self._nodes):
            if node is not None and not node.is_alive():
                node.forget()
                self._nodes[number] = None

    def _holds_unwanted(self) -> bool:
        """Returns whether one of the nodes must be released."""
        alive = self._live_nodes()
        for node in filter(None, self._nodes):
            is_draining = node.node_id in alive and alive[node.node_id].node_status == _DRAINING
            if is_draining or node.node_id in self._excluded:
                return True
        return False

    def adopt_nodes(self) -> Sequence[NodeHandle]:
        """Returns an earlier supervisor's live nodes, which stay reserved."""
        try:
            group = ray.util.get_placement_group(actor_name(self._launch.run_dir))
        except ValueError:
            return ()
        self._group, self._nodes = group, [None] * group.bundle_count
        run_dir, deadline = Path(self._launch.run_dir), time.monotonic() + ADOPT_TIMEOUT_S
        found = [
            (number, RemoteNode(actor, self._supervisor, run_dir))  # asks them all at once
            for number, actor in self._agents()
        ]
        for number, node in found:
            left_s = max(0.0, deadline - time.monotonic())
            if self._nodes[number] is None and node.is_up(timeout_s=left_s):
                self._nodes[number] = node
            else:
                node.forget()
        return [node for node in self._nodes if node is not None]

    def where_to_prepare(self) -> list[str]:
        """Returns arguments of the process that prepares data: its tasks use the remaining CPUs.

        Raises:
            NodesUnavailable: no CPU remains.
        """
        cpus = ray.cluster_resources().get("CPU", 0)
        left = int(cpus) - len(self._nodes) * self._bundle.cpus
        if left < 1:
            raise NodesUnavailable(
                f"the ranks reserve all {cpus:g} CPUs of the cluster, but preparing data during "
                "training (train.start_when) needs one more: add a node, lower "
                "job.ranks_per_node, or remove train.start_when"
            )
        address = ray.get_runtime_context().gcs_address
        return ["--address", address, "--capacity", str(tasks_for(left))]

    def exclude(self, node: NodeHandle, why: str) -> None:
        """Reserves no bundle on this node again; a restarted supervisor forgets the exclusion."""
        assert isinstance(node, RemoteNode), "the nodes of this provider are remote"
        self._excluded.add(node.node_id)

    def release(self) -> None:
        """Ends the agents and releases the bundles."""
        for node in self._nodes:
            if node is not None:
                node.end()
        self._nodes = []
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _sweep_predecessor(self) -> None:
        """Ends everything that an earlier supervisor of this run folder has left."""
        for _, actor in self._agents():
            ray.kill(actor)
        _remove_group(actor_name(self._launch.run_dir))

    def _agents(self) -> list[tuple[int, Any]]:
        """Returns the job's agent actors with the numbers of their bundles."""
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
        """Reserves the bundles; waits while other jobs hold them."""
        self._sweep_predecessor()
        group = self._create_group(num_nodes)
        self._group = group  # so that release() removes it if the waiting is aborted
        started = time.monotonic()
        while not group.wait(timeout_seconds=POLL_S):
            busy = time.monotonic() - started > self._launch.place_timeout_s
            while_waiting("waiting: all suitable nodes are busy with other work" if busy else "")
        return group

    def _create_group(self, num_nodes: int) -> PlacementGroup:
        elsewhere = {_NODE_ID: f"!in({','.join(sorted(self._excluded))})"}
        # Ray refuses an empty list
        where: Any = [elsewhere] * num_nodes if self._excluded else None
        return placement_group(
            [self._bundle.resources()] * num_nodes,
            bundle_label_selector=where,
            strategy="STRICT_SPREAD",
            name=actor_name(self._launch.run_dir),
            lifetime="detached",
        )

    def _create_agent(self, group: PlacementGroup, number: int) -> RemoteNode:
        key = _key(self._launch.run_dir)
        options: dict[str, Any] = {
            "name": f"node-{key}-{number}-{self._supervisor}.{secrets.token_hex(4)}",
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "num_cpus": self._bundle.cpus,
            "num_gpus": self._bundle.gpus,
            "max_concurrency": 4,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=number
            ),
        }
        agent: Any = ray.remote(NodeAgent)
        actor = agent.options(**options).remote(self._launch)
        return RemoteNode(actor, self._supervisor, Path(self._launch.run_dir))

    def _start_agents(self, group: PlacementGroup, while_waiting: Callable[[str], None]) -> None:
        """Starts an agent in every bundle without one; a lost node's bundle fails for a while."""
        missing = [number for number, node in enumerate(self._nodes) if node is None]
        starting = {number: self._create_agent(group, number) for number in missing}
        try:
            while starting:
                for number, node in [*starting.items()]:
                    while_waiting("")
                    if node.is_up(timeout_s=POLL_S):
                        self._nodes[number] = starting.pop(number)
                    elif node.is_dead:
                        words = f"the agent of node {number} could not be started; trying again"
                        while_waiting(words)
                        time.sleep(POLL_S)
                        starting[number] = self._create_agent(group, number)
        finally:
            for node in starting.values():  # the waiting was aborted
                node.forget()


def _remove_group(name: str) -> None:
    with contextlib.suppress(ValueError):  # there is none
        remove_placement_group(ray.util.get_placement_group(name))


def _address_of(node_id: str) -> Address:
    """Returns the address at which a node's raylet listens."""
    node = next(node for node in ray.nodes() if node["NodeID"] == node_id)
    return node["NodeManagerAddress"], node["NodeManagerPort"]


def check_versions(nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raises NodesUnavailable unless all nodes run the same moebius, torch and Python."""
    first = nodes[0]
    for node in nodes[1:]:
        if node["versions"] != first["versions"]:
            said = "; ".join(map(_spell_versions, (first, node)))
            raise NodesUnavailable(
                f"the nodes run different software ({said}): install the same versions on every "
                "node"
            )


def _spell_versions(node: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in node["versions"].items())
    return f"{versions} on {node['host']}"


def _spell_node(node: NodeInfo) -> str:
    has = node.total_resources()
    return f"{node.ip_address} ({has.get('CPU', 0):g} CPUs, {has.get('GPU', 0):g} GPUs)"
