"""Residual, norm and casts in the interpreter against plain operations in float64: values and all
gradients. Copies are float16, because the interpreter's bfloat16 is wrong.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from moebius.kernels.fused import norm as operators
from moebius.kernels.fused.norm import Copied, NormedRows, add_norm, add_norm_reference
from moebius.kernels.gradients import accumulate_weight_gradients
from moebius.kernels.triton import norm as kernels

FLOAT, HALF = torch.float32, torch.float16
COPIES: list[tuple[Copied, ...]] = [
    (),
    ("normed",),
    ("total",),
    ("normed", "total"),
    ("total", "normed"),
    ("normed", "normed"),
]
AFFINE = {"affine": (True, True), "no bias": (True, False), "neither": (False, False)}


def run(
    function: Callable[..., NormedRows], given: Sequence[Tensor | None], **options: Any
) -> list[Tensor]:
    """Returns the requested outputs."""
    rows = function(*given, 1e-5, **options)
    return [out for out in (rows.total, rows.normed, *rows.copies) if out is not None]


def leaves_of(given: Sequence[Tensor | None]) -> list[Tensor]:
    return [value for value in given if value is not None]


def make_inputs(
    rows: tuple[int, ...], affine: str = "affine", *, added: torch.dtype | None = FLOAT
) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    weight, bias = AFFINE[affine]
    shapes = [rows, rows if added else None, rows[-1:] * weight, rows[-1:] * bias]
    made = [torch.randn(shape, generator=generator) if shape else None for shape in shapes]
    if made[1] is not None and added is not None:
        made[1] = made[1].to(added)
    return [None if value is None else value.requires_grad_() for value in made]


def compare(
    given: list[Tensor | None],
    *,
    low: torch.dtype = FLOAT,
    copies: tuple[Copied, ...] = (),
    wants_normed: bool = True,
    only: slice = slice(None),
) -> None:
    """Compares with the reference in float64, given the same (rounded) output gradients.

    `only`: which outputs have a gradient.
    """
    exact = [None if value is None else value.detach().double().requires_grad_() for value in given]
    options = dict(copies=copies, wants_normed=wants_normed)
    found = run(add_norm, given, low=low, **options)
    expected = run(add_norm_reference, exact, low=torch.float64, **options)
    generator = torch.Generator().manual_seed(4)
    grads = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in found]
    assert [out.dtype for out in found[len(found) - len(copies) :]] == [low] * len(copies)
    for mine, theirs in zip(found, expected, strict=True):
        tolerance = 2e-6 if mine.dtype is FLOAT else 6e-4
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance)
    leaves = leaves_of(given)
    mine = torch.autograd.grad(found[only], leaves, grads[only])
    theirs = torch.autograd.grad(
        expected[only],
        leaves_of(exact),
        [grad.double() for grad in grads[only]],
        materialize_grads=True,
    )
    for leaf, gradient, wanted in zip(leaves, mine, theirs, strict=True):
        assert gradient.dtype == leaf.dtype
        error = (gradient.double() - wanted).norm() / wanted.norm().clamp(min=1e-2)
        assert error.item() < (1e-6 if leaf.dtype is FLOAT else 4e-4)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (7, 16), (2, 3, 37), (9, 412), (3, 1024)])
def test_widths(shape: tuple[int, ...]) -> None:
    compare(make_inputs(shape), copies=("normed", "total"))
    compare(make_inputs(shape, added=HALF), low=HALF, copies=("normed", "total"))


@pytest.mark.slow
@pytest.mark.parametrize("width", [2048, 2049, 5000, operators.WIDEST])
def test_wide_rows(width: int) -> None:
    compare(make_inputs((2, width), added=HALF), low=HALF, copies=("normed", "total"))


@pytest.mark.sample(3)
@pytest.mark.parametrize("copies", COPIES)
def test_copies_and_their_gradients(copies: tuple[Copied, ...]) -> None:
    for low, added, wants_normed in product((FLOAT, HALF), (FLOAT, HALF, None), (True, False)):
        given = make_inputs((5, 24), added=added)
        compare(given, low=low, copies=copies, wants_normed=wants_normed)


@pytest.mark.parametrize("affine", AFFINE)
@pytest.mark.parametrize("added", [FLOAT, None])
def test_without_weight_or_bias(affine: str, added: torch.dtype | None) -> None:
    compare(make_inputs((5, 24), affine, added=added), low=HALF, copies=("normed", "total"))


@pytest.mark.slow
def test_a_program_takes_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_PROGRAMS", 3)
    compare(make_inputs((1100, 12)), copies=("normed",))
    monkeypatch.setattr(kernels, "_PROGRAMS", 150)  # more than the last sum takes at once
    compare(make_inputs((400, 1024)))


def test_no_rows() -> None:
    given = make_inputs((0, 3, 24))
    found = run(add_norm, given, low=HALF, copies=("normed", "total"))
    assert [out.shape for out in found] == [(0, 3, 24)] * 4
    grads = torch.autograd.grad(found[0].sum() + found[2].sum(), leaves_of(given))
    assert all(not grad.any() for grad in grads)


def test_what_is_stored_is_the_sum_and_casts_of_what_is_returned() -> None:
    x, y, weight, bias = make_inputs((6, 100), added=HALF)
    assert x is not None
    assert y is not None
    found = add_norm(x, y, weight, bias, 1e-5, low=HALF, copies=("normed", "total"))
    assert found.normed is not None
    assert torch.equal(found.total, x + y)
    assert torch.equal(found.copies[0], found.normed.half())
    assert torch.equal(found.copies[1], found.total.half())


def test_two_copies_of_a_norm_share_memory_and_no_gradient() -> None:
    """A sum of both gradients in float16 would be off by up to 2⁻¹¹, and is by 2⁻¹² here."""
    x, _, weight, bias = make_inputs((6, 100), added=None)
    assert x is not None
    assert bias is not None
    found = add_norm(x, None, weight, bias, 1e-5, low=HALF, copies=("normed", "normed"))
    first, second = found.copies
    assert first.data_ptr() == second.data_ptr()
    small = torch.full_like(second, 2.0**-12)
    [both] = torch.autograd.grad([first, second], [bias], [torch.ones_like(first), small])
    assert torch.equal(both, torch.full_like(both, 6 * (1 + 2.0**-12)))


def test_rows_that_are_not_finite_stay_in_their_rows() -> None:
    x, y, weight, bias = make_inputs((9, 40))
    assert x is not None
    assert y is not None

    def values(spoiled: Tensor) -> list[Tensor]:
        leaf = spoiled.detach().requires_grad_()
        found = run(add_norm, (leaf, y, weight, bias), low=FLOAT, copies=("normed",))
        [gradient] = torch.autograd.grad(found, [leaf], [torch.ones_like(out) for out in found])
        return [*found, gradient]

    spoiled = x.detach().clone()
    spoiled[2, 7], spoiled[5, 0] = float("nan"), float("inf")
    clean = [row for row in range(9) if row not in (2, 5)]
    for mine, theirs in zip(values(spoiled), values(x), strict=True):
        assert torch.equal(mine[clean], theirs[clean])
        assert mine[2].isnan().any()
        assert not mine[5].isfinite().all()


@pytest.mark.parametrize("affine", AFFINE)
def test_the_uses_of_a_pass_add_up_their_gradients_at_its_end(affine: str) -> None:
    given = make_inputs((2, 3, 32), affine)

    def gradients() -> tuple[Tensor, ...]:
        x, y, weight_D, bias_D = given
        for _ in range(3):
            assert x is not None
            x = add_norm(x, y, weight_D, bias_D, 1e-5, low=FLOAT).normed
        assert x is not None
        return torch.autograd.grad(x.sin().sum(), leaves_of(given))

    alone = gradients()
    with accumulate_weight_gradients():
        together = gradients()
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_what_it_refuses() -> None:
    x = torch.zeros(2, 8)
    for rows, added, weight in (
        (x.double(), None, None),
        (x, x.double(), None),
        (x, None, torch.ones(8, dtype=torch.bfloat16)),
        (torch.zeros(2, operators.WIDEST + 1), None, None),
    ):
        with pytest.raises(ValueError, match="use add_norm_reference"):
            add_norm(rows, added, weight, None, 1e-5, low=FLOAT)
