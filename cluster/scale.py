"""Changes the number of nodes of a running job: `moebius scale RUN N`.

The request is a file in the run folder, so it outlives the supervisor. The supervisor pauses the job at the
next step boundary once the cluster has enough nodes, and continues on N nodes. The next submission uses
job.num_nodes again.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .job import (
    SCALE,
    THIS_MACHINE,
    JobError,
    Journal,
    current_submission,
    read_status,
    write_atomically,
)


@dataclass(frozen=True)
class ScaleRequest:
    """Holds a requested number of nodes."""

    num_nodes: int
    # possible numbers of nodes, with the mesh keys that change; None: any number
    layouts: Mapping[int, Mapping[str, Any]] | None


def request_scale(run_dir: Path, num_nodes: int) -> None:
    """Asks the job to continue on `num_nodes` nodes from the next step boundary.

    With fewer nodes in the cluster, the job continues unchanged until there are more.

    Raises:
        JobError: there is no job, it has ended, or it does not fit this number of nodes; the message lists
            numbers that do.
    """
    status = read_status(run_dir)
    if status.state.is_final:
        raise JobError(
            f"{run_dir}: the job has ended ({status.state}); continue it on {num_nodes} node(s) "
            f"with `moebius resume {run_dir} job.num_nodes={num_nodes}`"
        )
    if _where(run_dir) == THIS_MACHINE:
        raise JobError(
            f"{run_dir}: the job runs on one machine without a cluster: stop it, then `moebius "
            "resume` it on a cluster"
        )
    if num_nodes < 1:
        raise JobError(f"a job needs at least 1 node, got {num_nodes}")
    request = ScaleRequest(num_nodes, _layouts(run_dir, num_nodes))
    write_atomically(run_dir / SCALE, json.dumps(asdict(request)))


def scale_requested(run_dir: Path) -> ScaleRequest | None:
    """Returns the request in the run folder; None without one.

    Raises:
        JobError: the file is damaged.
    """
    path = run_dir / SCALE
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        layouts = said["layouts"]
        if layouts is not None:
            layouts = {int(number): mesh for number, mesh in layouts.items()}
        return ScaleRequest(int(said["num_nodes"]), layouts)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise JobError(
            f"{path} is damaged ({error}): remove it, and set the number of nodes (`moebius "
            f"resume {run_dir} job.num_nodes=N`, or `moebius scale {run_dir} N`)"
        ) from None


def _where(run_dir: Path) -> str:
    submitted = current_submission(Journal(run_dir).entries())[0]
    return submitted.details.get("where", "")


def _layouts(run_dir: Path, num_nodes: int) -> dict[int, dict[str, object]] | None:
    """Returns the possible numbers of nodes up to `num_nodes`; None without a configuration."""
    from ..train.config.resize import layouts_for
    from ..train.config.run_config import Config

    if not (run_dir / "config.json").exists():
        return None
    config = Config.load(run_dir / "config.json")
    layouts = layouts_for(config, range(1, num_nodes + 1))
    if num_nodes not in layouts:
        more = layouts_for(config, range(num_nodes + 1, 2 * num_nodes + 1))
        fitting = ", ".join(str(number) for number in [*layouts, *more]) or "none"
        raise JobError(
            f"the run does not fit {num_nodes} node(s) of {config.job.ranks_per_node} rank(s) "
            f"(train.global_batch={config.train.global_batch}, "
            f"train.micro_batch={config.train.micro_batch}, mesh.ep={config.mesh.ep}); numbers of "
            f"nodes up to {2 * num_nodes} that fit: {fitting}"
        )
    return layouts
