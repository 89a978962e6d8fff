"""Decides on how many nodes the next generation runs, and when a run should be resized.

It applies `job.num_nodes`, `job.min_nodes` and `job.wait_for_node_s`, and asks the `NodeProvider` what the
cluster has. `moebius scale RUN N` (`request_scale`) writes another number of nodes into the run folder, so that it
outlives the supervisor; the next submission uses job.num_nodes again.

* If all nodes are there, it takes them, or waits while other jobs use them.
* If some are missing, it waits `wait_for_node_s` for a replacement. Then it continues with the largest
  available number that is at least `min_nodes` and fits the run (`Launch.layouts`).
* With fewer, the job stays PLACING and says what is missing and since when. A job
  that has never run fails after `place_timeout_s` instead, because nodes that never existed are a mistake.
* `why_resize` says when a running job should change its nodes: it has fewer than it may have, `moebius scale`
  asked for another number, or a node will be taken away. The ranks then pause at a step boundary. If others
  took the new nodes meanwhile, the next pause for more nodes follows a minute later, then after two, four …
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ...data_pipeline.files import write_atomically
from ..job import SCALE, THIS_MACHINE, JobError, Launch, read_status, submitted_to
from ..nodes.provider import Capacity, NodeHandle, NodeProvider, NodesUnavailable

LOOK_EVERY_S = 2.0  # between two questions to the cluster
STEADY_LOOKS = 2  # looks in a row that must see more nodes before a run is paused for them
# Looks in a row that must see another number of free nodes before a reservation is given up: what a
# busy cluster reports may be seconds old, and every new reservation disturbs it again.
OTHER_LOOKS = 3
GROW_AGAIN_S = 60.0  # after a pause that brought no nodes; doubles each time
_GROW_AGAIN_MOST_S = 3600.0


class Reconsider(Exception):
    """Says that a reservation cannot be had any more, or that a better one can."""


@dataclass(frozen=True)
class _Policy:
    """The numbers of nodes that are allowed now; `moebius scale` changes them."""

    num_nodes: int
    min_nodes: int
    sizes: tuple[int, ...]  # that fit the run, largest first
    layouts: Mapping[int, Mapping[str, Any]] | None  # the mesh keys that change with the size

    @classmethod
    def of(cls, launch: Launch) -> "_Policy":
        scaled = scale_requested(Path(launch.run_dir))
        num_nodes = scaled.num_nodes if scaled else launch.num_nodes
        least = launch.min_nodes if launch.min_nodes is not None else num_nodes
        least = min(least, num_nodes)
        layouts = launch.layouts if scaled is None else scaled.layouts
        fitting = range(least, num_nodes + 1) if layouts is None else layouts
        sizes = sorted((size for size in fitting if least <= size <= num_nodes), reverse=True)
        return cls(num_nodes, least, tuple(sizes), layouts)

    def best(self, available: int) -> int | None:
        """Returns the largest allowed number of nodes among those available."""
        return next((size for size in self.sizes if size <= available), None)


class Placing:
    """Chooses a job's nodes.

    Args:
        while_waiting: called several times a second with the reason, "" for nothing new; its exceptions end
            the waiting.
        note: writes trouble of the cluster, and its end, into the journal.
    """

    def __init__(
        self,
        launch: Launch,
        provider: NodeProvider,
        while_waiting: Callable[[str], None],
        *,
        note: Callable[[str], None],
        has_run: bool,
        poll_s: float,
    ):
        self._launch = launch
        self._provider = provider
        self._while_waiting, self._note = while_waiting, note
        self._has_run = has_run
        self._poll_s = poll_s
        self._looked_at = 0.0
        self._capacity = Capacity(0, 0)
        self._steady = 0
        self._other = 0
        self._hoped_for = 0  # nodes that the last pause was for
        self._grow_again_s = GROW_AGAIN_S
        self._may_grow_at = 0.0
        self._policy: _Policy | None = None  # at the last look

    def place(self) -> Sequence[NodeHandle]:
        """Returns the nodes of the next generation, after waiting for them.

        Raises:
            NodesUnavailable: they will not come, or not in time.
        """
        started, since = time.monotonic(), datetime.now()
        while True:
            self._while_waiting("")
            policy = _Policy.of(self._launch)
            if not policy.sizes:
                raise NodesUnavailable(
                    f"the run fits no number of nodes from {policy.min_nodes} to "
                    f"{policy.num_nodes}: change mesh.ep, train.global_batch or train.micro_batch"
                )
            waited = time.monotonic() - started
            number = self._choose(policy, waited)
            if number is not None:
                self._other = 0
                try:
                    nodes = self._provider.provide_nodes(
                        number, lambda reason, size=number: self._reserving(reason, size, started)
                    )
                except Reconsider:
                    continue
                self._has_run, self._steady = True, 0
                self._learn(len(nodes))
                return nodes
            self._check_patience(policy, waited)
            self._while_waiting(self._missing(policy, since))
            time.sleep(self._poll_s)

    def _learn(self, number: int) -> None:
        """Remembers whether a pause for more nodes was worth it."""
        if number < self._hoped_for:
            self._may_grow_at = time.monotonic() + self._grow_again_s
            self._grow_again_s = min(2 * self._grow_again_s, _GROW_AGAIN_MOST_S)
        else:
            self._may_grow_at, self._grow_again_s = 0.0, GROW_AGAIN_S
        self._hoped_for = 0

    def launch_on(self, num_nodes: int) -> Launch:
        """Returns the launch of a generation on `num_nodes` nodes, with a mesh that fits."""
        mesh = (_Policy.of(self._launch).layouts or {}).get(num_nodes, {})
        return replace(self._launch, num_nodes=num_nodes, mesh=mesh, layouts=None)

    def mesh_words(self, num_nodes: int) -> str:
        """Describes how a generation on `num_nodes` nodes differs from the configuration, or ""."""
        if num_nodes == self._launch.num_nodes:
            return ""
        mesh = self.launch_on(num_nodes).mesh
        changed = "".join(f", mesh.{key}={value}" for key, value in mesh.items())
        return f" on {num_nodes} node(s) instead of {self._launch.num_nodes}{changed}"

    def why_resize(self, current: int) -> str:
        """Returns why the run should pause to continue on another number of nodes, or ""."""
        if time.monotonic() - self._looked_at < LOOK_EVERY_S:
            return ""
        policy, capacity = _Policy.of(self._launch), self._look()
        if policy != self._policy:  # `moebius scale`
            self._policy, self._may_grow_at = policy, 0.0
        if capacity.leaving:
            return f"the cluster is draining {', '.join(capacity.leaving)}"
        if current > policy.num_nodes:
            return f"{policy.num_nodes} node(s) were requested, and the job runs on {current}"
        if current == next(iter(policy.sizes), current):
            return ""
        best = policy.best(capacity.free)
        self._steady = self._steady + 1 if best is not None and best > current else 0
        if self._steady < STEADY_LOOKS or best is None or time.monotonic() < self._may_grow_at:
            return ""
        self._hoped_for = best
        return f"{best} node(s) are available, and the job runs on {current} of {policy.num_nodes}"

    def _choose(self, policy: _Policy, waited: float) -> int | None:
        """Returns how many nodes to reserve now; None: wait."""
        capacity = self._look()
        if waited >= self._launch.wait_for_node_s and (best := policy.best(capacity.free)):
            return best
        return policy.sizes[0] if policy.sizes[0] <= capacity.could else None

    def _reserving(self, reason: str, size: int, started: float) -> None:
        """Reconsiders a reservation: its nodes may be lost, or others may be available sooner."""
        self._while_waiting(reason)
        if time.monotonic() - self._looked_at < LOOK_EVERY_S / 2:
            return
        capacity = self._look()
        if capacity.could < size:
            raise Reconsider
        waited = time.monotonic() - started
        best = _Policy.of(self._launch).best(capacity.free)
        is_other = waited >= self._launch.wait_for_node_s and best not in (None, size)
        self._other = self._other + 1 if is_other else 0
        if self._other >= OTHER_LOOKS:
            raise Reconsider

    def _look(self) -> Capacity:
        before, self._capacity = self._capacity.trouble, self._provider.capacity()
        if self._capacity.trouble != before:
            self._note(self._capacity.trouble or "the cluster answers again")
        self._looked_at = time.monotonic()
        return self._capacity

    def _check_patience(self, policy: _Policy, waited: float) -> None:
        if self._has_run or policy.best(self._capacity.could) is not None:
            return
        limit = self._launch.place_timeout_s
        if waited > limit:
            raise NodesUnavailable(
                f"the job needs {policy.sizes[-1]} node(s) with {self._capacity.what} each, but "
                f"for {limit:g} s only {self._capacity.could} node(s) of the cluster could hold "
                f"it; the cluster has: {self._capacity.have}. Lower job.num_nodes or "
                "job.ranks_per_node, or add nodes"
            )

    def _missing(self, policy: _Policy, since: datetime) -> str:
        if not self._has_run and policy.best(self._capacity.could) is None:
            return ""  # nodes may be starting, and the limit is short
        least, could = policy.sizes[-1], self._capacity.could
        if could >= least:
            fewer = f"continues with {policy.best(could)} after {self._launch.wait_for_node_s:g} s"
        else:
            fewer = f"needs at least {least}"
        return (
            f"{policy.sizes[0] - could} node(s) missing since {since:%Y-%m-%d %H:%M:%S}: the job "
            f"asks for {policy.sizes[0]} with {self._capacity.what} each, the cluster has "
            f"{could}; it {fewer}"
        )


# `moebius scale` ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleRequest:
    """Holds a requested number of nodes."""

    num_nodes: int
    # possible numbers of nodes, with the mesh keys that change; None: any number
    layouts: Mapping[int, Mapping[str, Any]] | None


def request_scale(run_dir: Path, num_nodes: int) -> None:
    """Asks the job to continue on `num_nodes` nodes from the next step boundary.

    With fewer nodes in the cluster, the job continues unchanged until there are more.

    Raises:
        JobError: there is no job, it has ended, or it does not fit this number of nodes; the message lists
            numbers that do.
    """
    status = read_status(run_dir)
    if status.state.is_final:
        raise JobError(
            f"{run_dir}: the job has ended ({status.state}); continue it on {num_nodes} node(s) "
            f"with `moebius resume {run_dir} job.num_nodes={num_nodes}`"
        )
    if submitted_to(run_dir) == THIS_MACHINE:
        raise JobError(
            f"{run_dir}: the job runs on one machine without a cluster: stop it, then `moebius "
            f"resume {run_dir} --address auto` continues it on a cluster"
        )
    if num_nodes < 1:
        raise JobError(f"a job needs at least 1 node, got {num_nodes}")
    request = ScaleRequest(num_nodes, _layouts(run_dir, num_nodes))
    write_atomically(run_dir / SCALE, json.dumps(asdict(request)))


def scale_requested(run_dir: Path) -> ScaleRequest | None:
    """Returns the request in the run folder; None without one.

    Raises:
        JobError: the file is damaged.
    """
    path = run_dir / SCALE
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        layouts = said["layouts"]
        if layouts is not None:
            layouts = {int(number): mesh for number, mesh in layouts.items()}
        return ScaleRequest(int(said["num_nodes"]), layouts)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise JobError(
            f"{path} is damaged ({error}): remove it, and set the number of nodes (`moebius "
            f"resume {run_dir} job.num_nodes=N`, or `moebius scale {run_dir} N`)"
        ) from None


def _layouts(run_dir: Path, num_nodes: int) -> dict[int, dict[str, object]] | None:
    """Returns the possible numbers of nodes up to `num_nodes`; None without a configuration."""
    from ...train.config.resize import layouts_for
    from ...train.config.run_config import Config

    if not (run_dir / "config.json").exists():
        return None
    config = Config.load(run_dir / "config.json")
    layouts = layouts_for(config, range(1, num_nodes + 1))
    if num_nodes not in layouts:
        more = layouts_for(config, range(num_nodes + 1, 2 * num_nodes + 1))
        fitting = ", ".join(str(number) for number in [*layouts, *more]) or "none"
        raise JobError(
            f"the run does not fit {num_nodes} node(s) of {config.job.ranks_per_node} rank(s) "
            f"(train.global_batch={config.train.global_batch}, "
            f"train.micro_batch={config.train.micro_batch}, mesh.ep={config.mesh.ep}); numbers of "
            f"nodes up to {2 * num_nodes} that fit: {fitting}"
        )
    return layouts
