"""Where this package imports Triton: the import with its pip line, what the kernels refuse, and
how they are started.
"""

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from .available import INSTALL_LINE, interpreted, reason_against

if (
    TYPE_CHECKING
):  # Triton's own types say `constexpr` of what its functions take and give as plain numbers

    class _Anything(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_Anything):
        constexpr: TypeAlias = Any

    triton: Any
else:
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        raise ImportError(
            f'kernels.backend="triton" needs Triton, which is not installed: {INSTALL_LINE}'
        ) from error

__all__ = ["INTERPRETED", "check_tensor", "launch", "tl", "triton"]

INTERPRETED = interpreted()


def check_tensor(x: Tensor) -> None:
    """Raises ValueError: a dtype or device that these kernels do not have."""
    if reason := reason_against(x.device.type, x.dtype):
        raise ValueError(f'kernels.backend="triton" cannot run here: {reason}')


def launch(kernel: Any, num_programs: int, *args: Any, **meta: Any) -> None:
    """Runs `num_programs` programs of a kernel on its tensors' device; none is no error."""
    if num_programs:
        with torch.cuda.device_of(next(value for value in args if value is not None)):
            kernel[(num_programs,)](*args, **meta)
