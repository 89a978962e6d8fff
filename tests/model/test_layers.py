"""Rotary positions: the formula pair by pair, its gradient, and what waits for the backward pass."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from moebius.model.config.attention_config import RotaryConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.layers import RotaryTable, rotary_of, rotary_table, rotate

FIRST, POSITIONS, WIDTH, CHANNELS, BASE = 3, 5, 6, 9, 100.0
PLACES = torch.arange(FIRST, FIRST + POSITIONS)


def table(width: int = WIDTH) -> RotaryTable:
    return rotary_table(PLACES.float(), width, RotaryConfig(base=BASE))


def rows(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 3, POSITIONS, CHANNELS, generator=torch.Generator().manual_seed(0)).to(
        dtype
    )


def by_hand(x_BHSC: Tensor, *, back: bool = False) -> Tensor:
    """Every pair (i, i + width/2) of every row by its own angle."""
    y_BHSC = x_BHSC.double().clone()
    for position in range(POSITIONS):
        for i in range(WIDTH // 2):
            angle = (FIRST + position) * BASE ** (-2 * i / WIDTH) * (-1 if back else 1)
            a, b = (x_BHSC[..., position, channel].double() for channel in (i, i + WIDTH // 2))
            y_BHSC[..., position, i] = a * math.cos(angle) - b * math.sin(angle)
            y_BHSC[..., position, i + WIDTH // 2] = b * math.cos(angle) + a * math.sin(angle)
    return y_BHSC


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_pairs_are_rotated_and_gradients_rotated_back(dtype: torch.dtype, tolerance: float) -> None:
    x, grad = rows(dtype).requires_grad_(), rows(dtype).flip(2)
    y = rotate(x, table())
    y.backward(grad)
    assert x.grad is not None
    assert y.dtype == x.grad.dtype == dtype
    torch.testing.assert_close(y.double(), by_hand(x.detach()), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        x.grad.double(), by_hand(grad, back=True), rtol=tolerance, atol=tolerance
    )
    assert torch.equal(y[..., WIDTH:], x[..., WIDTH:])


def test_float64_rows_are_rotated_in_float64() -> None:
    x = rows(torch.float64)
    wide = rotary_table(PLACES.double(), WIDTH, RotaryConfig(base=BASE))
    torch.testing.assert_close(rotate(x, wide), by_hand(x), rtol=0, atol=1e-14)
    attention = ModelConfig.from_dotted({"attention.d_head": 8}).attention
    table = rotary_of(attention, torch.zeros(1, 3, 128, dtype=torch.float64), 0, None)
    assert table is not None
    assert [part.dtype for part in table] == [torch.float64] * 2


def test_only_the_table_waits_for_the_backward_pass() -> None:
    kept, cos_sin = [], table()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rotate(rows().requires_grad_(), cos_sin)
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in cos_sin]


def test_without_rotated_channels_rows_pass() -> None:
    x = rows()
    assert rotate(x, table(width=0)) is x


def test_a_pass_with_gradients_keeps_its_rotary_table() -> None:
    attention = ModelConfig.from_dotted({"attention.d_head": 8}).attention
    x = torch.zeros(1, 7, 128)
    kept = rotary_of(attention, x, 0, None)
    assert rotary_of(attention, x + 1, 0, None) is kept
    others = [
        rotary_of(attention, *given) for given in ((x[:, :3], 0, None), (x.double(), 0, None))
    ]
    others += [rotary_of(attention, x, 2, None), rotary_of(attention, x, 0, torch.arange(7)[None])]
    with torch.inference_mode():
        others.append(rotary_of(attention, x, 0, None))
    with FakeTensorMode():
        others.append(rotary_of(attention, torch.zeros(1, 7, 128), 0, None))
    assert all(other is not kept for other in others)
    with torch.inference_mode():
        rotary_of(attention, x[:, :5], 0, None)
    found = rotary_of(attention, x[:, :5], 0, None)
    assert found is not None
    assert not found[0].is_inference()
