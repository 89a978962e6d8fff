"""Submitting a job: what the command line calls.

`submit` connects to a cluster (the one at `address`, or a simulated one on this machine), prepares
the data there, starts the job's supervisor and watches. On a real cluster the job does not need us
from then on: it outlives the command line, and `stop`, `read_status` and `watch.follow` find it
through its run folder. A simulated cluster ends with its user.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..data_pipeline.make.pools import TaskPool
from ..data_pipeline.make.prepare import OnPoison, prepare
from ..data_pipeline.manifest import DatasetManifest
from ..data_pipeline.prepare_config import PrepareConfig
from ..data_pipeline.sources.embedded import EMBEDDED
from ..train.config.resize import layouts_for
from ..train.config.run_config import Config
from ..train.record.run_folder import open_run
from .job import (
    SIMULATED,
    JobError,
    JobStatus,
    Launch,
    begin_submission,
    read_status,
    refuse_if_running,
)
from .liveness import HEARTBEAT
from .places.ray_session import disconnect, require_ray
from .places.simulated import simulated_cluster
from .places.standing import cluster_at
from .ray_tasks import RayPool
from .report.live import follow, show_preparation
from .report.summary import closing_words, draw_summary
from .scale import ScaleRequest, write_request
from .shipped_code import Shipment, record_environment
from .stop import interrupts_stop_the_job
from .supervise.background_data import prepares_beside

FORWARDED = (
    "MOEBIUS_",
    "NCCL_",
    "FI_",  # libfabric's, beneath NCCL
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "TRITON_",
    "CUDA_",
    "OMP_",
)  # settings of the submitter's shell that ranks get
FORWARDED_NAMES = ("CC", "CXX")  # the compilers of kernels
_NEVER = "CUDA_VISIBLE_DEVICES"  # which GPUs a rank has is its own node's affair
# and those of the services that the run's metrics go to, keys too, in memory and in no file of ours
_OF_SINKS = {"wandb": "WANDB_", "mlflow": "MLFLOW_"}
RELEASE_TIMEOUT_S = 30.0


def submit(
    config: Config,
    run_dir: Path,
    *,
    address: str | None = None,
    detach: bool = False,
    command: Sequence[str] = (),
    scale: ScaleRequest | None = None,
    shipment: Shipment | None = None,
    console: Console | None = None,
    live: bool | None = None,
) -> JobStatus:
    """Runs a job on a cluster, data preparation included, and shows it; returns how it ended.

    Ctrl-C (or SIGTERM) stops the job at a step boundary with a checkpoint; a second one ends it at
    once.

    Args:
        config: `config.data.directory` must be absolute and, like `run_dir`, reachable from every
            node.
        address: host:port of a Ray cluster's head, "auto", or "simulated" and "simulated:NAME" for
            one of `moebius cluster up`; None simulates `config.job.num_nodes` nodes here.
        detach: return as soon as the supervisor is up; only for a cluster that outlives this
            process.
        command: of one rank, instead of the training loop.
        scale: another number of nodes than the configuration's, from an earlier `moebius scale`.
        shipment: the code that the nodes are given, while `shipping` (shipping/runtime.py).
        live: redraw in place or write lines; by default as the console can.

    Raises:
        JobError: Ray is missing, the cluster cannot be used, or a job is at work in this folder.
        ConfigError: the run folder cannot be written, or holds another run.
        DataError: the data cannot be prepared.
    """
    if detach and address is None:
        raise JobError(
            "a simulated cluster ends with this command: to leave a job alone, give the address of "
            "a real one"
        )
    console = console or Console()
    run_dir = run_dir.absolute()
    require_ray()
    refuse_if_running(run_dir)
    open_run(config, run_dir)
    beside = prepares_beside(config)
    num_nodes = max(config.job.num_nodes, scale.num_nodes if scale else 0)
    is_ours = address is None
    # the corpus that needs no cluster is prepared while the cluster comes up
    is_first = is_ours and not beside and _needs_no_cluster(config.prepare)
    show = partial(_prepare, config.prepare, config.data.directory, console, live=live)
    meanwhile = partial(show, pool=None) if is_first else None
    with _cluster(config, address, console, num_nodes=num_nodes, meanwhile=meanwhile):
        from .supervise.actor import hold_supervisor, place_ahead, start_supervisor

        launch = make_launch(
            config,
            run_dir,
            address=address,
            command=command,
            prepares_data=beside,
        )
        if is_ours and scale is None:  # its nodes may be held, and import, while data is prepared
            launch = place_ahead(launch)
        held = hold_supervisor(launch) if is_ours else None
        if not beside and not is_first:
            with RayPool(capacity=os.cpu_count() if is_ours else None) as pool:
                show(pool=pool)
        _begin(launch, scale, shipment)
        if not is_ours and scale is None:
            launch = place_ahead(launch)
        with interrupts_stop_the_job(run_dir):
            start_supervisor(launch, held)
            if detach:
                return read_status(run_dir)
            disconnect()  # Ray ends its clients when its control store is gone; files stay
            status = follow(run_dir, console=console, live=live)
            _await_release(run_dir)
    picture = draw_summary(run_dir) if status.step is not None else None
    console.print(closing_words(status, picture=picture))
    return status


def _begin(
    launch: Launch, scale: ScaleRequest | None = None, shipment: Shipment | None = None
) -> None:
    code = record_environment(Path(launch.run_dir), shipment)
    if scale is None:
        return begin_submission(launch, **code)
    note = f"; goes on with {scale.num_nodes} node(s), as `moebius scale` asked before"
    begin_submission(launch, note=note, **code)
    write_request(Path(launch.run_dir), scale)


def prepare_on_cluster(
    config: PrepareConfig,
    directory: str | Path,
    *,
    address: str | None = None,
    workers: int | None = None,
    on_poison: OnPoison = "auto",
    console: Console | None = None,
) -> DatasetManifest:
    """Prepares a folder with Ray tasks.

    On the cluster at `address`, or with `workers` processes here.
    """
    console = console or Console()
    require_ray()
    workers = workers or os.cpu_count() or 1
    place = simulated_cluster(1, cpus_per_node=workers) if address is None else cluster_at(address)
    with place, RayPool(capacity=workers if address is None else None) as pool:
        return _prepare(config, directory, console, live=None, pool=pool, on_poison=on_poison)


def make_launch(
    config: Config,
    run_dir: Path,
    *,
    address: str | None,
    command: Sequence[str] = (),
    prepares_data: bool = False,
) -> Launch:
    """Returns the launch of a job on the cluster that this process is connected to."""
    job = config.job
    gpus = _simulated_gpus(config) if address is None else _cluster_gpus(config)
    return Launch(
        run_dir=str(run_dir),
        num_nodes=job.num_nodes,
        ranks_per_node=job.ranks_per_node,
        name=job.name,
        command=tuple(command),
        environment=_forwarded(config),
        gpus_per_node=gpus,
        start_timeout_s=job.start_timeout_s,
        rehearse_failure_at_step=job.rehearse_failure_at_step,
        warm_start=job.warm_start,
        prepares_data=prepares_data,
        where=SIMULATED if address is None else address,
        needs_gpus=job.ranks_per_node if config.train.device == "cuda" else 0,
        layouts=layouts_for(config, range(job.min_nodes or job.num_nodes, job.num_nodes + 1)),
        **patience(config),
    )


def _forwarded(config: Config) -> dict[str, str]:
    """Returns what ranks get of this shell's environment."""
    sinks = (prefix for sink, prefix in _OF_SINKS.items() if sink in config.train.metrics.sinks)
    prefixes = (*FORWARDED, *sinks)
    return {
        key: value
        for key, value in os.environ.items()
        if (key.startswith(prefixes) or key in FORWARDED_NAMES) and key != _NEVER
    }


def patience(config: Config) -> dict[str, Any]:
    """Returns what a launch puts up with, as the configuration says."""
    job = config.job
    return {
        "max_restarts": job.max_restarts,
        "max_node_losses": job.max_node_losses,
        "min_nodes": job.min_nodes,
        "wait_for_node_s": job.wait_for_node_s,
        "give_up_after_s": job.give_up_after_s,
    }


@contextlib.contextmanager
def _cluster(
    config: Config,
    address: str | None,
    console: Console,
    *,
    num_nodes: int,
    meanwhile: Callable[[], object] | None,
) -> Iterator[None]:
    job = config.job
    if address is not None:
        with cluster_at(address):
            console.print(Text(f"connected to the Ray cluster at {address}"))  # [::1]:6379
            yield
        return
    gpus = None
    if per_node := _simulated_gpus(config):
        gpus = [range(node * per_node, (node + 1) * per_node) for node in range(num_nodes)]
    started = time.monotonic()
    # what a node claims for preparing is beyond what its ranks reserve
    for_data = max(1, (os.cpu_count() or 1) // num_nodes)
    cpus = job.ranks_per_node + for_data
    place = simulated_cluster(num_nodes, cpus_per_node=cpus, gpus=gpus, meanwhile=meanwhile)
    with place:
        seconds = time.monotonic() - started
        console.print(
            f"simulated cluster of {num_nodes} node(s) up after {seconds:.1f} s",
            highlight=False,
        )
        yield


def _simulated_gpus(config: Config) -> int:
    """GPUs of each pretended node: one per rank when this machine has enough, for ranks cannot
    share one under NCCL.
    """
    if config.train.device == "cpu":
        return 0
    import torch

    have = torch.cuda.device_count()
    if have >= config.world_size:
        return config.job.ranks_per_node
    if config.train.device == "cuda":
        raise JobError(
            f"train.device=cuda needs one GPU per rank, {config.world_size} in all, and this "
            f"machine has {have}: "
            "lower job.num_nodes or job.ranks_per_node, or set train.device=cpu"
        )
    return 0


def _cluster_gpus(config: Config) -> int:
    """GPUs of each node of a real cluster: one per rank, and with device "auto" none if too few
    nodes have them.
    """
    import ray

    per_node = config.job.ranks_per_node
    fitting = sum(
        node["Alive"] and node["Resources"].get("GPU", 0) >= per_node for node in ray.nodes()
    )
    enough = fitting >= config.job.num_nodes
    return (
        per_node
        if config.train.device == "cuda" or (config.train.device == "auto" and enough)
        else 0
    )


def _needs_no_cluster(prepare: PrepareConfig) -> bool:
    """Returns whether the embedded corpus is all there is; `prepare` reads it in this process."""
    return all({*one.input, *one.validation_input} == {EMBEDDED} for one in prepare.all_sources)


def _prepare(
    config: PrepareConfig,
    directory: str | Path,
    console: Console,
    *,
    live: bool | None,
    pool: TaskPool | None,
    on_poison: OnPoison = "auto",
) -> DatasetManifest:
    with show_preparation(console, live=live) as on_progress:
        return prepare(
            config,
            directory,
            pool=pool,
            on_progress=on_progress,
            on_poison=on_poison,
            report=True,
        )


def _await_release(run_dir: Path) -> None:
    """Waits until the supervisor has given its nodes back, so that nothing is left when we return;
    its heartbeat is the last thing that it takes away.
    """
    if not read_status(run_dir).state.is_final:
        return  # it is lost, and gives nothing back
    deadline = time.monotonic() + RELEASE_TIMEOUT_S
    while (run_dir / HEARTBEAT).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
