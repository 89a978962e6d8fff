"""Another number of nodes for a job that runs: `moebius scale RUN N`.

The wish is a file in the run folder, which the supervision reads: the job pauses at the next step
boundary and goes on with so many nodes, as soon as the cluster has them. Being a file it outlives
the supervisor, and `moebius resume` takes it along unless it is given another job.num_nodes; a new
`moebius submit` goes by job.num_nodes again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .job import (
    SCALE,
    THIS_MACHINE,
    JobError,
    Journal,
    current_submission,
    read_status,
    write_atomically,
)

if TYPE_CHECKING:
    from ..train.config.run_config import Config


@dataclass(frozen=True)
class ScaleRequest:
    """Says how many nodes a job is to have."""

    num_nodes: int
    # The numbers of nodes that fit, with the keys of the mesh that change; None: any number does.
    layouts: Mapping[int, Mapping[str, Any]] | None


def request_scale(run_dir: Path, num_nodes: int) -> ScaleRequest:
    """Asks the job to go on with `num_nodes` nodes from the next step boundary on.

    For the command line: `moebius scale RUN N` calls this and returns; `status --watch` shows the
    rest. If the cluster has fewer nodes the job goes on as it is until it has more.

    Raises:
        JobError: there is no job, it has ended, or the run cannot be divided so; the message names
            numbers that fit.
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
    layouts = _layouts(run_dir, num_nodes)
    request = ScaleRequest(num_nodes, layouts)
    write_request(run_dir, request)
    return request


def write_request(run_dir: Path, request: ScaleRequest) -> None:
    """Leaves a request where the supervision looks for it."""
    write_atomically(run_dir / SCALE, json.dumps(asdict(request)))


def request_to_keep(
    run_dir: Path, config: "Config", overrides: Sequence[str]
) -> ScaleRequest | None:
    """Returns what a resumed job is to take along of an earlier `moebius scale`.

    Args:
        config: with which the job is resumed: other numbers of nodes may fit it.
        overrides: those of the command line; a job.num_nodes among them goes before.

    Raises:
        JobError: the configuration does not fit that number of nodes any more.
    """
    if any(each.startswith("job.num_nodes=") for each in overrides):
        return None
    if (request := scale_requested(run_dir)) is None:
        return None
    return ScaleRequest(request.num_nodes, _layouts_of(config, request.num_nodes))


def scale_requested(run_dir: Path) -> ScaleRequest | None:
    """Returns what was asked for, or None.

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
    """Returns the numbers of nodes up to `num_nodes` that fit; None where no configuration says."""
    from ..train.config.run_config import Config

    if not (run_dir / "config.json").exists():
        return None
    return _layouts_of(Config.load(run_dir / "config.json"), num_nodes)


def _layouts_of(config: "Config", num_nodes: int) -> dict[int, dict[str, object]]:
    from ..train.config.resize import layouts_for

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
