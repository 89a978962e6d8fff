"""Records of a step's kernels: one kernel and its time, and what a rank computes in a pass."""

from collections.abc import Callable
from dataclasses import dataclass

from ..model.config.attention_config import SwitchHeadConfig
from ..model.config.model_config import ModelConfig
from ..model.routers.sigmoid import SigmoidConfig
from .hardware import Hardware
from .roofline import Precision, Time, product_time, stream_time


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step, or some that pass over memory one after the other."""

    part: str
    name: str
    forward: bool
    time: Time  # of one call
    calls: float = 1.0  # in a forward and a backward pass
    flops: float = 0.0  # of one call's product, without padding

    @property
    def seconds(self) -> float:
        """Returns what all its calls take."""
        return self.calls * self.time.seconds


@dataclass(frozen=True)
class Shape:
    """What one rank computes in a forward and backward pass."""

    model: ModelConfig
    tokens: int
    seq_len: int
    precision: str = "bfloat16"
    ep: int = 1
    # Routes of this rank over the mean, of the feed-forward and of V and O.
    hottest: float = 1.0
    hottest_projection: float = 1.0
    spread: float = 0.0  # coefficient of variation of the experts' loads
    deferred: bool = True  # K3 over all repeats at once; not where layers are recomputed
    # Experts of the feed-forward, and of one head, where a plan rounds them up.
    num_experts: int | None = None
    head_experts: int | None = None

    @property
    def products(self) -> Precision:
        """Returns the precision of the products as the machine knows it."""
        return "bf16" if self.precision == "bfloat16" else "fp32"

    @property
    def element(self) -> int:
        """Returns the bytes of an element in products."""
        return 2 if self.precision == "bfloat16" else 4

    @property
    def projects_by_experts(self) -> bool:
        """Returns whether V and O are banks of experts."""
        attention = self.model.attention
        return isinstance(attention, SwitchHeadConfig) and attention.has_experts

    @property
    def choice(self) -> "Choice":
        """Returns what a feed-forward's router decides."""
        experts = self.model.experts
        assert experts is not None
        count = self.num_experts or experts.num_experts
        top_k = experts.router.active_experts(count, sequence_rows=1)
        if not isinstance(experts.router, SigmoidConfig):
            return Choice(count, 1, top_k, by_softmax=True)
        return Choice(count, 1, top_k, drops=experts.router.expert_dropout > 0)

    @property
    def head_choice(self) -> "Choice":
        """Returns what V's router decides, and O's."""
        attention = self.model.attention
        assert isinstance(attention, SwitchHeadConfig)
        count = self.head_experts or attention.num_experts
        return Choice(
            count, attention.num_heads, attention.top_k, drops=attention.expert_dropout > 0
        )


@dataclass(frozen=True)
class Choice:
    """What one router decides: K of each head's A experts."""

    experts: int  # A
    heads: int
    top_k: float  # K
    drops: bool = False  # experts, by chance, in training
    by_softmax: bool = False  # gates; else sigmoids

    @property
    def outputs(self) -> int:
        """Returns the logits of a token, which are the experts of all heads."""
        return self.heads * self.experts

    @property
    def routes(self) -> float:
        """Returns the routes of a token."""
        return self.heads * self.top_k


def product(
    hardware: Hardware,
    part: str,
    name: str,
    sides: tuple[float, float, float],
    precision: Precision,
    *,
    forward: bool = True,
    calls: float = 1,
) -> Kernel:
    """Returns a library's product of (rows, inner) by (inner, columns); `sides`: rows, columns, inner."""
    rows, columns, inner = sides
    time = product_time(hardware, rows, columns, inner, precision)
    return Kernel(part, name, forward, time, calls, 2 * rows * columns * inner)


def passes_over_memory(
    hardware: Hardware, shape: Shape, part: str, *, width: float | None = None
) -> Callable[..., Kernel]:
    """Returns what makes a kernel of a part that passes over memory.

    Its bytes are per token and channel, of `width` channels; with `rows` per token.
    """

    def kernel(
        name: str,
        num_bytes: float,
        *,
        rows: bool = False,
        launches: float = 1,
        calls: float = 1,
        forward: bool = True,
    ) -> Kernel:
        channels = 1 if rows else shape.model.d_model if width is None else width
        time = stream_time(hardware, num_bytes * shape.tokens * channels, launches=launches)
        return Kernel(part, name, forward, time, calls)

    return kernel
