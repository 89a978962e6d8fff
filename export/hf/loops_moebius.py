"""Loops of a moebius model for modeling_moebius.py; needs only torch and transformers.

Legend: B sequences, S positions, D model width, R loops.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_moebius import MoebiusConfig
from .experts_moebius import Linear, make_norm, wide

_FREQUENCIES = 8  # of r/R and of 1/R in a condition


class Injection(nn.Module):
    """Combines the state with the prelude's output at the start of a loop, and ends the last one."""

    def __init__(self, d_model: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear":
            self.adapter = Linear(2 * d_model, d_model, bias=False)
        elif kind == "decay":
            self.rate_bias = nn.Parameter(torch.zeros(d_model))
            self.step_bias = nn.Parameter(torch.zeros(d_model))
            self.input = Linear(d_model, d_model, bias=False)
            self.output = Linear(d_model, d_model, bias=False)

    def forward(self, s_BSD: Tensor, e_BSD: Tensor) -> Tensor:
        """Returns s + e, W·[s, e], or exp(−Δ·exp(A))·s + Δ·(B·e), each (B, S, D)."""
        if self.kind == "add":
            return s_BSD + e_BSD
        if self.kind == "linear":
            return self.adapter(torch.cat((wide(s_BSD), wide(e_BSD)), -1)).to(s_BSD.dtype)
        step_D = F.softplus(self.step_bias)
        decayed_BSD = s_BSD * torch.exp(-step_D * torch.exp(self.rate_bias))
        return (decayed_BSD + step_D * self.input(e_BSD).to(step_D.dtype)).to(s_BSD.dtype)

    def finish(self, s_BSD: Tensor) -> Tensor:
        """Returns what the layers after the last loop read of the state."""
        return self.output(s_BSD).to(s_BSD.dtype) if self.kind == "decay" else s_BSD


class Condition(nn.Module):
    """Tells a loop its place r of R, by a vector that is added, or by a scale and a shift."""

    def __init__(self, d_model: int, *, scales: bool) -> None:
        super().__init__()
        self.scales = scales
        self.place = Linear(4 * _FREQUENCIES, (1 + scales) * d_model, bias=False)

    def forward(self, s_BSD: Tensor, loop: int, num_loops: int) -> Tensor:
        """Returns the state that a loop, counted from 0, reads."""
        times = torch.tensor([loop / num_loops, 1 / num_loops], device=s_BSD.device)
        angles = times.to(wide(s_BSD).dtype)[:, None] * (
            math.pi * 2.0 ** torch.arange(_FREQUENCIES, device=s_BSD.device)
        )
        features = torch.cat((angles.sin(), angles.cos()), -1).flatten()
        shift, *scale = wide(self.place(features)).chunk(1 + self.scales)
        s_BSD = s_BSD * (1 + scale[0]) if scale else s_BSD
        return s_BSD + shift


class Loops(nn.Module):
    """Holds what a model adds to its layers between their repeats; MoEUT adds nothing."""

    def __init__(self, config: MoebiusConfig) -> None:
        super().__init__()
        d_model, self.program = config.model["d_model"], config.loops
        self.injection = self.input_norm = self.condition = self.exit_gate = None
        self.state_std = math.sqrt(2 / (5 * d_model))
        if config.model.get("scale_embedding"):
            self.state_std *= d_model**0.5
        if self.program["inject"] != "none":
            self.injection = Injection(d_model, self.program["inject"])
        if self.program["input_norm"]:
            self.input_norm = make_norm(config)
        if self.program["condition"] != "none":
            scales = self.program["condition"] == "scale_shift"
            self.condition = Condition(d_model, scales=scales)
        if self.program["exit_entropy"] is not None:
            self.exit_gate = Linear(d_model, 1)  # of training; no token leaves early here

    def start(self, e_BSD: Tensor, position_BS: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the state before the first loop, and what every loop reads of e; None: nothing."""
        if self.injection is None:
            return e_BSD, None
        injected_BSD = e_BSD if self.input_norm is None else self.input_norm(e_BSD)
        kind = self.program["start"]
        if kind == "embedding":
            return e_BSD, injected_BSD
        if kind == "zero":
            return torch.zeros_like(e_BSD), injected_BSD
        # normal noise cut at 3 standard deviations, the same at every position of every text
        within = math.erf(3 / math.sqrt(2))
        noise = torch.empty(int(position_BS.max()) + 1, e_BSD.shape[-1])
        noise.uniform_(-within, within, generator=torch.Generator().manual_seed(0))
        noise = noise.erfinv_().mul_(math.sqrt(2) * self.state_std).to(e_BSD)
        return noise[position_BS].expand_as(e_BSD), injected_BSD

    def begin(self, s_BSD: Tensor, e_BSD: Tensor | None, loop: int, num_loops: int) -> Tensor:
        """Returns what the first layer of a loop reads, (B, S, D)."""
        if self.injection is not None and e_BSD is not None:
            s_BSD = self.injection(s_BSD, e_BSD)
        return s_BSD if self.condition is None else self.condition(s_BSD, loop, num_loops)
