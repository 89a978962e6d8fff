"""Prepares data on a cluster, or beside a job's ranks in a process bound to the supervisor.

    python -m moebius.cluster.prepare_data RUN_DIR --workers N
    python -m moebius.cluster.prepare_data RUN_DIR --address HOST:PORT --capacity N

It reads the run's configuration and reports progress to `preparation.jsonl` there. If it is killed, the
next one continues where it stopped. With `--workers`, it runs at the lowest priority, so that ranks come
first.
"""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..data_pipeline.errors import DataError
from ..data_pipeline.make.pools import LocalPool, SerialPool, TaskPool
from ..data_pipeline.make.prepare import OnPoison, prepare
from ..data_pipeline.manifest import DatasetManifest
from ..data_pipeline.prepare_config import PrepareConfig
from ..train.config.resize import CONFIG_VARIABLE
from .nodes import processes
from .report.data_progress import COMPLETE, EXIT_FAILED, FAILED, ProgressLog

if TYPE_CHECKING:
    from rich.console import Console

_LOWEST_PRIORITY = 19


def main(arguments: list[str] | None = None) -> int:
    """Prepares all data; returns the exit code."""
    processes.bind_to_parent()
    options = _parse(arguments)
    stored = options.run_dir / os.environ.get(CONFIG_VARIABLE, "config.json")
    values = json.loads(stored.read_bytes())
    config = PrepareConfig.model_validate(values["prepare"])
    directory = values["data"]["directory"]
    log = ProgressLog(options.run_dir)
    try:
        with _pool(options) as pool:
            prepare(config, directory, pool=pool, on_progress=log.write, if_changed="ignore")
    except DataError as error:
        log.end(FAILED, str(error))
        return EXIT_FAILED
    log.end(COMPLETE)
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m moebius.cluster.prepare_data")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--address")
    parser.add_argument("--capacity", type=int)
    return parser.parse_args(arguments)


@contextlib.contextmanager
def _pool(options: argparse.Namespace) -> Iterator[TaskPool]:
    """Yields the pool that runs the tasks."""
    if options.address is None:
        os.nice(_LOWEST_PRIORITY)
        if options.workers == 1:
            yield SerialPool()
        else:
            with LocalPool(options.workers) as local:
                yield local
        return
    from .places.ray_session import connected
    from .ray_tasks import RayPool

    with connected(options.address), RayPool(capacity=options.capacity) as pool:
        yield pool


def prepare_on_cluster(
    config: PrepareConfig,
    directory: str | Path,
    *,
    address: str,
    on_poison: OnPoison = "auto",
    console: "Console",
) -> DatasetManifest:
    """Prepares a folder with Ray tasks and shows the progress, for `moebius prepare --address`."""
    from .places.standing import cluster_at
    from .ray_tasks import RayPool
    from .report.live import show_preparation

    with cluster_at(address), RayPool() as pool, show_preparation(console) as on_progress:
        return prepare(config, directory, pool=pool, on_progress=on_progress, on_poison=on_poison)


if __name__ == "__main__":
    sys.exit(main())
