"""Small parts: norms, matrices, the dense feed-forward, rotary positions."""

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..kernels.fused.rotary import rotate_pair, rotate_reference, runs_fused
from ..kernels.reference import activation_function, columns_of
from ..plugins import Registry, is_subclass
from .config.attention_config import AttentionConfig, RotaryConfig
from .initialise import Initializer, ones, parameter, zeros


class LayerNorm(nn.Module):
    """Normalises rows, always in float32 (float64 for float64 input)."""

    def __init__(self, width: int, *, affine: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = parameter(width, init=ones) if affine else None
        self.bias = parameter(width, init=zeros) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalises (…, D) in any dtype to (…, D) float32; bfloat16 if the weight is stored so."""
        weight, bias = self.weight, self.bias
        dtype = wide_dtype(x) if weight is None else own_dtype(x, weight)
        return F.layer_norm(
            x.to(dtype),
            (self.width,),
            None if weight is None else weight.to(dtype),
            None if bias is None else bias.to(dtype),
            self.eps,
        )


class RMSNorm(nn.Module):
    """Divides rows by their root mean square, in float32; weighted (arXiv 1910.07467)."""

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(width, init=ones)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises (…, D) in any dtype to (…, D) float32; bfloat16 where the weight is stored so."""
        dtype = own_dtype(x, self.weight)
        return F.rms_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.eps)


NORM = Registry(
    "model.norm_layer",
    "a norm",
    {"layernorm": LayerNorm, "rmsnorm": RMSNorm},
    "a subclass of torch.nn.Module whose argument is a row's width",
    lambda found: is_subclass(found, nn.Module),
    takes=1,
)


def make_norm(kind: str, eps: float | None, width: int) -> nn.Module:
    """Builds a norm of rows of a width; without `eps` it has its own."""
    norm = NORM.get(kind)
    return norm(width) if eps is None else norm(width, eps=eps)


def wide_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of norms, routers and the residual: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies values from the host to a device without waiting for the work queued there."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


@cache
def literal(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tuple of numbers as a tensor, which is copied to a device once per process.

    For numbers that depend on the configuration alone: a pass then copies nothing from the host.
    """
    return torch.tensor(values, dtype=dtype, device=device)


def own_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Returns the dtype in which a norm or a router computes, which its weight decides.

    It is `wide_dtype` unless the weight is stored in bfloat16, which only
    train.precision="bfloat16_only" does (model/execution/precision.py).
    """
    return weight.dtype if weight.dtype == torch.bfloat16 else wide_dtype(x)


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Returns x Wᵀ (T, E), computed in the router's own precision.

    Always float32 or float64: bfloat16 logits are widened so that their dtype is the same
    everywhere.
    """
    dtype = own_dtype(x_TD, weight_ED)
    return (x_TD.to(dtype) @ weight_ED.to(dtype).T).to(wide_dtype(x_TD))


class Linear(nn.Module):
    """Computes y = W x (+ b) in the weight's dtype, whatever the input's.

    `init` draws the weight, `bias_init` the bias, which starts at 0 by default.
    """

    roles: ClassVar = {"weight": "matrix"}  # model/execution/roles.py
    keeps_float32: tuple[str, ...] = ()

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        init: Initializer,
        bias: bool = False,
        bias_init: Initializer = zeros,
    ) -> None:
        super().__init__()
        self.weight = parameter(d_out, d_in, init=init)
        self.bias = parameter(d_out, init=bias_init) if bias else None
        self.maps: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Maps (…, d_in) to (…, d_out)."""
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return F.linear(x.to(self.weight.dtype), self.weight, bias)


def is_untouched(matrix: nn.Module) -> bool:
    """Returns whether calling it is x Wᵀ and nothing else: no bias, subclass or hook."""
    hooks = (
        *(matrix._forward_hooks, matrix._forward_pre_hooks),
        *(matrix._backward_hooks, matrix._backward_pre_hooks),
    )
    return type(matrix) is Linear and matrix.bias is None and not any(hooks)


class DenseMLP(nn.Module):
    """Computes W_down a(W_up x + b) + b': a dense feed-forward, or a shared expert."""

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        *,
        activation: str,
        bias: bool,
        up_init: Initializer,
        down_init: Initializer,
    ) -> None:
        super().__init__()
        self.activate = activation_function(activation)
        columns = columns_of(d_hidden, activation)
        self.up = Linear(d_model, columns, init=up_init, bias=bias)
        self.up.maps = {"weight": columns // d_hidden}
        self.down = Linear(d_hidden, d_model, init=down_init, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (…, D) to (…, D)."""
        return self.down(self.activate(self.up(x)))


RotaryTable = tuple[Tensor, Tensor]


def rotary_table(positions: Tensor, width: int, rotary: RotaryConfig) -> RotaryTable:
    """Returns cosine and sine of the positions, each (*positions, width), in their dtype.

    inv_freq_i = base^(−2i/width), slowed by YaRN if configured. The angles of the first half of the
    rotated channels repeat in the second, and the first half's sines are negated: each channel adds
    its partner in the other half times this. Source: RoFormer, arXiv 2104.09864, eq. 15.
    """
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=positions.dtype)
    speeds = rotary.base ** (-exponents / max(width, 1))
    if rotary.yarn is not None:
        slowed = tuple(rotary.yarn.speeds(width, rotary.base))
        speeds = speeds * literal(slowed, speeds.dtype, speeds.device)
    angles = positions[..., None] * speeds
    cos, sin = angles.cos() * rotary.amplitude, angles.sin() * rotary.amplitude
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotary_of(
    config: AttentionConfig, x_BSD: Tensor, past: int, positions_BS: Tensor | None
) -> RotaryTable | None:
    """Returns the table of the new positions, once for all depth steps; None: attention has its own.

    Without positions they follow `past` others in every row. A pass with gradients keeps that table
    for all later ones: neither tensors without data nor a generation's growing past enter the
    process's cache.
    """
    if config.kind == "momha":
        return None
    dtype, width = wide_dtype(x_BSD), config.rotary_channels
    has_data = type(x_BSD) is Tensor and not x_BSD.is_meta
    if past == 0 and positions_BS is None and has_data and torch.is_grad_enabled():
        rotary: Any = config.rotary  # frozen, so it has a hash
        return _kept_table(x_BSD.shape[1], x_BSD.device, dtype, width, rotary)
    positions = torch.arange(past, past + x_BSD.shape[1], device=x_BSD.device)
    if positions_BS is not None:
        positions = positions_BS[:, None]
    return rotary_table(positions.to(dtype), width, config.rotary)


@cache
def _kept_table(
    length: int, device: torch.device, dtype: torch.dtype, width: int, rotary: RotaryConfig
) -> RotaryTable:
    """Makes a table once per process; it is never freed, as a captured graph may read it."""
    return rotary_table(torch.arange(length, device=device).to(dtype), width, rotary)


def rotate(x_BHSC: Tensor, table: RotaryTable) -> Tensor:
    """Rotates the first channels of every head in "half-split" form; the rest pass.

    The table is (S, W), shared by all sequences, or (B, 1, S, W). It sets the precision: float32,
    or float64 for float64 rows.
    """
    return x_BHSC if table[0].shape[-1] == 0 else _Rotate.apply(x_BHSC, *table)  # pyright: ignore[reportReturnType]


def neighbours_as_halves(x_BHSC: Tensor, width: int) -> Tensor:
    """Reorders the first `width` channels, so that "half-split" rotation turns 2i with 2i + 1.

    Scores do not change where queries and keys are reordered alike.
    """
    pairs, rest = x_BHSC[..., :width], x_BHSC[..., width:]
    halves = pairs.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((halves, rest), -1) if rest.shape[-1] else halves


def rotate_scaled(
    q_BHSC: Tensor, k_BHSC: Tensor, table: RotaryTable, *, scale: float, backend: str
) -> tuple[Tensor, Tensor]:
    """Scales and rotates queries and keys.

    If the expert backend is Triton's on a GPU, one kernel does both and rounds once
    (kernels/fused/rotary.py), where they have equally many heads.
    """
    if q_BHSC.shape == k_BHSC.shape and runs_fused(backend, q_BHSC, table[0]):
        return rotate_pair(q_BHSC, k_BHSC, *table, scale=scale)
    return rotate(q_BHSC * scale, table), rotate(k_BHSC * scale, table)


class _Rotate(torch.autograd.Function):
    """Rotates; the backward pass rotates back and needs only the table."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate_reference(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return rotate_reference(grads[0], cos, sin, back=True), None, None
