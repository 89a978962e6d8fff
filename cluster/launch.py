"""Turns a configuration into a launch, and records the code that runs.

`environment.json` holds moebius' version and commit (`changed`: the checkout differs from it; null: unknown), the
versions of Python and all packages, and the host. It contains no environment variables and no command lines, so no
secrets. Cost: about 20 ms, most of it for git.
"""

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.text import Text

from .. import __version__
from ..data_pipeline.files import write_atomically
from ..plugins import FOLDER, PARTS, folder_of_job, names_in, trust
from ..train.config.resize import layouts_for
from ..train.config.run_config import Config
from ..train.config.schedule import decay_is_over, learning_rate_at, rates_line, shape_notes
from ..train.optim import muon_rate, rate_notes
from ..train.record.run_folder import (
    Source,
    check_data,
    check_run,
    count_epochs,
    has_trained,
    open_run,
    read_source,
    steps_before,
)
from ..train.record.untrusted import escaped, read_text
from .job import (
    CONFIG,
    JOURNAL,
    NEXT_CONFIG,
    RESULT,
    SIMULATED,
    SOURCE,
    THIS_MACHINE,
    JobError,
    Launch,
    begin_submission,
    refuse_if_running,
)
from .report.run_report import last_checkpoint
from .supervise.background_data import prepares_while_training

ENVIRONMENT = "environment.json"
ROOT = Path(__file__).resolve().parents[1]
_GIT_TIMEOUT_S = 10.0

# Variables of the submitter's shell that ranks inherit. FI_ belongs to libfabric, which NCCL may use.
FORWARDED = ("MOEBIUS_", "NCCL_", "FI_", "GLOO_", "TORCH_", "PYTORCH_", "TRITON_", "CUDA_", "OMP_")
FORWARDED_NAMES = ("CC", "CXX")  # the compilers of kernels
_NEVER = "CUDA_VISIBLE_DEVICES"  # each node assigns its own GPUs
# Variables of metric services, including API keys: they stay in memory and reach none of our files.
_OF_SINKS = {"wandb": "WANDB_", "mlflow": "MLFLOW_"}


def refusals(
    config: Config,
    run_dir: Path,
    source: Source | None = None,
    *,
    console: Console | None = None,
) -> None:
    """Asks what can refuse a run before its folder is opened, and raises the first refusal.

    `begin_run` asks what prepared data decides, also before any rank starts.

    Args:
        config: the run's configuration.
        run_dir: a new or empty folder, or this run's.
        source: what a new run starts from; None: drawn weights.
        console: where to say how long it may take to see whether a job is running in the folder.

    Raises:
        ConfigError: the configuration does not fit its ranks, or the folder holds something else.
        PluginError: a part of the user's own cannot be imported.
        JobError: a job is running in this folder, or the run has no step to make.
    """
    config.check_world(config.world_size)
    console = console or Console(quiet=True)
    refuse_if_running(run_dir, tell=lambda words: console.print(Text(escaped(words))))
    config.import_parts()
    # only what prepares data is still unknown
    trust(config.model_dump(mode="json", exclude={"prepare"}))
    check_run(config, run_dir, source)
    _check_evaluation(config)
    if config.train.epochs is None:  # else `begin_run` counts its steps
        rate_lines(config, run_dir, source)


def _check_evaluation(config: Config) -> None:
    if config.evaluate.every:
        from ..evaluation.while_training import check_evaluation  # which imports torch

        check_evaluation(config)


def make_launch(
    config: Config,
    run_dir: Path,
    *,
    address: str | None,
    gpus_per_node: int | None = None,
    command: Sequence[str] = (),
    prepares_data: bool = False,
) -> Launch:
    """Returns the launch of a job on the connected cluster.

    Args:
        config: the run's configuration.
        run_dir: its folder.
        address: the cluster's; None: it is simulated for this job.
        gpus_per_node: None: as many as the cluster has for its ranks.
        command: of one rank, instead of the training loop.
        prepares_data: beside the ranks.
    """
    job = config.job
    gpus = _cluster_gpus(config) if gpus_per_node is None else gpus_per_node
    return Launch(
        num_nodes=job.num_nodes,
        ranks_per_node=job.ranks_per_node,
        command=tuple(command),
        gpus_per_node=gpus,
        where=SIMULATED if address is None else address,
        needs_gpus=job.ranks_per_node if config.train.device == "cuda" else 0,
        min_nodes=job.min_nodes,
        wait_for_node_s=job.wait_for_node_s,
        layouts=layouts_for(config, range(job.min_nodes or job.num_nodes, job.num_nodes + 1)),
        prepares_data=prepares_data,
        **_of_any_job(config, run_dir, environment=_forwarded(config)),
    )


def launch_here(config: Config, run_dir: Path) -> Launch:
    """Returns the launch of a job on this machine alone, without a cluster."""
    return Launch(
        ranks_per_node=config.world_size,
        where=THIS_MACHINE,
        needs_gpus=config.world_size if config.train.device == "cuda" else 0,
        prepares_data=not config.data.dataset and prepares_while_training(config),
        **_of_any_job(config, run_dir, environment={}),
    )


@contextlib.contextmanager
def opened_folder(config: Config, run_dir: Path, source: Source | None = None) -> Iterator[None]:
    """Makes the run folder, or opens this run's; a new one is removed again if no job began in it."""
    made = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    try:
        open_run(config, run_dir, source)
        yield
    finally:
        if made and {path.name for path in run_dir.glob("*")} <= {CONFIG, SOURCE, "source", "logs"}:
            shutil.rmtree(run_dir, ignore_errors=True)
            with contextlib.suppress(OSError):  # there is more
                for folder in made[1:]:
                    folder.rmdir()


def begin_run(config: Config, launch: Launch, console: Console) -> Launch:
    """Begins the job of a run, once nothing is left that could refuse it, and says where it continues.

    Returns the launch, of a configuration whose epochs are counted.

    Raises:
        ConfigError: the epochs cannot be counted.
        DataError: every rank would refuse the data.
    """
    run_dir = Path(launch.run_dir)
    is_known, step = (run_dir / JOURNAL).exists(), last_checkpoint(run_dir)
    source = read_source(run_dir)
    if not launch.command:
        config = count_epochs(config)
        launch = replace(launch, configuration=_as_text(config))
        if note := check_data(config, run_dir, is_whole=not launch.prepares_data):
            console.print(Text(note), soft_wrap=True)
        _check_evaluation(config)
        for at, line in enumerate(rate_lines(config, run_dir, source)):
            console.print(Text(line, style="yellow" if at else ""), soft_wrap=True)
    if step is not None and not (run_dir / CONFIG).exists():
        console.print(f"{CONFIG} is missing; the newest checkpoint has the run's configuration")
    commit = record_code(run_dir).words()
    begin_submission(launch, commit=commit, source=source and source.words())
    words = "has no checkpoint; starts from the beginning"
    if step is not None:
        words = f"continues from the checkpoint of step {step:,}, to step {config.train.steps:,}"
    elif source is not None:
        words = source.words()
    if is_known or step is not None or source is not None:
        console.print(Text(escaped(f"{run_dir}: {words}")), soft_wrap=True)
    return launch


def rate_lines(config: Config, run_dir: Path, source: Source | None = None) -> list[str]:
    """Says a run's learning rates, those of before, and in further lines what is odd about them.

    Raises:
        JobError: the run has no step to make, or a new length gives it nothing but steps of rate 0.
    """
    (done, before), steps = steps_before(run_dir, source), config.train.steps
    if done > steps or (done == steps and '"finished"' in (read_text(run_dir / RESULT) or "")):
        raise JobError(
            f"{run_dir}: finished at step {done:,}, and train.steps is {steps:,}; to continue, raise "
            f"it: train.steps={2 * done}"
        )
    now = config.optim.over(steps)
    lines = [rates_line(now, before=before, done=done)]
    for factor in muon_rate(config.optim, 1.0).values():
        lines[0] += f"; Muon's matrices have {factor:.3g} times this rate"
    if before is not None and decay_is_over(now, done):
        rate, end = learning_rate_at(now, done), now.warmup_steps + now.decay_steps
        lines += [
            f"the decay ended at step {end:,}, so all steps from {done + 1:,} to {steps:,} have the "
            f"rate {rate:.3g}; optim.decay_steps=auto ends it with the run"
        ]
        if rate == 0 and now != before:
            raise JobError(f"{run_dir}: {lines[-1]}")
    return lines + shape_notes(config.optim) + rate_notes(config.optim)


def simulated_gpus(config: Config) -> int:
    """Returns the GPUs per simulated node: one per rank if this machine has enough, else none.

    Ranks cannot share a GPU under NCCL.
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
    """Returns the GPUs per node of a real cluster: one per rank.

    With device "auto", none if too few nodes have them.
    """
    import ray

    per_node = config.job.ranks_per_node
    if config.train.device != "auto":
        return per_node if config.train.device == "cuda" else 0
    fitting = sum(
        node["Alive"] and node["Resources"].get("GPU", 0) >= per_node for node in ray.nodes()
    )
    return per_node if fitting >= config.job.num_nodes else 0


def _of_any_job(config: Config, run_dir: Path, *, environment: Mapping[str, str]) -> dict[str, Any]:
    job, names = config.job, names_in(config.model_dump(mode="json"))  # accepted by this command
    return {
        "environment": {FOLDER: folder_of_job(), **environment, PARTS: " ".join(names)},
        "run_dir": str(run_dir),
        "name": job.name,
        "max_restarts": job.max_restarts,
        "max_node_losses": job.max_node_losses,
        "start_timeout_s": job.start_timeout_s,
        "rehearse_failure_at_step": job.rehearse_failure_at_step,
        "warm_start": job.warm_start,
        "configuration": _as_text(config),
        "config_file": NEXT_CONFIG if has_trained(run_dir) else CONFIG,
        "source": read_text(run_dir / SOURCE) or "",
    }


def _as_text(config: Config) -> str:
    """Returns the text of a run's config.json."""
    return json.dumps(config.model_dump(mode="json"), indent=2) + "\n"


def _forwarded(config: Config) -> dict[str, str]:
    """Returns the variables of this shell that ranks inherit."""
    sinks = (prefix for sink, prefix in _OF_SINKS.items() if sink in config.train.sinks)
    prefixes = (*FORWARDED, *sinks)
    return {
        key: value
        for key, value in os.environ.items()
        if (key.startswith(prefixes) or key in FORWARDED_NAMES) and key != _NEVER
    }


# The code that runs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """Identifies the code of this process."""

    version: str
    commit: str | None
    changed: bool | None  # None: not known

    def words(self) -> str | None:
        """Returns the commit for `status`, with "+changes" for a modified checkout."""
        return None if self.commit is None else self.commit + ("+changes" if self.changed else "")


def record_code(run_dir: Path) -> Code:
    """Writes environment.json; returns the code that runs."""
    code = code_here()
    record = {
        "time": time.time(),
        "moebius": asdict(code),
        "python": platform.python_version(),
        "packages": installed_packages(),
        "host": {
            "name": socket.gethostname(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
    }
    write_atomically(run_dir / ENVIRONMENT, json.dumps(record, indent=1))
    return code


def code_here() -> Code:
    """Returns the version and commit of this process's code."""
    top = _git("rev-parse", "--show-toplevel")
    if top is not None and Path(top).resolve() == ROOT:  # not a project that it is installed in
        changes = _git("status", "--porcelain", "--untracked-files=no")
        return Code(__version__, _git("rev-parse", "HEAD"), bool(changes))
    return Code(__version__, _installed_from(), None)


def installed_packages() -> dict[str, str]:
    """Returns the version of every package on the path, by the names of their folders."""
    found: dict[str, str] = {}
    for folder in sys.path:
        for path in Path(folder or ".").glob("*.dist-info"):
            name, _, version = path.name.removesuffix(".dist-info").partition("-")
            found.setdefault(re.sub("[-_.]+", "-", name).lower(), version)
    return dict(sorted(found.items()))


def _git(*words: str) -> str | None:
    """Returns git's output about the checkout; None without git or a checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _installed_from() -> str | None:
    """Returns the commit that pip installed from (PEP 610); None if unknown."""
    try:
        text = metadata.distribution("moebius").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    return json.loads(text or "{}").get("vcs_info", {}).get("commit_id")
