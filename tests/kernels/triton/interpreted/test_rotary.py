"""Rotary embedding in the interpreter against plain operations in float64: values and gradients.
Rounded rows are float16, because the interpreter's bfloat16 is wrong.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from moebius.kernels.fused import rotary as operators
from moebius.kernels.fused.rotary import rotate_pair, rotate_reference
from moebius.kernels.triton import rotary as kernels
from moebius.model.config.attention_config import RotaryConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.layers import RotaryTable, rotary_table, rotate_scaled
from moebius.model.transformer import Transformer

CPU, SCALE = torch.device("cpu"), 0.37


class Rows(NamedTuple):
    """Sizes B, H, S, C and W."""

    batch: int
    heads: int
    length: int
    channels: int
    width: int


def sliced(x_BHSC: Tensor) -> Tensor:
    """Returns the same rows as a strided slice of a larger tensor."""
    wide = x_BHSC.new_full([2 * size + 1 for size in x_BHSC.shape], torch.nan)
    view = wide[1::2, 1::2, 1::2, 1::2]
    view.copy_(x_BHSC)
    return view


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x_BHSC: x_BHSC.transpose(1, 2).contiguous().transpose(1, 2),
    "columnwise": lambda x_BHSC: x_BHSC.mT.contiguous().mT,
    "sliced": sliced,
}
CASES = [
    *((Rows(2, 3, 5, 9, 6), first, second) for first in LAYOUTS for second in LAYOUTS),
    *(
        (rows, "transposed", "sliced")
        for rows in (
            Rows(1, 1, 1, 2, 2),
            Rows(2, 10, 40, 82, 40),  # the 44M model's heads; several programs
            Rows(1, 2, 3, 130, 2),
            Rows(1, 3, 2, 5, 4),
            Rows(2, 1, 0, 8, 8),
            Rows(0, 2, 3, 8, 4),
        )
    ),
]


def make_pair(rows: Rows) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows[:4], generator=generator) for _ in range(2)]


def make_table(rows: Rows, *, batched: bool) -> RotaryTable:
    """Returns a table of positions from 5 on, or of different positions per sequence."""
    if not batched:
        return rotary_table(
            torch.arange(5.0, 5 + rows.length), rows.width, RotaryConfig(base=100.0)
        )
    generator = torch.Generator().manual_seed(2)
    positions = torch.randint(50, (rows.batch, 1, rows.length), generator=generator)
    return rotary_table(positions.float(), rows.width, RotaryConfig(base=100.0))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("rows", "first", "second"), CASES, ids=str)
def test_values_and_gradients(rows: Rows, first: str, second: str, batched: bool) -> None:
    layouts = LAYOUTS[first], LAYOUTS[second]
    pair = [lay(x).requires_grad_() for lay, x in zip(layouts, make_pair(rows), strict=True)]
    grads = [lay(x.detach().flip(3)) for lay, x in zip(layouts[::-1], pair, strict=True)]
    exact = [x.detach().double().requires_grad_() for x in pair]
    table = make_table(rows, batched=batched)
    found = rotate_pair(pair[0], pair[1], *table, scale=SCALE)
    cos, sin = (part.double() for part in table)
    expected = [rotate_reference(x, cos, sin, scale=SCALE) for x in exact]
    ours = [*found, *torch.autograd.grad(found, pair, grads)]
    theirs = torch.autograd.grad(expected, exact, [grad.double() for grad in grads])
    for one, other in zip(ours, [*expected, *theirs], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=1e-6)
        assert one.transpose(1, 2).is_contiguous()


def test_low_precision_is_rounded_once() -> None:
    """float16 in the kernel itself: at most half a unit in the last place of the exact result."""
    rows = Rows(2, 3, 5, 40, 24)
    q, k = (x.half() for x in make_pair(rows))
    table = make_table(rows, batched=False)
    outputs = [LAYOUTS["transposed"](torch.empty_like(x)) for x in (q, k)]
    kernels.rotate_pair((q, k), table, (outputs[0], outputs[1]), scale=SCALE, back=False)
    cos, sin = (part.double() for part in table)
    for x, found in zip((q, k), outputs, strict=True):
        exact = rotate_reference(x.double(), cos, sin, scale=SCALE)
        unit = 2.0 ** (exact.abs().log2().floor() - 10).clamp(min=-24)
        assert ((found.double() - exact).abs() <= 0.5001 * unit).all()


def test_back_is_the_inverse_and_the_operator_is_well_behaved() -> None:
    rows = Rows(2, 2, 6, 10, 8)
    pair, table = make_pair(rows), make_table(rows, batched=False)
    there = operators._rotate_pair(*pair, *table, 1.0, False)
    again = operators._rotate_pair(*there, *table, 1.0, True)
    torch.testing.assert_close(list(again), pair, rtol=2e-6, atol=2e-6)
    leaves = [LAYOUTS["transposed"](x).requires_grad_() for x in pair]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        operators._rotate_pair._opoverload, (*leaves, *table, SCALE, False), test_utils=checks
    )


def test_what_does_not_fit_is_refused() -> None:
    rows = Rows(2, 3, 4, 8, 6)
    (q, k), table = make_pair(rows), make_table(rows, batched=False)
    for keys, wrong in (
        (k[:, :2], table),
        (k, make_table(rows._replace(length=5), batched=False)),
        (k, make_table(rows._replace(width=10), batched=False)),
    ):
        with pytest.raises(
            ValueError, match=r"do not fit: queries and keys must be \(B, H, S, C\)"
        ):
            rotate_pair(q, keys, *wrong)
    with pytest.raises(ValueError, match=r"of torch.float64 on cpu .*: use rotate_reference"):
        rotate_pair(q.double(), k.double(), *table)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each launch of the kernel was backward."""
    calls: list[bool] = []
    launch = kernels.rotate_pair

    def noted(*args: object, scale: float, back: bool) -> None:
        calls.append(back)
        launch(*args, scale=scale, back=back)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(kernels, "rotate_pair", noted)
    return calls


def test_the_backend_decides_who_rotates(launched: list[bool]) -> None:
    rows = Rows(2, 3, 4, 8, 6)
    (q, k), table = make_pair(rows), make_table(rows, batched=False)
    plain = rotate_scaled(q, k, table, scale=SCALE, backend="segments")
    assert launched == []
    fused = rotate_scaled(q, k, table, scale=SCALE, backend="triton")
    torch.testing.assert_close(plain, fused, rtol=1e-6, atol=1e-6)
    empty = make_table(rows._replace(width=0), batched=False)
    rotate_scaled(q, k, empty, scale=1, backend="triton")
    rotate_scaled(q.double(), k.double(), table, scale=1, backend="triton")
    assert launched == [False]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [{"attention.num_experts": 2, "attention.top_k": 1}, {"attention.kind": "dense"}],
    ids=["switchhead", "dense"],
)
def test_a_model_rotates_so(kind: dict[str, object], launched: list[bool]) -> None:
    """Both attentions use the kernel of their experts' backend, forward and backward."""
    shape = {"d_model": 16, "num_layers": 1, "layers_per_group": 1, "vocab_size": 11}
    heads = {"attention.d_head": 8, "attention.num_heads": 2}
    model = Transformer(ModelConfig.from_dotted(shape | heads | kind), backend="triton")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model(torch.arange(6).view(2, 3)).logits_BSV.sum().backward()
    assert launched == [False, True]
