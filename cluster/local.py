"""Runs a job on this machine without Ray: the same agent, supervisor and journal, with one node."""

import json
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..data_pipeline.make.pools import TaskPool
from ..data_pipeline.make.prepare import prepare
from ..data_pipeline.manifest import is_prepared, read_manifest
from ..train.config.run_config import Config
from ..train.record.run_folder import Source, if_changed, open_run
from .job import RESULT, JobError, JobStatus, Launch, State, python_module, read_status
from .launch import begin_run, launch_here, opened_folder, refusals
from .nodes.processes import difference_from_linux
from .nodes.provider import ThisMachine
from .report.data_progress import duration
from .report.live import follow, show_preparation
from .report.summary import explain_failure, show_end
from .stop import interrupts_stop_the_job
from .supervise.background_data import BackgroundData, workers_beside
from .supervise.job_supervisor import supervise


def train_here(
    config: Config,
    run_dir: Path,
    *,
    source: Source | None = None,
    console: Console | None = None,
) -> JobStatus:
    """Prepares the data, trains with all ranks on this machine, and shows the run.

    Ctrl-C ends the run at a step boundary with a checkpoint; a second one ends it at once.

    Args:
        config: the run's configuration.
        run_dir: a new or empty folder, or this run's.
        source: what a new run starts from; None: drawn weights.
        console: where to show the run.

    Raises:
        JobError: a job is running in this folder.
        ConfigError: the run folder cannot be written, or holds another run.
        DataError: the data cannot be prepared.
    """
    console = console or Console()
    run_dir = run_dir.absolute()
    refusals(config, run_dir, source, console=console)
    with opened_folder(config, run_dir, source):
        if difference := difference_from_linux():
            console.print(Text(difference, style="yellow"))
        launch = launch_here(config, run_dir)
        this_machine = ThisMachine(launch)  # imports while the data is prepared
        try:
            if not (launch.prepares_data or config.data.dataset):
                prepare_shown(config, run_dir, console)
            launch = begin_run(config, launch, console)
            status = _run_and_show(launch, this_machine, console)
        finally:
            this_machine.release()
    if not status.state.is_final:
        raise JobError(
            f"{run_dir}: another supervisor has taken this run over; follow it with `moebius watch`"
        )
    show_end(status, console)
    return status


def prepare_shown(
    config: Config, run_dir: Path, console: Console, pool: TaskPool | None = None
) -> None:
    """Prepares a run's data and shows the progress."""
    changed, where = if_changed(config, run_dir), config.data.directory
    with show_preparation(console) as show:
        prepare(config.prepare, where, pool=pool, on_progress=show, if_changed=changed)


def dry_run(
    config: Config,
    run_dir: Path,
    *,
    source: Source | None = None,
    console: Console | None = None,
) -> JobStatus:
    """Makes a few steps of a run with all its ranks here, and shows what the run will take.

    The steps are made in a folder that is removed again. Arguments and errors are those of `train_here`.
    """
    console, run_dir = console or Console(), run_dir.absolute()
    refusals(config, run_dir, source, console=console)
    with tempfile.TemporaryDirectory(prefix="moebius-dry-run-") as name:
        folder = Path(name)
        with interrupts_stop_the_job(folder):
            status = _run_dry(config, folder)
        words = f"{status.state.value}  {status.reason}"
        if status.state is State.SUCCEEDED:
            measured = json.loads((folder / RESULT).read_text())
            words = _report_of(config, measured)
    console.print(Text(words), soft_wrap=True)
    cause = status.root_cause and replace(status.root_cause, log=None)  # which is gone
    for part in explain_failure(replace(status, root_cause=cause), told=status.reason):
        console.print(part)
    return replace(status, run_dir=run_dir)


def _run_dry(config: Config, folder: Path) -> JobStatus:
    """Runs the steps of a dry run in a folder of its own, without showing them."""
    changes = {
        "train": {"start_when": None},
        "checkpoint": {"copy_to": None},
        "job": {"max_restarts": 0, "rehearse_failure_at_step": None},
    }
    sections = {key: getattr(config, key).model_copy(update=changes[key]) for key in changes}
    config, quiet = config.model_copy(update=sections), Console(quiet=True)
    open_run(config, folder)
    command = python_module("moebius.train", str(folder), "--dry-run")
    launch = replace(launch_here(config, folder), command=tuple(command))
    this_machine = ThisMachine(launch)
    try:
        return _run_and_show(begin_run(config, launch, quiet), this_machine, quiet)
    finally:
        this_machine.release()


def _report_of(config: Config, measured: dict[str, float]) -> str:
    """Returns what the ranks of a dry run have measured, and what follows for the whole run."""
    where = config.data.directory
    is_whole = is_prepared(where) and read_manifest(where).complete
    train, saves, each = config.train, config.checkpoint, measured["checkpoint"]
    rate = train.global_batch * config.data.seq_len / measured["step_s"]
    run_s = train.steps * measured["step_s"]
    lines = {
        "memory": f"at most {measured['memory'] / 1e9:.3g} GB on a rank",
        "step": f"{measured['step_s']:.3g} s, {rate:,.0f} tokens/s",
        "checkpoint": f"{each / 1e6:,.1f} MB",
        "run": f"train.epochs={train.epochs}: as many steps as there is data",
    }
    if train.epochs is None or is_whole:
        saved = min(saves.keep_last + 1, -(-train.steps // saves.every) if saves.every else 1)
        saved += train.steps // saves.keep_every if saves.keep_every else 0
        saved += bool(saves.keep_best)
        copies = ", and as many copies" * bool(saves.copy_to)
        lines["run"] = f"{train.steps:,} steps in {duration(run_s)}, and evaluations"
        lines["disk"] = (
            f"{saved * each / 1e9:,.3f} GB for up to {saved} checkpoints at once{copies}"
        )
    return "\n".join(f"{name:<12}{words}" for name, words in lines.items())


def _run_and_show(launch: Launch, this_machine: ThisMachine, console: Console) -> JobStatus:
    """Runs the job in this thread, which receives Ctrl-C, and shows it from another one."""
    run_dir = Path(launch.run_dir)
    ended = threading.Event()
    screen = threading.Thread(
        target=follow,
        args=(run_dir,),
        kwargs={"console": console, "until": lambda _: ended.is_set()},
    )
    screen.start()
    data = None
    if launch.prepares_data:
        data = BackgroundData(launch, lambda: workers_beside(launch.world_size))
    try:
        with interrupts_stop_the_job(run_dir):
            supervise(launch, this_machine, data)
    finally:
        ended.set()
        screen.join()
    return read_status(run_dir)
