"""The data server of a node, as its ranks find it: the first rank starts it and tells the others
where it is, through the store of the process group.

The first rank also decides whether there is one: the others may see a folder that has grown since.
"""

import logging
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..data_pipeline.errors import DataError
from ..data_pipeline.serve.job import ServerJob
from ..data_pipeline.serve.start import ServerHandle, start_server, wants_server
from ..distributed.process.process import Process
from .config.run_config import Config

logger = logging.getLogger(__name__)


def open_data_server(config: Config, process: Process, start_sample: int) -> ServerHandle | None:
    """Returns this node's data server; None: each rank decodes for itself.

    A call of all ranks of a node.

    Raises:
        DataError: the server is to be "on" and cannot be started, or the folder cannot be read.
    """
    wanted = config.data.server
    if wanted == "off" or (wanted == "auto" and process.ranks_per_node == 1):
        return None
    turn = process.store.add(f"data_server/turn/{process.rank}", 1)
    key = f"data_server/{process.rank - process.local_rank}/{turn}"
    if process.local_rank:
        return _find(process, key)
    handle = None
    try:
        handle = _start(config, process, start_sample)
    finally:  # the others wait for an answer, whatever it is
        process.store.set(key, "" if handle is None else str(handle.address))
    return handle


def _start(config: Config, process: Process, start_sample: int) -> ServerHandle | None:
    if not wants_server(config.data, process.ranks_per_node):
        return None
    job = ServerJob(
        data=config.data,
        global_batch=config.train.global_batch,
        num_ranks=process.world_size,
        first_rank=process.rank,
        ranks_here=process.ranks_per_node,
        start_sample=start_sample,
    )
    try:
        return start_server(job)
    except DataError as error:
        if config.data.server == "on":
            raise
        logger.warning("%s; until then each rank decodes for itself", error)
        return None


def _find(process: Process, key: str) -> ServerHandle | None:
    try:
        process.store.wait([key], timedelta(seconds=process.timeout_s))
    except dist.DistStoreError:
        logger.warning("the node's first rank says nothing of a data server: decoding without one")
        return None
    address = process.store.get(key).decode()
    return ServerHandle(Path(address)) if address else None
