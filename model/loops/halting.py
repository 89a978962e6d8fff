"""Stick-breaking adaptive computation time of the Sparse Universal Transformer (arXiv 2310.07096).

Every token has a stick of length 1. After each depth step a gate breaks off a share of the rest,
and the token's answer is the sum of its states weighted by the pieces. Once less than 1 − τ is left
the token has halted: no expert serves it, and other tokens keep reading its answer. With f the
shared layer, y⁰ = f(x, x), s⁰ = y⁰, v⁰ = 1, a⁰ = 0, D⁰ = 0, for l = 1 … L − 1:

    p   = vˡ⁻¹·halt(yˡ⁻¹)            vˡ = vˡ⁻¹·continue(yˡ⁻¹)         the piece broken off, and the rest
    aˡ  = aˡ⁻¹ + p·yˡ⁻¹              Dˡ = Dˡ⁻¹ + (l − 1)·p            answer so far, and its expected depth
    w   = vˡ if vˡ ≥ 1 − τ else 0
    yˡ  = f(yˡ⁻¹, keys and values of sˡ⁻¹; no routes where w = 0)
    sˡ  = aˡ + w·yˡ where w > 0, else sˡ⁻¹

The answer is s of the last step. The loss is the mean over tokens of Dˡ + w·l, either of the last
step only (the SUT authors' code) or summed over all steps (the MoEUT authors' port, arXiv
2405.16039, which weights shallow steps more). Every gate starts at ½: with τ = 0.999 every token
has halted by depth step 10, so 18 steps cost 10.

Legend: B sequences, S positions, D model width, L depth steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.model_config import DepthStep, HaltingConfig
from ..initialise import uniform, zeros
from ..layers import Linear


@dataclass(frozen=True)
class Unhalted:
    """Tells a depth step which tokens still compute, and what keys and values read."""

    memory_BSD: Tensor  # what keys and values read
    weight_BS: Tensor  # w: the probability of not having halted; 0: skip the token

    def weight_of_rows(self, num_rows: int) -> Tensor:
        """Returns w of every row; sub-tokens share their token's."""
        return self.weight_BS.flatten().repeat_interleave(num_rows // self.weight_BS.numel())


@dataclass(frozen=True)
class Halted:
    """Holds the tokens' answers, the halting loss and the computed depth."""

    answer_BSD: Tensor
    loss_B: Tensor  # per sequence: the expected depth, or its sum over the steps, unweighted
    depth_B: Tensor  # detached: mean number of depth steps computed per token


class Halting(nn.Module):
    """Holds the halting gate and runs the depth steps that it controls.

    The gate's second layer starts at zero, so every token first halts with probability ½.
    """

    def __init__(self, config: HaltingConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        init = uniform(d_model**-0.5)
        self.hidden = Linear(d_model, d_model, init=init, bias=True, bias_init=init)
        self.output = Linear(d_model, 2, init=zeros)
        self.hidden.keeps_float32, self.output.keeps_float32 = ("weight", "bias"), ("weight",)

    def gate(self, y_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the probabilities to continue and to halt after this state, each (B, S)
        float32.
        """
        probability_BS2 = self.output(F.gelu(self.hidden(y_BSD))).softmax(-1)
        return probability_BS2[..., 0], probability_BS2[..., 1]

    def forward(
        self,
        layer: Callable[[DepthStep, Tensor, Unhalted], Tensor],
        x_BSD: Tensor,
        schedule: Sequence[DepthStep],
        *,
        real_BS: Tensor | None = None,
    ) -> Halted:
        """Applies `layer(depth step, state, unhalted)` at every depth step.

        Args:
            layer: the shared layer.
            x_BSD: the embedded tokens.
            schedule: the depth steps of the pass, at least one.
            real_BS: bool: False for padding, which starts halted and does not count in loss or
                depth; None: no padding.
        """
        left_BS = torch.ones_like(x_BSD[..., 0])
        if real_BS is not None:
            left_BS = left_BS * real_BS
        y_BSD = layer(schedule[0], x_BSD, Unhalted(x_BSD, left_BS))
        memory_BSD, answer_BSD, depth_BS = y_BSD, torch.zeros_like(y_BSD), left_BS
        expected_BS = last_BS = total_BS = torch.zeros_like(left_BS)
        for step in schedule[1:]:
            go_on_BS, halt_BS = self.gate(y_BSD)
            piece_BS, left_BS = left_BS * halt_BS, left_BS * go_on_BS
            answer_BSD = answer_BSD + piece_BS[..., None] * y_BSD
            expected_BS = expected_BS + (step.index - 1) * piece_BS
            weight_BS = torch.where(left_BS >= 1 - self.config.threshold, left_BS, 0.0)
            y_BSD = layer(step, y_BSD, Unhalted(memory_BSD, weight_BS))
            active_BS = weight_BS > 0
            memory_BSD = torch.where(
                active_BS[..., None], answer_BSD + weight_BS[..., None] * y_BSD, memory_BSD
            )
            last_BS = expected_BS + step.index * weight_BS
            total_BS, depth_BS = total_BS + last_BS, depth_BS + active_BS
        loss_BS = last_BS if self.config.loss_sum == "last" else total_BS
        if real_BS is None:
            return Halted(memory_BSD, loss_BS.mean(1), depth_BS.mean(1))
        count_B = real_BS.sum(1).clamp_min(1)
        return Halted(memory_BSD, loss_BS.sum(1) / count_B, depth_BS.sum(1) / count_B)
