"""Small parts: layer norm in float32, matrices, the dense feed-forward, rotary positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.activations import activate, columns_of
from .initialise import Start, ones, parameter, zeros


class LayerNorm(nn.Module):
    """eps 1e-5, always in float32 (float64 where the input is); affine with bias unless told otherwise."""

    def __init__(self, width: int, *, affine: bool = True) -> None:
        super().__init__()
        self.width = width
        self.weight = parameter(width, start=ones) if affine else None
        self.bias = parameter(width, start=zeros) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) in any dtype to (…, D) float32."""
        dtype = wide_dtype(x)
        weight, bias = self.weight, self.bias
        return F.layer_norm(
            x.to(dtype), (self.width,), None if weight is None else weight.to(dtype),
            None if bias is None else bias.to(dtype), 1e-5,
        )  # fmt: skip


def wide_dtype(x: Tensor) -> torch.dtype:
    """The precision of norms, routers and the residual stream: float32, or float64 where the weights are."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Linear(nn.Module):
    """y = W x (+ b), computed in the weight's dtype whatever the input's: precision is a property of the weights.

    `start` gives the weight's values; the bias starts by `bias_start`, at 0 unless told otherwise.
    """

    def __init__(self, d_in: int, d_out: int, *, start: Start, bias: bool = False, bias_start: Start = zeros) -> None:
        super().__init__()
        self.weight = parameter(d_out, d_in, start=start)
        self.bias = parameter(d_out, start=bias_start) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(…, d_in) to (…, d_out)."""
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return F.linear(x.to(self.weight.dtype), self.weight, bias)


class DenseMLP(nn.Module):
    """W_down a(W_up x + b) + b': the baseline's feed-forward, and a shared expert."""

    def __init__(
        self, d_model: int, d_hidden: int, *, activation: str, bias: bool, up_start: Start, down_start: Start
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = Linear(d_model, columns_of(d_hidden, activation), start=up_start, bias=bias)
        self.down = Linear(d_hidden, d_model, start=down_start, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) to (…, D)."""
        return self.down(activate(self.up(x), self.activation))


def rotary_table(first: int, count: int, width: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each (count, width), of positions first … first + count − 1 (RoFormer, arXiv 2104.09864, eq. 15).

    inv_freq_i = base^(−2i/width); the angles of the first half of the rotated channels are repeated for the second.
    """
    inv_freq = base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / max(width, 1))
    positions = torch.arange(first, first + count, device=device, dtype=torch.float32)
    angles = (positions[:, None] * inv_freq).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x_BHSC: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the first channels of every head in "half-split" form; the rest pass. Computed in float32."""
    cos, sin = table
    width = cos.shape[1]
    if width == 0:
        return x_BHSC
    turned, rest = x_BHSC[..., :width].to(cos.dtype), x_BHSC[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(x_BHSC.dtype), rest), dim=-1)
