"""Runs a job's supervisor as a Ray actor.

The actor is detached, named, and on the head node. It outlives the command that submitted the job, and Ray
restarts it when it is killed. Its state is in the run folder and on the nodes, which do not die with it
(ray_nodes.py). A restarted supervisor reads the journal, takes a new number, finds the nodes by
name, and continues to watch their generation, which has noticed nothing. job_supervisor.py holds the
lifecycle; this module only connects it to Ray.

Cost: one process of about 80 MB.
"""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from ..job import JobError, Launch, SupervisorNumber, last_supervisor
from ..nodes.ray_nodes import CALL_TIMEOUT_S, RayNodeProvider, actor_name
from ..places.ray_session import NAMESPACE
from .background_data import BackgroundData
from .job_supervisor import POLL_S, supervise

_HEAD = {"node:__internal_head__": 0.001}  # Ray gives this resource only to the head node


class Supervisor:
    """Runs one job to its end in a thread, so that it also starts when Ray restarts the actor."""

    def __init__(self, launch: Launch):
        self._launch = launch
        threading.Thread(target=self._run, name="supervise").start()

    def ping(self) -> bool:
        """Returns True once the actor is up."""
        return True

    def _run(self) -> None:
        me = ray.get_runtime_context().current_actor
        run_dir = Path(self._launch.run_dir)
        number = _take_number(run_dir)
        try:
            nodes = RayNodeProvider(self._launch, number.number)
            data = None
            if self._launch.prepares_data:
                data = BackgroundData(self._launch, nodes.where_to_prepare)
            supervise(self._launch, nodes, data, number=number)
        finally:
            # A detached actor ends only when told to; a replaced one has a successor of the same name.
            if last_supervisor(run_dir) <= number.number:
                ray.kill(me, no_restart=True)


def _take_number(run_dir: Path) -> SupervisorNumber:
    """Takes the supervisor's number, waiting until the run folder can be written."""
    while True:
        try:
            return SupervisorNumber.take(run_dir)
        except OSError:  # the disk is full; nodes end their ranks if this takes too long
            time.sleep(POLL_S)


def start_supervisor(launch: Launch) -> None:
    """Starts the job's supervisor; returns when it is up.

    Raises:
        JobError: this run folder already has a supervisor, or it does not start.
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
            f"{launch.run_dir}: another supervisor of this run folder is still running ({error})"
        ) from None
    with contextlib.suppress(RayActorError):  # it has finished the job already: the journal tells
        try:
            ray.get(actor.ping.remote(), timeout=launch.place_timeout_s + CALL_TIMEOUT_S)
        except GetTimeoutError:
            ray.kill(actor, no_restart=True)
            raise JobError(
                "the head node of the cluster did not start the supervisor; see Ray's logs there"
            ) from None
