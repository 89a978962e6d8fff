"""Triton's one door into this package: the import with its pip line, and what the kernels may be given.

Interpreter mode (TRITON_INTERPRET=1, set before this module is imported) runs the kernels on CPU tensors, slowly, for tests.
Its bfloat16 arithmetic is silently wrong in all releases up to 3.9 (casts truncate, products are off by powers of ten), so half
precision is refused there.
"""

from typing import Any

import torch
from torch import Tensor

try:
    import triton  # pyright: ignore[reportMissingImports]
    import triton.language as tl  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(
        'kernels.backend="triton" needs Triton, which is not installed: pip install "triton>=3.6,<3.9"'
    ) from error

__all__ = ["INTERPRETED", "check_tensor", "launch", "tl", "triton"]

INTERPRETED = bool(triton.knobs.runtime.interpret)


def check_tensor(x: Tensor) -> None:
    """Raises ValueError: a dtype or device that these kernels do not have."""
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the triton backend computes in float32 and bfloat16, not {x.dtype}: choose another backend")
    if INTERPRETED and x.dtype is not torch.float32:
        raise ValueError(f"Triton's interpreter computes {x.dtype} wrongly without saying so: give it float32")
    if not INTERPRETED and not x.is_cuda:
        raise ValueError(
            f"the triton backend wants CUDA tensors, not {x.device}; tests on a CPU set TRITON_INTERPRET=1"
        )


def launch(kernel: Any, num_programs: int, *args: Any, **meta: Any) -> None:
    """Runs `num_programs` programs of a kernel on their tensors' device; none is no error."""
    if num_programs:
        with torch.cuda.device_of(next(value for value in args if value is not None)):
            kernel[(num_programs,)](*args, **meta)
