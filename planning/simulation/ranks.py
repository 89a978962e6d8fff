"""Decides the simulated ranks: sizes of the world, its EP groups and its nodes."""

from dataclasses import dataclass

from ...distributed.layout import Layout, MeshConfig, check_experts, plan_layout
from ...model.config.model_config import ModelConfig
from ...train.config.run_config import Config
from .dispatch import Cluster
from .threads import MOST_THREADS

DEFAULT_EP = 8
DEFAULT_RANKS_PER_NODE = 8


@dataclass(frozen=True)
class RequestedRanks:
    """Holds the sizes that the user asked for; None leaves one to the mesh or a default.

    Replicas fill the world.
    """

    ep: int | None = None
    world_size: int | None = None
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        at_least_one(**vars(self))


def at_least_one(**options: int | None) -> None:
    """Checks options that count something.

    Raises:
        ValueError: an option is below 1.
    """
    for name, value in options.items():
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value} must be at least 1")


def make_cluster(config: Config, asked: RequestedRanks, dispatcher: str | None = None) -> Cluster:
    """Returns the simulated ranks: as asked, otherwise as `mesh` says, otherwise EP groups of 8, 8
    to a node.

    Raises:
        ValueError: the sizes do not fit each other or the model's experts, or there are too many
            ranks.
    """
    layout, per_node = layout_of(config, asked)
    if layout.world_size > MOST_THREADS:
        raise ValueError(
            f"{layout.world_size:,} ranks: at most {MOST_THREADS} can be simulated; use `moebius plan` "
            "for larger worlds"
        )
    return Cluster(layout, dispatcher or config.mesh.dispatcher, ranks_per_node=per_node)


def layout_of(config: Config, asked: RequestedRanks) -> tuple[Layout, int]:
    """Returns the layout and the number of ranks per node.

    `asked.ep` replaces the mesh's ep and replicas.

    Raises:
        ValueError: the sizes do not fit each other or the model's experts.
    """
    if config.train.precision == "bfloat16_only":
        raise ValueError(
            'train.precision="bfloat16_only" cannot be simulated, because the simulator keeps weights '
            'in float32; use train.precision="bfloat16", whose exchanges are the same'
        )
    mesh = config.mesh
    default_ep = mesh.ep if mesh.ep > 1 else min(DEFAULT_EP, asked.world_size or DEFAULT_EP)
    ep = asked.ep or default_ep
    replicas = 1 if asked.ep else mesh.dp_replicate or 1
    world_size = asked.world_size or (mesh.dp_shard or ep) * replicas
    layout = plan_layout(MeshConfig(ep=ep, dp_shard=mesh.dp_shard), world_size)
    check_experts(layout, experts_of(config.model))
    divides = world_size % DEFAULT_RANKS_PER_NODE == 0
    per_node = asked.ranks_per_node or (DEFAULT_RANKS_PER_NODE if divides else world_size)
    if world_size % per_node:
        raise ValueError(f"--ranks-per-node {per_node} must divide the {world_size} ranks")
    return layout, per_node


def experts_of(model: ModelConfig) -> dict[str, int]:
    """Returns the number of experts of each kind of layer.

    Raises:
        ValueError: the model has no experts.
    """
    counts = model.expert_counts()
    if not counts:
        raise ValueError("the model has no experts, so there is nothing to route")
    return counts
