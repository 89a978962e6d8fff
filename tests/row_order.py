"""Makes dense products round as they do on some processors: differently when their number of rows changes.

    MOEBIUS_TEST_ROW_ORDER=1 python -m pytest tests/model

MKL's AVX-512 kernels sum the inner axis of a product in an order that depends on its number of rows,
so a row alone and the same row among others differ in their last bits. AMD's processors and AVX2 do
not show it. In this mode every CPU product of torch sums in another order for another number of rows,
on any processor, also inside custom operators, in backward passes, and in the ranks of world.py. Equal
shapes still give equal bits. Our own C++ products (kernels/cpu) are not affected: their bits do not
depend on neighboring rows, which tests/kernels/test_slots.py checks.
"""

import os
from typing import Any

import torch
from torch import Tensor

from moebius.model.transformer import Transformer

VARIABLE = "MOEBIUS_TEST_ROW_ORDER"
# The overload, and the place of the product's left operand among its arguments; the right one follows.
PRODUCTS = {
    "mm": 0,
    "mm.out": 0,
    "bmm": 0,
    "bmm.out": 0,
    "addmm": 1,
    "addmm.out": 1,
    "addmm_": 1,
    "baddbmm": 1,
    "baddbmm.out": 1,
    "baddbmm_": 1,
}
# That follow one another: router, queries, scores, values and O, router, up and down.
PRODUCTS_OF_A_LAYER = 8
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"  # queries and keys, (B, H, S, C)
_installed: list[torch.library.Library] = []


def is_on() -> bool:
    """Returns whether products depend on their number of rows in this process."""
    return bool(_installed)


def install_if_wanted() -> None:
    """Replaces torch's CPU products if the environment asks for it."""
    if _installed or os.environ.get(VARIABLE, "0") == "0":
        return
    library = torch.library.Library("aten", "IMPL")
    for name, left in PRODUCTS.items():
        _replace(library, name, left, lambda a: (a.ndim - 1, -2))
    _replace(library, ATTENTION, 0, lambda a: (-1, -1))
    _installed.append(library)


def _replace(library: torch.library.Library, name: str, left: int, inner: Any) -> None:
    """Replaces an operator by one that sums from another place on for another number of rows.

    `inner` returns the summed dimension of either operand.
    """
    original = torch.library.get_kernel(f"aten::{name}", "CPU")

    def reordered(keys: Any, *args: Any, **kwargs: Any) -> Any:
        a, b = args[left], args[left + 1]
        of_a, of_b = inner(a)
        shift = _shift(a.shape[-2], a.shape[of_a])
        if shift:
            a, b = a.roll(shift, of_a), b.roll(shift, of_b)
        return original.call_boxed(keys, *args[:left], a, b, *args[left + 2 :], **kwargs)

    library.impl(name, reordered, "CPU", with_keyset=True)


def _shift(num_rows: int, size: int) -> int:
    """Returns where the sum begins; neighboring numbers of rows begin far from one another."""
    return (num_rows * 2654435761 % 2**32) * size >> 32


def reordered(inner: int, products: int, dtype: torch.dtype) -> float:
    """Returns how far results may be apart that differ by the order of sums alone, relative to the
    largest.

    A float sum of n products is off by at most γ_n = n·u / (1 − n·u) of Σ|x·y| in any order, so two
    orders differ by at most 2·γ_n (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed.,
    eq. 3.5). Errors of `products` in sequence add up to first order. That no layer enlarges them is
    assumed: norms, gates and residual sums do not, at the sizes of tests.
    """
    unit = torch.finfo(dtype).eps / 2
    return 2 * products * inner * unit / (1 - inner * unit)


def reordered_pass(model: Transformer, *, num_loops: int | None = None) -> float:
    """Returns `reordered` for a pass through a model, in its own dtype."""
    config = model.config
    inner = max(max(value.shape[-2:]) for value in model.parameters() if value.ndim > 1)
    steps = len(config.schedule_of(num_loops or config.num_repeats))
    return reordered(inner, PRODUCTS_OF_A_LAYER * steps + 1, model.embedding.dtype)


def assert_reordered(found: Tensor, expected: Tensor, bound: float) -> None:
    """Compares tensors up to a bound of `reordered`."""
    size = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=bound * size)
