"""What a loop reads beside its state: the prelude's output, injected, and its place among the loops.

Legend: B sequences, S positions, D model width, F frequencies, R loops, e the injected input, s the state.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.model_config import ModelConfig
from ..initialise import Initializers, constant, identity, parameter, zeros
from ..layers import Linear, literal, on_device, wide_dtype

_FREQUENCIES = 8  # of r/R and of 1/R, π·2⁰ … π·2⁷
_START_DECAY = math.sqrt(1 / 5)  # of the state per loop, at the start (Parcae)


class Injection(nn.Module):
    """Combines the state with the injected input at the start of a loop; this one injects nothing.

    Work on e alone is done once per pass, in `prepare`.
    """

    def __init__(self, config: ModelConfig, initializers: Initializers) -> None:
        super().__init__()

    def prepare(self, e_BSD: Tensor) -> Tensor | None:
        """Returns what every loop reads of e, (B, S, D); None: nothing."""
        return None

    def forward(self, s_BSD: Tensor, e_BSD: Tensor) -> Tensor:
        """Returns the state (B, S, D) that a loop starts from; e comes from `prepare`."""
        return s_BSD

    def finish(self, s_BSD: Tensor) -> Tensor:
        """Maps the state after the last loop to what the coda reads, (B, S, D)."""
        return s_BSD


class AddedInjection(Injection):
    """Adds e to the state."""

    def prepare(self, e_BSD: Tensor) -> Tensor:
        """Returns e itself."""
        return e_BSD

    def forward(self, s_BSD: Tensor, e_BSD: Tensor) -> Tensor:
        """Returns s + e."""
        return s_BSD + e_BSD


class LinearInjection(Injection):
    """Applies one matrix to [s, e], as Huginn does (arXiv 2502.05171, §3.2)."""

    def __init__(self, config: ModelConfig, initializers: Initializers) -> None:
        super().__init__(config, initializers)
        d_model = config.d_model
        self.adapter = Linear(2 * d_model, d_model, init=initializers.adapter())

    def prepare(self, e_BSD: Tensor) -> Tensor:
        """Returns the matrix's right half times e."""
        weight = self.adapter.weight[:, e_BSD.shape[-1] :]
        return F.linear(e_BSD.to(weight.dtype), weight)

    def forward(self, s_BSD: Tensor, e_BSD: Tensor) -> Tensor:
        """Returns the matrix's left half times s, plus what e adds."""
        weight = self.adapter.weight[:, : s_BSD.shape[-1]]
        return (F.linear(s_BSD.to(weight.dtype), weight) + e_BSD).to(s_BSD.dtype)


class DecayInjection(Injection):
    """Lets the state decay by channel: exp(−Δ·exp(A))·s + Δ·(B·e), Δ = softplus(dt).

    The coda reads C·s. B and C start as the identity, A at 0, and Δ so that a loop keeps √(1/5) of
    the state (Parcae, arXiv 2604.12946). None of the four has weight decay.
    """

    decays = False

    def __init__(self, config: ModelConfig, initializers: Initializers) -> None:
        super().__init__(config, initializers)
        d_model, delta = config.d_model, -math.log(_START_DECAY)
        self.rate_bias = parameter(d_model, init=zeros)
        self.step_bias = parameter(d_model, init=constant(delta + math.log(-math.expm1(-delta))))
        self.input = Linear(d_model, d_model, init=identity)
        self.output = Linear(d_model, d_model, init=identity)

    def prepare(self, e_BSD: Tensor) -> Tensor:
        """Returns Δ·(B·e), which every loop adds, in float32."""
        return F.softplus(self.step_bias) * self.input(e_BSD).to(self.step_bias.dtype)

    def forward(self, s_BSD: Tensor, e_BSD: Tensor) -> Tensor:
        """Returns the decayed state plus what e adds."""
        decay_D = torch.exp(-F.softplus(self.step_bias) * torch.exp(self.rate_bias))
        return (s_BSD * decay_D + e_BSD).to(s_BSD.dtype)

    def finish(self, s_BSD: Tensor) -> Tensor:
        """Returns C·s, which the coda reads."""
        return self.output(s_BSD).to(s_BSD.dtype)


INJECTIONS = {
    "none": Injection,
    "add": AddedInjection,
    "linear": LinearInjection,
    "decay": DecayInjection,
}


class Condition(nn.Module):
    """Tells a loop its place r of R, by a vector or by a scale and a shift (LoopFormer).

    It reads r/R and 1/R as sines and cosines, so the same weights serve any R. At the start it
    changes nothing.
    """

    def __init__(self, d_model: int, *, scales: bool) -> None:
        super().__init__()
        self.scales = scales
        self.place = Linear(4 * _FREQUENCIES, (1 + scales) * d_model, init=zeros)

    def forward(self, s_BSD: Tensor, loops: list[int], num_loops: list[int]) -> Tensor:
        """Returns the state as each sequence reads it in its loop, counted from 0, of so many.

        One number stands for all sequences.
        """
        wide = wide_dtype(s_BSD)
        pairs = zip(loops, num_loops, strict=True)
        times = tuple(time for loop, total in pairs for time in (loop / total, 1 / total))
        if len(loops) == 1:
            times_X = literal(times, wide, s_BSD.device)
        else:
            times_X = on_device(torch.tensor(times, dtype=wide), s_BSD.device)
        times_B2 = times_X.view(-1, 2)
        frequencies = math.pi * 2.0 ** torch.arange(_FREQUENCIES, dtype=wide, device=s_BSD.device)
        angles_B2F = times_B2[..., None] * frequencies
        features_B1F = torch.cat((angles_B2F.sin(), angles_B2F.cos()), -1).flatten(1)[:, None]
        shift, *scale = self.place(features_B1F).to(wide).chunk(1 + self.scales, -1)
        if scale:
            s_BSD = s_BSD * (1 + scale[0])
        return (s_BSD + shift).to(s_BSD.dtype)
