"""Small parts: layer norm in float32, matrices without bias, rotary positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.LayerNorm):
    """Affine, with bias, eps 1e-5, always in float32."""

    def forward(self, input: Tensor) -> Tensor:
        """(…, D) in any dtype to (…, D) float32."""
        return F.layer_norm(input.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)


class Linear(nn.Module):
    """y = W x (+ b), computed in the weight's dtype whatever the input's: precision is a property of the weights."""

    def __init__(self, d_in: int, d_out: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(…, d_in) to (…, d_out)."""
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return F.linear(x.to(self.weight.dtype), self.weight, bias)


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
    turned, rest = x_BHSC[..., :width].float(), x_BHSC[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned.to(x_BHSC.dtype), rest), dim=-1)
