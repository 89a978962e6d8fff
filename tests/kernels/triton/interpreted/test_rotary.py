"""Rotation of queries and keys in Triton's interpreter against plain operations in float64: values
and gradients. What is rounded is float16, for the interpreter's bfloat16 is wrong.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from moebius.kernels.fused import rotary as operators
from moebius.kernels.fused.rotary import rotate_pair, rotate_reference
from moebius.kernels.triton import rotary as kernels
from moebius.model.config.model_config import ModelConfig
from moebius.model.layers import RotaryTable, rotary_table, rotary_table_of, rotate_scaled
from moebius.model.transformer import Transformer

CPU, SCALE = torch.device("cpu"), 0.37


class Rows(NamedTuple):
    """B, H, S, C, and how many channels are rotated."""

    batch: int
    heads: int
    length: int
    channels: int
    width: int


def transposed(x_BHSC: Tensor) -> Tensor:
    """The same rows as a product leaves them: (B, S, H, C) in memory."""
    return x_BHSC.transpose(1, 2).contiguous().transpose(1, 2)


def columnwise(x_BHSC: Tensor) -> Tensor:
    """The same rows with channels apart."""
    return x_BHSC.mT.contiguous().mT


def sliced(x_BHSC: Tensor) -> Tensor:
    """The same rows, among others, in memory."""
    wide = x_BHSC.new_full([2 * size + 1 for size in x_BHSC.shape], torch.nan)
    view = wide[1::2, 1::2, 1::2, 1::2]
    view.copy_(x_BHSC)
    return view


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    each.__name__: each for each in (transposed, columnwise, sliced)
}


def make_pair(rows: Rows) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows[:4], generator=generator) for _ in range(2)]


def make_table(rows: Rows, *, batched: bool, dtype: torch.dtype = torch.float32) -> RotaryTable:
    """Of positions from 5 on, or of positions of every sequence's own."""
    if not batched:
        return rotary_table(5, rows.length, rows.width, 100.0, CPU, dtype)
    generator = torch.Generator().manual_seed(2)
    positions_B1S = torch.randint(50, (rows.batch, 1, rows.length), generator=generator).to(dtype)
    return rotary_table_of(positions_B1S, rows.width, 100.0)


def compare(
    rows: Rows, *, batched: bool, layouts: tuple[str, str] = ("transposed", "sliced")
) -> None:
    """Values, then gradients, of queries and keys in layouts of their own."""
    pair = [LAYOUTS[name](x) for name, x in zip(layouts, make_pair(rows), strict=True)]
    grads = [LAYOUTS[name](x.flip(3)) for name, x in zip(layouts[::-1], pair, strict=True)]
    pair = [x.requires_grad_() for x in pair]
    exact = [x.detach().double().requires_grad_() for x in pair]
    table = make_table(rows, batched=batched)
    cos, sin = (part.double() for part in table)
    found = rotate_pair(pair[0], pair[1], *table, scale=SCALE)
    expected = [rotate_reference(x, cos, sin, scale=SCALE) for x in exact]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-6, atol=1e-6)
        assert mine.transpose(1, 2).is_contiguous()
    mine = torch.autograd.grad(found, pair, grads)
    theirs = torch.autograd.grad(expected, exact, [grad.double() for grad in grads])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)
        assert one.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        Rows(1, 1, 1, 2, 2),
        Rows(1, 1, 1, 7, 6),
        Rows(2, 3, 5, 9, 6),
        Rows(3, 2, 11, 16, 16),
        Rows(2, 4, 40, 82, 40),  # MoEUT-244M's heads; several programs
        Rows(1, 2, 3, 130, 2),
        Rows(1, 3, 2, 5, 4),
        Rows(2, 1, 0, 8, 8),
        Rows(0, 2, 3, 8, 4),
    ],
    ids=lambda rows: "x".join(map(str, rows)),
)
def test_widths_and_tables(rows: Rows, batched: bool) -> None:
    compare(rows, batched=batched)


@pytest.mark.parametrize("first", LAYOUTS)
@pytest.mark.parametrize("second", LAYOUTS)
def test_layouts(first: str, second: str) -> None:
    compare(Rows(2, 3, 5, 9, 6), batched=True, layouts=(first, second))


def test_low_precision_is_rounded_once() -> None:
    """float16 in the kernel itself: at most half a unit in the last place of the exact result."""
    rows = Rows(2, 3, 5, 40, 24)
    q, k = (x.half() for x in make_pair(rows))
    table = make_table(rows, batched=False)
    out_q, out_k = (transposed(torch.empty_like(x)) for x in (q, k))
    kernels.rotate_pair((q, k), table, (out_q, out_k), scale=SCALE, back=False)
    cos, sin = (part.double() for part in table)
    for x, found in ((q, out_q), (k, out_k)):
        exact = rotate_reference(x.double(), cos, sin, scale=SCALE)
        off = (found.double() - exact).abs()
        unit = 2.0 ** (exact.abs().log2().floor() - 10).clamp(min=-24)
        assert (off <= 0.5001 * unit).all()


def test_back_is_the_inverse() -> None:
    rows = Rows(2, 2, 6, 10, 8)
    pair, table = make_pair(rows), make_table(rows, batched=False)
    there = operators._rotate_pair(*pair, *table, 1.0, False)
    again = operators._rotate_pair(*there, *table, 1.0, True)
    for x, y in zip(pair, again, strict=True):
        torch.testing.assert_close(y, x, rtol=2e-6, atol=2e-6)


def test_the_operator_is_well_behaved() -> None:
    rows = Rows(2, 2, 3, 9, 6)
    pair = [transposed(x).requires_grad_() for x in make_pair(rows)]
    torch.library.opcheck(
        operators._rotate_pair,
        (*pair, *make_table(rows, batched=True), SCALE, False),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_what_does_not_fit_is_refused() -> None:
    rows = Rows(2, 3, 4, 8, 6)
    (q, k), table = make_pair(rows), make_table(rows, batched=False)
    with pytest.raises(ValueError, match=r"do not fit: both want \(B, H, S, C\)"):
        rotate_pair(q, k[:, :2], *table)
    with pytest.raises(ValueError, match="do not fit"):
        rotate_pair(q, k, *make_table(rows._replace(length=5), batched=False))
    with pytest.raises(ValueError, match="do not fit"):
        rotate_pair(q, k, *make_table(rows._replace(width=10), batched=False))
    with pytest.raises(ValueError, match=r"of torch.float64 on cpu .*: use rotate_reference"):
        rotate_pair(q.double(), k.double(), *table)


def test_the_backend_decides_who_rotates(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(2, 3, 4, 8, 6)
    (q, k), table = make_pair(rows), make_table(rows, batched=False)
    calls: list[float] = []
    launch = kernels.rotate_pair

    def noted(*args: object, scale: float, back: bool) -> None:
        calls.append(scale)
        launch(*args, scale=scale, back=back)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(kernels, "rotate_pair", noted)
    plain = rotate_scaled(q, k, table, scale=SCALE, backend="segments")
    assert not calls
    fused = rotate_scaled(q, k, table, scale=SCALE, backend="triton")
    assert calls == [SCALE]
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    rotate_scaled(
        q, k, make_table(rows._replace(width=0), batched=False), scale=1, backend="triton"
    )
    rotate_scaled(q.double(), k.double(), table, scale=1, backend="triton")
    assert calls == [SCALE]


@pytest.mark.slow
def test_a_model_rotates_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both attentions ask the kernel of the backend that their experts run in, forward and back."""
    calls: list[bool] = []
    launch = kernels.rotate_pair

    def noted(*args: object, scale: float, back: bool) -> None:
        calls.append(back)
        launch(*args, scale=scale, back=back)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(kernels, "rotate_pair", noted)
    shape = {"d_model": 16, "num_layers": 1, "layers_per_group": 1, "vocab_size": 11}
    heads = {"attention.d_head": 8, "attention.num_heads": 2}
    sparse = {"attention.num_experts": 2, "attention.top_k": 1}
    for kind in (sparse, {"attention.kind": "dense"}):
        calls.clear()
        config = ModelConfig.from_dotted(shape | heads | kind)
        model = Transformer(config, backend="triton")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        tokens_BS = torch.arange(6).view(2, 3)
        model(tokens_BS).read_out.sum().backward()
        assert calls == [False, True]
