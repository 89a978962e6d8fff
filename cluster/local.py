"""Runs a job on this machine without Ray: the same agent, supervisor and journal, with one node."""

import threading
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..data_pipeline.make.pools import TaskPool
from ..data_pipeline.make.prepare import prepare
from ..train.config.run_config import Config
from ..train.record.run_folder import Source, if_changed
from .job import JobError, JobStatus, Launch, read_status
from .launch import begin_run, launch_here, opened_folder, refusals
from .nodes.processes import difference_from_linux
from .nodes.provider import ThisMachine
from .report.live import follow, show_preparation
from .report.summary import show_end
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
