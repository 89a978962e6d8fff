"""Float32 products through oneDNN instead of MKL: on some CPUs more than twice as fast, on others wrong.

torch sends float32 products to MKL, which on CPUs that are not Intel's takes a slower path. Allowing oneDNN "bf16" for them
sends them to oneDNN; a CPU without matrix units (AMX) then still computes in float32, one with them would round. So it is
allowed only where a trial on this CPU finds it exact (`kernels.onednn`, off unless asked for: a run's bits must not hang on how
fast a trial happened to be; benchmarks/step.py tries both). The setting is the process's: all its products follow it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Probe:
    """What a trial on this CPU gave."""

    relative_error: float  # of oneDNN's product, against float64
    speedup: float  # over MKL's

    @property
    def exact(self) -> bool:
        """Float32 all through: rounded operands would give some 2e-3."""
        return self.relative_error < 1e-5


def float32_is_onednn() -> bool:
    """Whether this process's float32 products go through oneDNN."""
    return torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # pyright: ignore[reportAttributeAccessIssue]


def allow(on: bool) -> None:
    """Sends this process's float32 products through oneDNN, or back through MKL."""
    torch.backends.mkldnn.matmul.fp32_precision = "bf16" if on else "ieee"  # pyright: ignore[reportAttributeAccessIssue]


def allow_if_exact() -> None:
    """Sends this process's float32 products through oneDNN.

    Raises:
        ValueError: a trial shows that it rounds its operands on this CPU.
    """
    found = probe()
    if not found.exact:
        raise ValueError(
            f"kernels.onednn=true, and float32 products through oneDNN have a relative error of {found.relative_error:.1e} on "
            "this CPU, whose matrix units round the operands: set kernels.onednn=false"
        )
    allow(True)


def probe() -> Probe:
    """Tries both on a product of an expert's shape; some 20 ms. The setting stays as it was."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator) for shape in ((512, 512), (512, 128)))
    before = float32_is_onednn()
    try:
        allow(False)
        mkl_s = _fastest(lambda: a @ b)
        allow(True)
        onednn_s = _fastest(lambda: a @ b)
        product = a @ b
    finally:
        allow(before)
    exact = a.double() @ b.double()
    return Probe(((product - exact).norm() / exact.norm()).item(), mkl_s / onednn_s)


def _fastest(call: Callable[[], Tensor]) -> float:
    times = []
    for _ in range(12):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
