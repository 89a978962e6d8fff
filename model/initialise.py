"""Starting values. A parameter is created together with its initializer, so each layer or router
states its own.

Every tensor has its own random stream, keyed by (seed, name), and is drawn whole before a rank
keeps its share. The start is therefore the same for any number of ranks, and no rank holds more
than one full tensor beyond its own.

`Initializers` collects the published rules. With c = √(2/L), L the depth *steps* (not the distinct
layers); c = 1 in post-norm:
  paper, release   up-projections, routers, Q, K, V   N(0, c/√D)
                   down-projections                   N(0, c/√(E·F)), all experts counted as fan-in
                   O                                  N(0, c/√(H·C))
  scaled           truncated normal of std √(scale / fan-in), cut at ±2·scale; a down-projection's fan-in is F
                   (Switch, arXiv 2101.03961, §2.4; Mixture of Tokens, arXiv 2310.15961)
  sut              expert tensors U(±1/fan-in), without the root; expert biases U(±1/√fan-out); routers and the halting gate
                   torch's default U(±1/√fan-in), weight and bias; K and V Xavier, gain 1/√2
                   (released code of arXiv 2310.07096)
  takase           truncated normal of std √(2/(5·D)), cut at 3 std, embedding and head too; O and down-projections divided by
                   √(2·L) (Takase et al., arXiv 2312.16903; Huginn, arXiv 2502.05171)
  normal           every matrix N(0, std), embedding, head, routers and sinks too; biases 0 (Mixtral, Qwen, DeepSeek, …)
  others           embedding N(0, 1/√D), head U(−1/√D, 1/√D), weight and bias; scaled: the embedding's fan-in is 1,
                   and head=scaled treats the head's weight like any other, with bias 0
Dense layers under `paper`: truncated normal, rescaled to a standard deviation of exactly
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
    """Creates a parameter without values that knows its initializer."""
    value = nn.Parameter(torch.empty(shape))
    value.initializer = init  # type: ignore[attr-defined]
    return value


def draw(name: str, parameter: nn.Parameter, seed: int) -> Tensor:
    """Draws one parameter's starting value, whole, float32 on the CPU.

    Raises:
        ValueError: the parameter has no initializer, which is a bug of its layer.
    """
    init: Initializer | None = getattr(parameter, "initializer", None)
    if init is None:
        raise ValueError(
            f"{name!r} of shape {tuple(parameter.shape)} has no initializer: create it with "
            "`parameter(..., init=...)`"
        )
    return init(parameter.shape, torch.Generator().manual_seed(_stream(seed, name)))


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fills a whole model, with every expert on this rank, with starting values."""
    for name, value in model.named_parameters():
        value.copy_(draw(name, value, seed))


def _stream(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def zeros(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Starts all elements at 0."""
    return torch.zeros(shape)


def ones(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Starts all elements at 1."""
    return torch.ones(shape)


def identity(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Starts a matrix as the identity."""
    return torch.eye(*shape)


def constant(value: float) -> Initializer:
    """Starts all elements at one value."""
    return lambda shape, generator: torch.full(shape, value)


def normal(std: float) -> Initializer:
    """Draws from a normal distribution of mean 0 and standard deviation `std`."""
    return lambda shape, generator: torch.empty(shape).normal_(0, std, generator=generator)


def uniform(bound: float) -> Initializer:
    """Draws from the uniform distribution U(−bound, bound)."""
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
    """Gives every row equal norm and keeps the global std, so no expert starts ahead."""

    def equal(shape: torch.Size, generator: torch.Generator) -> Tensor:
        weight = init(shape, generator)
        rows = weight / weight.norm(dim=-1, keepdim=True)
        return rows * (weight.std() / rows.std())

    return equal


def rescaled_rows(init: Initializer) -> Initializer:
    """Scales rows to unit norm, then by own std / global std; as published, almost no change."""

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
    """Collects the initializers of one architecture; sizes are the model's."""

    rule: str  # paper, release, scaled, sut, takase or normal
    d_model: int
    num_layers: int  # L of c = √(2/L); 2 stands for c = 1
    scale: float | None  # of the rule scaled
    expert_axis_norm: bool
    std: float | None = None  # of the rule normal
    scaled_head: bool = False  # the read-out starts like any other matrix
    embedding_factor: float = 1.0

    @property
    def state_std(self) -> float:
        """Returns the standard deviation of a drawn state: Huginn's embedding, as layers read it."""
        return math.sqrt(2 / (5 * self.d_model)) * self.embedding_factor

    def router(self, d_row: int) -> Initializer:
        """Returns the initializer of the feed-forward's router."""
        if self.rule == "sut":
            return uniform(d_row**-0.5)
        init = self._sparse(d_row)
        return equal_rows(init) if self.rule == "release" else init

    def expert_up(self, d_in: int) -> Initializer:
        """Returns the initializer of an expert's up-projection."""
        return uniform(1 / d_in) if self.rule == "sut" else self._sparse(d_in)

    def expert_down(self, num_experts: int, d_expert: int) -> Initializer:
        """Returns the initializer of an expert's down-projection.

        The MoEUT rule counts all experts as fan-in.
        """
        if self.rule == "sut":
            return uniform(1 / d_expert)
        if self.rule == "takase":
            return self._takase(is_output=True)
        return self._sparse(d_expert if self.rule == "scaled" else num_experts * d_expert)

    def expert_biases(self, d_out: int, d_expert: int) -> tuple[Initializer, Initializer]:
        """Returns the initializers of the up- and the down-projection's bias.

        SUT's code asks for the fan-in of an [in, out] matrix, which gives it the output width.
        """
        if self.rule == "sut":
            return uniform(d_expert**-0.5), uniform(d_out**-0.5)
        return zeros, zeros

    def attention_router(self) -> Initializer:
        """Returns the initializer of SwitchHead's V and O routers."""
        init = self._sparse(self.d_model)
        return init if self.rule in ("scaled", "normal") else rescaled_rows(init)

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

    def dense(self, fan_in: int, *, is_output: bool = False) -> Initializer:
        """Returns the initializer of dense attention and dense feed-forwards.

        `is_output`: the matrix adds its output to the residual stream.
        """
        if self.rule == "takase":
            return self._takase(is_output=is_output)
        if self.rule in ("scaled", "normal"):
            return self._sparse(fan_in)
        return exact_std(math.sqrt(2 / (self.num_layers * fan_in)))

    def embedding(self) -> Initializer:
        """Returns the initializer of token embeddings and learned positions."""
        if self.rule == "takase":
            return self._takase()
        return self._sparse(1) if self.rule in ("scaled", "normal") else normal(self.d_model**-0.5)

    def head(self) -> Initializer:
        """Returns the initializer of the read-out's weight."""
        if self.rule == "takase":
            return self._takase()
        like_others = self.scaled_head or self.rule == "normal"
        return self._sparse(self.d_model) if like_others else uniform(self.d_model**-0.5)

    def sinks(self) -> Initializer:
        """Returns the initializer of attention's sinks."""
        return zeros if self.std is None else normal(self.std)

    def adapter(self) -> Initializer:
        """Returns the initializer of the matrix that injects a loop's input."""
        return self._sparse(self.d_model) if self.rule == "normal" else self._takase()

    def head_bias(self) -> Initializer:
        """Returns the initializer of the read-out's bias: zero with a scaled weight."""
        at_zero = self.scaled_head or self.rule in ("takase", "normal")
        return zeros if at_zero else uniform(self.d_model**-0.5)

    def _takase(self, *, is_output: bool = False) -> Initializer:
        std = math.sqrt(2 / (5 * self.d_model)) / (
            math.sqrt(2 * self.num_layers) if is_output else 1
        )
        return truncated_normal(std, 3 * std)

    def _sparse(self, fan_in: int) -> Initializer:
        if self.std is not None:
            return normal(self.std)
        if self.scale is not None:
            return truncated_normal(math.sqrt(self.scale / fan_in), 2 * self.scale)
        if self.rule == "takase":
            return self._takase()
        return normal(math.sqrt(2 / self.num_layers) / math.sqrt(fan_in))
