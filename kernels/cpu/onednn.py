"""Routes float32 products through oneDNN instead of MKL: over twice as fast on some CPUs, wrong on others.

torch sends float32 products to MKL, which takes a slower path on CPUs not made by Intel. Allowing
"bf16" precision sends them to oneDNN. A CPU without matrix units (AMX) then still computes in
float32, while one with AMX would round. `kernels.onednn` therefore requires a trial on this CPU to
be exact. It is off by default, so a run's bits never depend on a timing; benchmarks/step.py measures
both. The setting applies to all products of the process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# largest relative error of an exact float32 product; rounded operands give about 2e-3
EXACT = 1e-5


def float32_is_onednn() -> bool:
    """Returns whether this process's float32 products go through oneDNN."""
    return _products().fp32_precision == "bf16"


def allow(on: bool) -> None:
    """Sends this process's float32 products through oneDNN, or back through MKL."""
    _products().fp32_precision = "bf16" if on else "ieee"


def _products() -> Any:
    """Returns torch's matmul settings, which its type stubs lack."""
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
            f"kernels.onednn=true, but float32 products through oneDNN have a relative error of {error:.1e} on "
            "this CPU, whose matrix units round the operands: set kernels.onednn=false"
        )
    allow(True)


def relative_error() -> float:
    """Measures the relative error of float32 products through oneDNN against float64.

    Returns the worst of three products: with either side transposed, and with an odd row count.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 768, generator=generator) for _ in range(2))
    worst = 0.0
    with allowed(True):
        for left, right in ((a, b.T), (a.T, b), (a[:77], b.T)):
            expected = left.double() @ right.double()
            worst = max(worst, float(((left @ right).double() - expected).norm() / expected.norm()))
    return worst
