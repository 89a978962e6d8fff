"""A run on this machine without Ray: the same agent, generations and journal as on a cluster, with
one node.
"""

import threading
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..data_pipeline.make.prepare import prepare
from ..train.config.run_config import Config
from ..train.record.run_folder import open_run
from .job import THIS_MACHINE, JobStatus, Launch, begin_submission, read_status, refuse_if_running
from .nodes.processes import difference_from_linux
from .nodes.provider import ThisMachine
from .report.live import follow, show_preparation
from .report.summary import closing_words, draw_summary
from .shipped_code import record_environment
from .stop import interrupts_stop_the_job
from .supervise.background_data import BackgroundData, prepares_beside, workers_beside
from .supervise.job_supervisor import supervise


def train_here(
    config: Config, run_dir: Path, *, console: Console | None = None, live: bool | None = None
) -> JobStatus:
    """Trains with all ranks of the job on this machine, data preparation included; shows it all.

    Ctrl-C ends the run at a step boundary with a checkpoint; a second one ends it at once.

    Raises:
        JobError: a job is at work in this folder.
        ConfigError: the run folder cannot be written, or holds another run.
        DataError: the data cannot be prepared.
    """
    console = console or Console()
    run_dir = run_dir.absolute()
    refuse_if_running(run_dir)
    open_run(config, run_dir)
    if difference := difference_from_linux():
        console.print(Text(difference, style="yellow"))
    launch = _launch_of(config, run_dir)
    this_machine = ThisMachine(launch)  # its imports run beside the preparation
    try:
        if not launch.prepares_data:
            with show_preparation(console, live=live) as on_progress:
                prepare(config.prepare, config.data.directory, on_progress=on_progress)
        status = _run_and_show(launch, this_machine, console, live)
    finally:
        this_machine.release()
    picture = draw_summary(run_dir) if status.step is not None else None
    console.print(closing_words(status, picture=picture))
    return status


def _launch_of(config: Config, run_dir: Path) -> Launch:
    job = config.job
    return Launch(
        run_dir=str(run_dir),
        ranks_per_node=config.world_size,
        name=job.name,
        max_restarts=job.max_restarts,
        max_node_losses=job.max_node_losses,
        start_timeout_s=job.start_timeout_s,
        rehearse_failure_at_step=job.rehearse_failure_at_step,
        warm_start=job.warm_start,
        prepares_data=prepares_beside(config),
        where=THIS_MACHINE,
        needs_gpus=config.world_size if config.train.device == "cuda" else 0,
    )


def _preparation(launch: Launch) -> BackgroundData | None:
    if not launch.prepares_data:
        return None
    return BackgroundData(launch, lambda: workers_beside(launch.world_size))


def _run_and_show(
    launch: Launch, this_machine: ThisMachine, console: Console, live: bool | None
) -> JobStatus:
    """The job in this thread, which receives Ctrl-C; its picture in another."""
    run_dir = Path(launch.run_dir)
    begin_submission(launch, **record_environment(run_dir, None))
    ended = threading.Event()
    screen = threading.Thread(
        target=follow,
        args=(run_dir,),
        kwargs={"console": console, "live": live, "until": lambda _: ended.is_set()},
    )
    screen.start()
    try:
        with interrupts_stop_the_job(run_dir):
            supervise(launch, this_machine, _preparation(launch))
    finally:
        ended.set()
        screen.join()
    return read_status(run_dir)
