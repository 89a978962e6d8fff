"""Imports Triton for this package, with its pip line; says what its kernels refuse, starts them."""

from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from .available import INSTALL_LINE, interpreted, reason_against

# Triton's own types say `constexpr` of what its functions take and give as plain numbers.
if TYPE_CHECKING:

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
    """Checks a tensor's dtype and device.

    Raises:
        ValueError: these kernels do not have them.
    """
    if reason := reason_against(x.device.type, x.dtype):
        raise ValueError(f'kernels.backend="triton" cannot run here: {reason}')


def launch(kernel: Any, num_programs: int, *args: Any, **meta: Any) -> None:
    """Runs `num_programs` programs of a kernel on its tensors' device; 0 is no error."""
    if num_programs:
        with torch.cuda.device_of(next(value for value in args if value is not None)):
            kernel[(num_programs,)](*args, **meta)
