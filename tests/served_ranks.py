"""A data server in a thread of the test, and ranks that read through it."""

import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.read.loader import Batch, Loader
from moebius.data_pipeline.serve.protocol import ServerJob
from moebius.data_pipeline.serve.server import DataServer
from moebius.data_pipeline.serve.start import ServerHandle

GLOBAL_BATCH = 8


def job_of(data: DataConfig, num_ranks: int, **changes: Any) -> ServerJob:
    """What a server is told that is alone on its node with all ranks."""
    values: dict[str, Any] = {
        "data": data,
        "global_batch": GLOBAL_BATCH,
        "num_ranks": num_ranks,
        "first_rank": 0,
        "ranks_here": num_ranks,
        "start_sample": 0,
    }
    return ServerJob(**(values | changes))


@contextlib.contextmanager
def serving(job: ServerJob) -> Iterator[tuple[DataServer, ServerHandle]]:
    """A server that runs in a thread."""
    folder = Path(tempfile.mkdtemp(prefix="moebius-data-"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / "socket"))
    listener.listen(16)
    server = DataServer(job, listener, folder)
    thread = threading.Thread(target=server.serve, name="data-server")
    thread.start()
    try:
        yield server, ServerHandle(folder / "socket")
    finally:
        server.stop()
        thread.join(timeout=20)
        assert not thread.is_alive()
        assert not folder.exists()


def open_ranks(
    data: DataConfig,
    num_ranks: int,
    handle: ServerHandle | None = None,
    *,
    ranks: range | None = None,
    **options: Any,
) -> list[Loader]:
    """One loader per rank, or per one of `ranks`."""
    values: dict[str, Any] = {"global_batch": GLOBAL_BATCH, "micro_batch": 1, "poll_s": 0.02}
    return [
        Loader(data, **(values | options), rank=rank, num_ranks=num_ranks, server=handle)
        for rank in ranks or range(num_ranks)
    ]


def take(loaders: list[Loader], steps: int) -> list[list[Batch]]:
    """So many steps, each with the batches of all ranks."""
    return [[next(loader) for loader in loaders] for _ in range(steps)]


def close(loaders: list[Loader]) -> None:
    """Closes them all."""
    for loader in loaders:
        loader.close()


def seen(steps: list[list[Batch]]) -> list:
    """All that a model would see of them."""
    return [
        [
            (
                batch.tokens.tolist(),
                None if batch.loss_mask is None else batch.loss_mask.tolist(),
                None if batch.document_ids is None else batch.document_ids.tolist(),
                batch.first_sample,
                batch.digest,
            )
            for batch in step
        ]
        for step in steps
    ]


def read(data: DataConfig, num_ranks: int, steps: int, handle: ServerHandle | None, **options: Any):
    """All that a model would see in so many steps."""
    loaders = open_ranks(data, num_ranks, handle, **options)
    try:
        return seen(take(loaders, steps))
    finally:
        close(loaders)


def until(condition: Callable[[], object]) -> None:
    """Waits for a condition."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
