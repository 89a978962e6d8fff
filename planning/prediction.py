"""Defines the cost model's question (scenario and layout) and its answer (memory, time, calls)."""

from dataclasses import dataclass

from .hardware import Hardware
from .routing_skew import RoutingSkew
from .workload import Workload


@dataclass(frozen=True)
class Scenario:
    """Holds what all compared layouts share: model, machine, tokens and routing."""

    workload: Workload
    hardware: Hardware
    tokens: int  # per rank and micro-batch
    skew: RoutingSkew
    micro_batches: int = 1  # accumulated by a rank per step
    captures: bool = False  # as CUDA graphs, where the layout admits it
    average_bytes: int = 0  # per weight, of their averages


@dataclass(frozen=True)
class LayoutCandidate:
    """Describes a possible layout and how a run would use it."""

    dp_replicate: int
    dp_shard: int
    ep: int
    sharding: str  # of dense weights, and of experts over the ranks that hold the same ones
    dispatcher: str
    recompute: str = "none"

    @property
    def world_size(self) -> int:
        """Returns the number of ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def sharing(self) -> int:
        """Returns how many ranks share the work of Muon's updates."""
        return self.dp_shard if self.sharding == "fsdp" else self.world_size

    @property
    def efsdp(self) -> int:
        """Returns how many ranks of a shard group hold the same experts."""
        return self.dp_shard // self.ep

    def __str__(self) -> str:
        return (
            f"dp_replicate {self.dp_replicate} × dp_shard {self.dp_shard}, ep {self.ep}, "
            f"sharding {self.sharding}"
        )


class Parts:
    """Holds figures that add up."""

    @property
    def total(self) -> float:
        """Returns the sum of all parts."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Memory(Parts):
    """Holds the peak bytes on the rank with the most rows."""

    weights: float  # copies or gathered weights, in the precision of the products
    gradients: float
    master: float
    moments: float
    activations: float
    routed: float  # received rows, their hidden rows, and send buffers
    logits: float


@dataclass(frozen=True)
class StepTime(Parts):
    """Holds the seconds of a step by part, without what other parts hide."""

    compute: float
    exchange: float
    gather: float
    gradients: float
    optimizer: float
    host: float  # the device waiting for launches
    straggler: float

    @property
    def device(self) -> float:
        """Returns the device's own seconds, which rank layouts that all wait for the host."""
        return self.total - self.host - self.straggler


@dataclass(frozen=True)
class PlannedCollective:
    """Describes one kind of collective call in a step, seen from one rank."""

    name: str
    op: str
    group_size: int
    crosses_nodes: bool
    calls: float  # per step
    bytes_per_call: float  # that leave the rank
    seconds_per_call: float

    @property
    def num_bytes(self) -> float:
        """Returns the bytes that leave the rank in a step."""
        return self.calls * self.bytes_per_call

    @property
    def seconds(self) -> float:
        """Returns the seconds per step, hidden or not."""
        return self.calls * self.seconds_per_call


@dataclass(frozen=True)
class Prediction:
    """Holds the predicted cost of a step on one layout."""

    candidate: LayoutCandidate
    memory: Memory
    time: StepTime
    collectives: tuple[PlannedCollective, ...]
    fits: bool
    tokens_per_s: float  # of the whole world
    mfu: float  # model FLOPs without recomputation, over the peak
    eager_host_s: float  # of a step's launches one by one
