"""One run on different numbers of ranks: which numbers fit, and with which mesh.

A job that lost a node may continue with fewer. The result is the same: the global batch, the order
of samples and the random streams do not depend on ranks, and loading reshards a checkpoint. The
mesh must fit, and changes as little as possible:

1. as configured;
2. with as many replicas as fill the world (`dp_replicate`), and as few shards as EP needs;
3. with fewer ranks in an EP group.

It does not check whether each rank's larger share fits its memory.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the node's agent imports this module, and must not import torch
    from ...distributed.layout import MeshConfig
    from .run_config import Config

CONFIG_VARIABLE = "MOEBIUS_CONFIG"  # in a rank's environment: its file in the run folder
MESH_VARIABLE = "MOEBIUS_MESH"  # in a rank's environment: keys of the mesh to change, as JSON


def mesh_for(config: "Config", world_size: int) -> "MeshConfig | None":
    """Returns a run's mesh on `world_size` ranks; None: none fits."""
    for mesh in _candidates(config.mesh, world_size):
        try:
            config.model_copy(update={"mesh": mesh}).check_world(world_size)
        except ValueError:
            continue
        return mesh
    return None


def _candidates(mesh: "MeshConfig", world_size: int) -> Iterator["MeshConfig"]:
    yield mesh
    divisors = [size for size in range(world_size, 0, -1) if world_size % size == 0]
    for ep in [size for size in divisors if size <= mesh.ep]:
        change: dict[str, int | None] = {"ep": ep, "dp_replicate": None}
        if ep == 1:  # there is nowhere to move experts to
            change |= {"rebalance_every": 0, "replicas": 0}
        if mesh.sharding == "fsdp":
            for dp_shard in [size for size in divisors if size <= (mesh.dp_shard or world_size)]:
                yield mesh.model_copy(update=change | {"dp_shard": dp_shard})
        else:
            yield mesh.model_copy(update=change | {"dp_shard": None})


def layouts_for(config: "Config", num_nodes: Sequence[int]) -> dict[int, dict[str, object]]:
    """Returns the numbers of nodes that fit, each with the mesh keys to change."""
    layouts = {}
    for number in num_nodes:
        mesh = mesh_for(config, number * config.job.ranks_per_node)
        if mesh is not None:
            configured = config.mesh.model_dump()
            layouts[number] = {
                key: value for key, value in mesh.model_dump().items() if value != configured[key]
            }
    return layouts


def with_mesh_of(config: "Config", environment: Mapping[str, str]) -> "Config":
    """Returns the configuration with the mesh that the supervisor chose for this world."""
    changed = json.loads(environment.get(MESH_VARIABLE, "{}"))
    return config.model_copy(update={"mesh": config.mesh.model_copy(update=changed)})
