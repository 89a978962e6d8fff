"""Holds the cost model's question (a scenario, a layout) and its answer (memory, time, calls)."""

from dataclasses import dataclass, fields

from .hardware import Hardware
from .measured import MeasuredTable
from .routing_skew import RoutingSkew
from .workload import Workload


@dataclass(frozen=True)
class Scenario:
    """What is the same for every layout that is compared: model, machine, tokens, routing."""

    workload: Workload
    hardware: Hardware
    tokens: int  # per rank and micro-batch
    skew: RoutingSkew
    table: MeasuredTable | None = None
    micro_batches: int = 1  # whose gradients a rank adds up in a step


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout that could be taken, and how a run would use it."""

    dp_replicate: int
    dp_shard: int
    ep: int
    sharding: str  # of the dense weights, and of the experts over the ranks that hold the same ones
    dispatcher: str
    recompute: str = "none"

    @property
    def world_size(self) -> int:
        """Returns the number of ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        """Returns how many ranks of a shard group hold the same experts."""
        return self.dp_shard // self.ep

    def __str__(self) -> str:
        return (
            f"dp_replicate {self.dp_replicate} × dp_shard {self.dp_shard}, ep {self.ep}, "
            f"sharding {self.sharding}"
        )


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank with the most rows, at their peak."""

    weights: float  # in the precision of the products: copies, or gathered ones
    gradients: float
    master: float
    moments: float
    activations: float
    routed: float  # rows that came, their hidden rows, and the buffers they travel through
    logits: float

    @property
    def total(self) -> float:
        """Returns the sum of all parts."""
        return sum(getattr(self, entry.name) for entry in fields(self))


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, without what is hidden behind other parts."""

    compute: float
    exchange: float
    gather: float
    gradients: float
    optimizer: float
    host: float  # that the device waits for operations to be launched
    straggler: float

    @property
    def device(self) -> float:
        """Returns what the device works and sends, alone: where the host is what all wait for it
        tells layouts apart.
        """
        return self.total - self.host - self.straggler

    @property
    def total(self) -> float:
        """Returns the sum of all parts."""
        return sum(getattr(self, entry.name) for entry in fields(self))


@dataclass(frozen=True)
class Collective:
    """One kind of call of a step, as one rank sees it."""

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
        """Returns the seconds of a step, hidden or not."""
        return self.calls * self.seconds_per_call


@dataclass(frozen=True)
class Prediction:
    """What a step on one layout costs."""

    candidate: LayoutCandidate
    memory: Memory
    time: StepTime
    collectives: tuple[Collective, ...]
    fits: bool
    tokens_per_s: float  # of the whole world
    mfu: float  # model FLOPs, recomputation not counted, over the peak
