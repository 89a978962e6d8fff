"""Float32 products through oneDNN instead of MKL: on some CPUs more than twice as fast, on others
wrong.

torch sends float32 products to MKL, which on CPUs that are not Intel's takes a slower path.
Allowing oneDNN "bf16" for them sends them to oneDNN; a CPU without matrix units (AMX) then still
computes in float32, one with them would round. So it is allowed only where a trial on this CPU
finds it exact (`kernels.onednn`, off unless asked for: a run's bits must not hang on how fast a
trial happened to be; benchmarks/step.py tries both). The setting is the process's: all its products
follow it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# relative error below which a float32 product is one; rounded operands would give some 2e-3
EXACT = 1e-5


def float32_is_onednn() -> bool:
    """Tells whether this process's float32 products go through oneDNN."""
    return _products().fp32_precision == "bf16"


def allow(on: bool) -> None:
    """Sends this process's float32 products through oneDNN, or back through MKL."""
    _products().fp32_precision = "bf16" if on else "ieee"


def _products() -> Any:
    """Returns torch's settings of matrix products, which its stubs do not know."""
    return torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def allowed(on: bool) -> Iterator[None]:
    """Sends float32 products through oneDNN, or through MKL, within a `with` block."""
    products = _products()
    before = products.fp32_precision
    allow(on)
    try:
        yield
    finally:
        products.fp32_precision = before


def allow_if_exact() -> None:
    """Sends this process's float32 products through oneDNN.

    Raises:
        ValueError: a trial shows that it rounds its operands on this CPU.
    """
    if (error := relative_error()) >= EXACT:
        raise ValueError(
            "kernels.onednn=true, and float32 products through oneDNN have a relative error of "
            f"{error:.1e} on this CPU, whose "
            "matrix units round the operands: set kernels.onednn=false"
        )
    allow(True)


def relative_error() -> float:
    """Measures the error of float32 products through oneDNN on this CPU against float64.

    Returns the worst of three relative norms: plain, with a transposed side, with odd rows.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 768, generator=generator) for _ in range(2))
    worst = 0.0
    with allowed(True):
        for left, right in ((a, b.T), (a.T, b), (a[:77], b.T)):
            expected = left.double() @ right.double()
            worst = max(worst, float(((left @ right).double() - expected).norm() / expected.norm()))
    return worst
