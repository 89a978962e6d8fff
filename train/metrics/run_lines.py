"""Log lines about the run and its checkpoints rather than one step."""

import logging
import math
from collections.abc import Mapping

from ... import __version__
from ...distributed.dispatch.choose import dispatcher_of
from ...distributed.local_shard import local_shard_of
from ...distributed.muon import Muon
from ..cuda_graph import reason_against
from ..run import OpenRun, Resumed, Run

logger = logging.getLogger(__name__)


def write_start(run: OpenRun, resumed: Resumed | None, start_s: Mapping[str, float]) -> None:
    """Writes the log's first line, which describes the run and its machines.

    Also logs the damaged checkpoints that were set aside when the run was loaded.

    Args:
        run: the run.
        resumed: what it found; None: it starts from the beginning.
        start_s: seconds of each phase of this rank's start.
    """
    was_fetched = resumed is not None and resumed.was_fetched
    run.log.write(
        "start",
        run.progress.step,
        generation=run.generation,
        version=__version__,
        world_size=run.process.world_size,
        resumed_from_step=None if resumed is None else run.progress.step,
        **({"fetched_from_second_copy": True} if was_fetched else {}),
        layout=str(run.mesh.layout),
        device=str(run.process.device),
        steps=run.config.train.steps,
        parameters=count_global_parameters(run),
        expert_depths=run.config.model.expert_depths,
        kernels=run.backend,
        **({"optimizer": str(run.optimizer)} if isinstance(run.optimizer, Muon) else {}),
        **_dispatcher_facts(run),
        **_graph_facts(run),
        start_s=dict(start_s),
    )
    for damaged in [] if resumed is None else resumed.set_aside:
        logger.warning("%s; it is set aside as %s", damaged.why, damaged.path.name)
        run.log.write(
            "checkpoint_set_aside",
            damaged.step,
            path=damaged.path.name,
            why=damaged.why,
            resumed_from_step=run.progress.step,
        )


def log_saved(run: OpenRun) -> None:
    """Logs the checkpoints and second copies completed since the last call."""
    for record in run.checkpoints.poll():
        run.log.write(
            "checkpoint",
            record.step,
            seconds=round(record.seconds, 3),
            blocked_s=round(record.blocked_s, 5),
            verify_s=round(record.verify_s, 3),
            bytes=record.num_bytes,
            error=record.error,
        )
    for copy in run.checkpoints.poll_copies():
        run.log.write(
            "checkpoint_copy",
            copy.step,
            seconds=round(copy.seconds, 3),
            bytes=copy.num_bytes,
            error=copy.error,
        )


def count_global_parameters(run: Run) -> int:
    """Returns the number of parameters of the whole model, over all shards."""
    return sum(math.prod(local_shard_of(parameter).global_shape) for parameter in run.parameters)


def _graph_facts(run: Run) -> dict[str, str]:
    """Returns whether passes are captured as CUDA graphs, and if not, why; empty on CPUs."""
    device = run.process.device
    if device.type == "cpu":
        return {}
    layout = run.mesh.layout
    reason = reason_against(run.config, run.model, layout, backend=run.backend, device=device)
    return {"cuda_graph": "captured" if reason is None else f"no, {reason}"}


def _dispatcher_facts(run: Run) -> dict[str, str]:
    """Returns the dispatcher and why it was chosen; empty without one."""
    setup = dispatcher_of(run.model)
    if setup is None:
        return {}
    return {"dispatcher": setup.name} | ({"dispatcher_why": setup.why} if setup.why else {})
