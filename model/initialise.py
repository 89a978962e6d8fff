"""Starting values. Every parameter is made together with the rule that it starts by, so a new layer
or router says it itself.

Every tensor has its own random stream, keyed by (seed, name), and is drawn whole before a rank
keeps its share: so the start is the same for every number of ranks, and no rank ever holds more
than one full tensor beyond its own.

`Initializers` gathers the published rules. With c = √(2/L), L the depth *steps* (not the distinct
layers); c = 1 in post-norm:
  paper, release   up-projections, routers, Q, K, V   N(0, c/√D)
                   down-projections                   N(0, c/√(E·F)), all experts counted as fan-in
                   O                                  N(0, c/√(H·C))
  scaled           truncated normal of std √(scale / fan-in), cut at ±2·scale; a down-projection's fan-in is F
                   (Switch, arXiv 2101.03961, §2.4; Mixture of Tokens, arXiv 2310.15961)
  sut              expert tensors U(±1/fan-in), not of its root; expert biases U(±1/√fan-out); routers and the halting gate
                   torch's default U(±1/√fan-in), weight and bias; K and V Xavier, gain 1/√2 (released code of arXiv 2310.07096)
  all              embedding N(0, 1/√D), head U(−1/√D, 1/√D), weight and bias; scaled: the embedding's fan-in is 1,
                   and with head=scaled the head's weight is as every other, its bias 0
Dense layers beside `paper`: truncated normal, rescaled to a standard deviation of exactly
√(2/(L·fan-in)); biases 0.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Initializer = Callable[[torch.Size, torch.Generator], Tensor]


def parameter(*shape: int, init: Initializer) -> nn.Parameter:
    """Makes a parameter without values that knows its initializer."""
    value = nn.Parameter(torch.empty(shape))
    value.initializer = init  # type: ignore[attr-defined]
    return value


def draw(name: str, parameter: nn.Parameter, seed: int) -> Tensor:
    """Draws the starting value of one parameter, whole, float32 on the CPU.

    Raises:
        ValueError: the parameter was made without a rule, which is a fault of its layer.
    """
    init: Initializer | None = getattr(parameter, "initializer", None)
    if init is None:
        raise ValueError(
            f"no starting value is known for {name!r} of shape {tuple(parameter.shape)}: make it "
            "with "
            "`parameter(..., init=...)`"
        )
    return init(parameter.shape, torch.Generator().manual_seed(_stream(seed, name)))


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fills a whole model with starting values (every expert on this rank)."""
    for name, value in model.named_parameters():
        value.copy_(draw(name, value, seed))


def _stream(seed: int, name: str) -> int:
    return (
        int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
        >> 1
    )


def zeros(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Starts all elements at 0."""
    return torch.zeros(shape)


def ones(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Starts all elements at 1."""
    return torch.ones(shape)


def constant(value: float) -> Initializer:
    """Starts all elements at one value."""
    return lambda shape, generator: torch.full(shape, value)


def normal(std: float) -> Initializer:
    """Draws all elements from N(0, std), where `std` is the standard deviation."""
    return lambda shape, generator: torch.empty(shape).normal_(0, std, generator=generator)


def uniform(bound: float) -> Initializer:
    """Draws all elements from the uniform distribution U(−bound, bound)."""
    return lambda shape, generator: torch.empty(shape).uniform_(-bound, bound, generator=generator)


def xavier_uniform(gain: float = 1.0) -> Initializer:
    """Draws a matrix from U(−a, a) with a = gain·√(6 / (fan-in + fan-out))."""
    return lambda shape, generator: torch.nn.init.xavier_uniform_(
        torch.empty(shape), gain, generator=generator
    )


def truncated_normal(std: float, cut: float) -> Initializer:
    """Draws from N(0, std), cut at ±cut (absolute, not in standard deviations)."""
    return lambda shape, generator: torch.nn.init.trunc_normal_(
        torch.empty(shape), std=std, a=-cut, b=cut, generator=generator
    )


def exact_std(std: float) -> Initializer:
    """Draws from a truncated normal and rescales it to exactly this standard deviation."""

    def init(shape: torch.Size, generator: torch.Generator) -> Tensor:
        value = torch.nn.init.trunc_normal_(torch.empty(shape), generator=generator)
        return value * (std / value.std())

    return init


def equal_rows(init: Initializer) -> Initializer:
    """Gives every row equal norm and keeps the global standard deviation.

    So no expert starts ahead of the others.
    """

    def equal(shape: torch.Size, generator: torch.Generator) -> Tensor:
        weight = init(shape, generator)
        rows = weight / weight.norm(dim=-1, keepdim=True)
        return rows * (weight.std() / rows.std())

    return equal


def rescaled_rows(init: Initializer) -> Initializer:
    """Scales rows to unit norm, then by own std / global std: as published, nearly no change."""

    def rescaled(shape: torch.Size, generator: torch.Generator) -> Tensor:
        weight = init(shape, generator)
        rows = weight / weight.norm(dim=-1, keepdim=True)
        return rows * (weight.std(dim=-1, keepdim=True) / rows.std())

    return rescaled


def unit_expert_axis(init: Initializer) -> Initializer:
    """Gives every [in, out] position unit norm over all experts, keeping the global std."""

    def unit(shape: torch.Size, generator: torch.Generator) -> Tensor:
        weight = init(shape, generator)
        rows = weight / weight.norm(dim=0, keepdim=True)
        return rows * (weight.std() / rows.std())

    return unit


@dataclass(frozen=True)
class Initializers:
    """Gathers the initializers of one architecture's parts; sizes are the model's."""

    rule: str  # paper, release, scaled or sut
    d_model: int
    num_layers: int  # L of c = √(2/L); 2 stands for c = 1
    scale: float | None  # of the rule scaled
    expert_axis_norm: bool
    scaled_head: bool = False  # the read-out starts as every other matrix does

    def router(self, d_row: int) -> Initializer:
        """Returns the initializer of the feed-forward's router."""
        if self.rule == "sut":
            return uniform(d_row**-0.5)
        init = self._sparse(d_row)
        return equal_rows(init) if self.rule == "release" else init

    def expert_up(self, d_in: int) -> Initializer:
        """Returns the initializer of the projection into an expert."""
        return uniform(1 / d_in) if self.rule == "sut" else self._sparse(d_in)

    def expert_down(self, num_experts: int, d_expert: int) -> Initializer:
        """Returns the initializer of the projection out of an expert.

        In the MoEUT rule the fan-in is that of all experts.
        """
        if self.rule == "sut":
            return uniform(1 / d_expert)
        return self._sparse(d_expert if self.rule == "scaled" else num_experts * d_expert)

    def expert_biases(self, d_out: int, d_expert: int) -> tuple[Initializer, Initializer]:
        """Returns the initializers of the up- and of the down-projection's bias.

        SUT asks for the fan-in of an [in, out] matrix and so gets the output width.
        """
        if self.rule == "sut":
            return uniform(d_expert**-0.5), uniform(d_out**-0.5)
        return zeros, zeros

    def attention_router(self) -> Initializer:
        """Returns the initializer of SwitchHead's V and O routers."""
        init = self._sparse(self.d_model)
        return init if self.rule == "scaled" else rescaled_rows(init)

    def attention_experts(self, fan_in: int) -> Initializer:
        """Returns the initializer of SwitchHead's V and O experts and MoMHA's Q and O experts."""
        init = uniform(1 / fan_in) if self.rule == "sut" else self._sparse(fan_in)
        return unit_expert_axis(init) if self.expert_axis_norm else init

    def switchhead(self, fan_in: int) -> Initializer:
        """Returns the initializer of SwitchHead's dense matrices."""
        return self._sparse(fan_in)

    def momha_dense(self, fan_in: int) -> Initializer:
        """Returns the initializer of MoMHA's K and V."""
        return xavier_uniform(2**-0.5) if self.rule == "sut" else self._sparse(fan_in)

    def dense(self, fan_in: int) -> Initializer:
        """Returns the initializer of a dense layer's attention and feed-forward."""
        if self.rule == "scaled":
            return self._sparse(fan_in)
        return exact_std(math.sqrt(2 / (self.num_layers * fan_in)))

    def embedding(self) -> Initializer:
        """Returns the initializer of the tokens' and of learned positions' embeddings."""
        return self._sparse(1) if self.rule == "scaled" else normal(self.d_model**-0.5)

    def head(self) -> Initializer:
        """Returns the initializer of the read-out's weight."""
        return self._sparse(self.d_model) if self.scaled_head else uniform(self.d_model**-0.5)

    def head_bias(self) -> Initializer:
        """Returns the initializer of the read-out's bias: zero beside a scaled weight."""
        return zeros if self.scaled_head else uniform(self.d_model**-0.5)

    def _sparse(self, fan_in: int) -> Initializer:
        if self.scale is not None:
            return truncated_normal(math.sqrt(self.scale / fan_in), 2 * self.scale)
        return normal(math.sqrt(2 / self.num_layers) / math.sqrt(fan_in))
