"""Submits a job to a cluster, for `moebius submit`, and continues a run, for `moebius resume`.

    1. ask        whether anything refuses the run (`launch.refusals`)
    2. open       the run folder, new or holding this run
    3. connect    to the cluster at an address, or to one simulated for this job
    4. prepare    the data, as Ray tasks
    5. begin      the job in its journal, unless the data refuses the run (`launch.begin_run`)
    6. start      the job's supervisor, a detached actor (supervise/actor.py)
    7. follow     the run folder, until the job has ended

From step 6 on, a job on a real cluster does not need this process; `stop`, `read_status` and `follow` use its
run folder. With `train.start_when`, data is prepared beside the ranks instead of in step 4.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..data_pipeline.words import is_run
from ..train.config.job_config import JobConfig
from ..train.config.run_config import Config
from ..train.record.run_folder import Source, place_data, read_source
from . import local
from .job import (
    JOURNAL,
    SIMULATED,
    THIS_MACHINE,
    JobError,
    JobStatus,
    State,
    read_status,
    submitted_to,
)
from .launch import begin_run, make_launch, opened_folder, refusals, simulated_gpus
from .liveness import HEARTBEAT
from .places.ray_session import refuse_unnamed, require_ray
from .places.simulated import simulated_cluster
from .places.standing import cluster_at
from .ray_tasks import RayPool
from .report.live import follow
from .report.summary import show_end
from .stop import interrupts_stop_the_job
from .supervise.background_data import prepares_while_training

RELEASE_TIMEOUT_S = 30.0


def submit(
    config: Config,
    run_dir: Path,
    *,
    address: str | None = None,
    detach: bool = False,
    source: Source | None = None,
    command: Sequence[str] = (),
    console: Console | None = None,
) -> JobStatus:
    """Runs a job on a cluster, including data preparation, and shows it; returns how it ended.

    Ctrl-C or SIGTERM stops the job at a step boundary with a checkpoint; a second one ends it at once.

    Args:
        config: `config.data.directory` must be absolute and, like `run_dir`, visible on every node.
        address: host:port of a Ray cluster's head, "auto", or "simulated" of `moebius cluster up`;
            None simulates `config.job.num_nodes` nodes here.
        detach: return as soon as the supervisor is up; needs a cluster that outlives this process.
        source: what a new run starts from, visible on every node; None: drawn weights.
        command: of one rank, instead of the training loop.

    Raises:
        JobError: Ray is missing, the cluster cannot be used, or a job is running in this folder.
        ConfigError: the run folder cannot be written, or holds another run.
        DataError: the data cannot be prepared.
    """
    if detach and address is None:
        raise JobError("--detach needs --address: a simulated cluster ends with this command")
    require_ray()
    console = console or Console()
    run_dir = run_dir.absolute()
    refusals(config, run_dir, source, console=console)
    gpus = simulated_gpus(config) if address is None else None
    with opened_folder(config, run_dir, source):
        beside = prepares_while_training(config)
        with _connected(config.job, address, gpus, console):
            import ray

            from .supervise.actor import start_supervisor

            launch = make_launch(
                config,
                run_dir,
                address=address,
                gpus_per_node=gpus,
                command=command,
                prepares_data=beside,
            )
            if not beside:
                with RayPool(capacity=os.cpu_count() if address is None else None) as pool:
                    local.prepare_shown(config, run_dir, console, pool)
            launch = begin_run(config, launch, console)
            with interrupts_stop_the_job(run_dir):
                start_supervisor(launch)
                if detach:
                    return read_status(run_dir)
                ray.shutdown()  # Ray ends its clients if the control store dies; files remain readable
                status = follow(run_dir, console=console)
                while _is_going_on(run_dir):  # a damaged journal ends `follow` early
                    status = follow(run_dir, console=console)
    show_end(status, console)
    return status


def resume(
    config: Config,
    run_dir: Path,
    *,
    address: str | None = None,
    detach: bool = False,
    console: Console | None = None,
) -> JobStatus:
    """Continues a run in the way it was started, here or on its cluster, or starts an imported one here.

    Arguments and errors are those of `submit`, but without an address the run stays where it was.

    Raises:
        JobError: the run has finished.
    """
    console, run_dir = console or Console(), run_dir.absolute()
    config = place_data(config, run_dir.parent)
    where, source = THIS_MACHINE, read_source(run_dir)
    refusals(config, run_dir, source, console=console)
    if (run_dir / JOURNAL).exists() or not is_run(run_dir):  # not imported
        read_status(run_dir)  # refuses a folder without a job
        where = submitted_to(run_dir)
    if address is None and where == THIS_MACHINE and not detach:
        return local.train_here(config, run_dir, source=source, console=console)
    before = None if where in ("", SIMULATED, THIS_MACHINE) else where
    if before and not address:
        refuse_unnamed(before)
    return submit(
        config,
        run_dir,
        address=address or before,
        detach=detach,
        source=source,
        console=console,
    )


@contextlib.contextmanager
def _connected(
    job: JobConfig, address: str | None, gpus_per_node: int | None, console: Console
) -> Iterator[None]:
    """Connects to a cluster, or simulates one."""
    if address is not None:
        with cluster_at(address):
            console.print(Text(f"connected to the Ray cluster at {address}"))  # [::1]:6379
            yield
        return
    gpus, num_nodes = None, job.num_nodes
    if gpus_per_node:
        first = range(0, num_nodes * gpus_per_node, gpus_per_node)
        gpus = [range(number, number + gpus_per_node) for number in first]
    started = time.monotonic()
    # data preparation needs CPUs beyond those that the ranks reserve
    for_data = max(1, (os.cpu_count() or 1) // num_nodes)
    cpus = job.ranks_per_node + for_data
    with simulated_cluster(num_nodes, cpus_per_node=cpus, gpus=gpus):
        seconds = time.monotonic() - started
        words = f"simulated cluster of {num_nodes} node(s) up after {seconds:.1f} s"
        console.print(words, highlight=False)
        yield


def _is_going_on(run_dir: Path) -> bool:
    """Waits until the supervisor has released its nodes: it removes its heartbeat last.

    Returns whether the job goes on instead.
    """
    if not read_status(run_dir).state.is_final:
        return False  # a lost supervisor releases nothing
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    while (run_dir / HEARTBEAT).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    status = read_status(run_dir)
    return not status.state.is_final and status.state is not State.LOST
