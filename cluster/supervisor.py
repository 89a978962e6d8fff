"""The supervisor of a job and its node agents, as Ray actors.

The supervisor is a detached, named actor on the head node: it lives on when the command line that
submitted the job ends, and Ray starts it again when it is killed. All it knows is in the run
folder, so a restarted supervisor reads the journal, does away with the old placement group (Ray
kills the node agents in it, the kernel kills what they had started) and carries on with a new
generation. The lifecycle itself is generations.py; here is only what Ray has to do with it.

Cost: one process of about 80 MB for the supervisor and one per node for its agent actor; one remote
call per node every 0.2 s (about 1 ms each).
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
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .agent import AgentReport, Attempt, Node
from .generations import POLL_S, supervise
from .job import JobError, Launch
from .nodes import Capacity, NodeHandle, NodeLost, NodesUnavailable
from .preparation import Preparation
from .prepare import IN_FLIGHT_PER_CPU
from .ray_session import NAMESPACE
from .recovery.control_store import ControlStoreWatch, listens
from .recovery.node_check import NodeCheck
from .watching.evidence import Evidence
from .watching.heartbeats import RankState

# of a call to a node: it answers within milliseconds, or within seconds when processes resist
CALL_TIMEOUT_S = 30.0
_HEAD = {"node:__internal_head__": 0.001}  # a resource that Ray gives to the head node and no other


class NodeAgent(Node):
    """Runs one node's agents, as an actor in the node's bundle."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(ray.util.get_node_ip_address(), launch)

    def describe(self) -> dict[str, Any]:
        """Returns what every node tells, and its name in the cluster."""
        return super().describe() | {"node_id": ray.get_runtime_context().get_node_id()}


class Supervisor:
    """Runs one job to its end, in a thread of its own.

    So it starts again by itself when Ray restarts the actor.
    """

    def __init__(self, launch: Launch):
        self._launch = launch
        self._thread = threading.Thread(target=self._run, name="supervise")
        self._thread.start()

    def ping(self) -> bool:
        """Returns True when the actor is up."""
        return True

    def _run(self) -> None:
        me = ray.get_runtime_context().current_actor
        control_store = ControlStoreWatch(
            Path(self._launch.run_dir), ray.get_runtime_context().gcs_address
        )
        try:
            nodes = RayNodeProvider(self._launch)
            preparation = None
            if self._launch.prepares_data:
                preparation = Preparation(self._launch, nodes.where_to_prepare)
            supervise(self._launch, nodes, preparation)
        finally:
            control_store.end()
            ray.kill(me, no_restart=True)  # a detached actor ends only when it is told to


def start_supervisor(launch: Launch) -> None:
    """Starts the job's supervisor; returns when it is up.

    Raises:
        JobError: a supervisor for this run folder exists already.
    """
    options = {
        "name": actor_name(launch.run_dir),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "resources": _HEAD,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 2,
    }
    supervisor: Any = ray.remote(Supervisor)
    try:
        actor = supervisor.options(**options).remote(launch)
    except ValueError as error:
        raise JobError(
            f"{launch.run_dir}: a supervisor of this run folder is still at work ({error})"
        ) from None
    try:
        ray.get(actor.ping.remote(), timeout=launch.place_timeout_s + CALL_TIMEOUT_S)
    except RayActorError:
        pass  # it has already done its work and ended; the journal tells
    except GetTimeoutError:
        ray.kill(actor, no_restart=True)
        raise JobError(
            "the cluster's head node does not start the supervisor; see Ray's own logs there"
        ) from None


def actor_name(run_dir: str) -> str:
    """Returns the name of the job's supervisor and placement group: one per folder and cluster."""
    return f"supervisor-{hashlib.sha256(run_dir.encode()).hexdigest()[:16]}"


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

    def __init__(self, launch: Launch):
        self._launch = launch
        self._bundle = _Bundle.of(launch)
        self._control_store = ray.get_runtime_context().gcs_address
        self._capacity = Capacity(0, 0)
        self._group: PlacementGroup | None = None
        self._nodes: list[RemoteNode | None] = []
        self._remove_group_of_predecessor()

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
        fitting = {node["NodeID"] for node in alive if self._bundle.fits(node)} - leaving
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
            free=len(fitting & (free | ours)),
            what=str(self._bundle),
            have=", ".join(_spell_node(node) for node in alive),
        )

    def provide_nodes(
        self, num_nodes: int, while_waiting: Callable[[str], None]
    ) -> Sequence[NodeHandle]:
        """Returns an agent per bundle; reserves the bundles first, and replaces what was lost."""
        leaving = _leaving()
        if len(self._nodes) != num_nodes or any(
            node is not None and node.node_id in leaving for node in self._nodes
        ):
            self._give_back()
        if self._group is None:
            while_waiting(f"waiting for {num_nodes} node(s) with {self._bundle} each")
            self._nodes = [None] * num_nodes
            self._group = self._reserve(num_nodes, while_waiting)
        for number, node in enumerate(self._nodes):
            if node is None or not node.is_alive():
                self._nodes[number] = None
                self._nodes[number] = self._start_agent(self._group, number, while_waiting)
        nodes = [node for node in self._nodes if node is not None]
        check_versions([node.describe() for node in nodes])
        return nodes

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

    def _remove_group_of_predecessor(self) -> None:
        with contextlib.suppress(ValueError):  # there is none: this is the job's first supervisor
            remove_placement_group(ray.util.get_placement_group(actor_name(self._launch.run_dir)))

    def _reserve(self, num_nodes: int, while_waiting: Callable[[str], None]) -> PlacementGroup:
        """Reserves the bundles; waits as long as other jobs hold what is needed."""
        bundles = [self._bundle.resources()] * num_nodes
        group = placement_group(
            bundles, strategy="STRICT_SPREAD", name=actor_name(self._launch.run_dir)
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
            options: dict[str, Any] = {
                "num_cpus": self._bundle.cpus,
                "num_gpus": self._bundle.gpus,
                "max_concurrency": 4,
            }
            node = RemoteNode(
                ray.remote(NodeAgent)
                .options(**options, scheduling_strategy=strategy)
                .remote(self._launch)
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

    def __init__(self, actor: Any):
        self._actor = actor
        self._ready = actor.describe.remote()
        self.is_dead = False
        self.node_id = ""  # in the cluster, once it is up

    def is_up(self, *, timeout_s: float) -> bool:
        """Returns whether the actor has started; waits at most `timeout_s`."""
        try:
            told: Any = ray.get(self._ready, timeout=timeout_s)
            self.node_id = told["node_id"]
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
        ray.kill(self._actor)

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=CALL_TIMEOUT_S)
        except RayTaskError as error:
            raise NodeLost(f"its agent failed in {method}: {error.cause!r}") from error
        except GetTimeoutError as error:
            raise NodeLost(
                f"its agent did not answer {method} within {CALL_TIMEOUT_S:.0f} s"
            ) from error
        except RayError as error:
            raise NodeLost(f"its agent actor died ({_first_line(error)})") from error


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
