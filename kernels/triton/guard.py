"""Imports Triton for this package, or says how to install it; launches kernels."""

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .available import INSTALL_LINE, interpreted

# Triton's own types declare plain numbers as `constexpr`.
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

__all__ = ["INTERPRETED", "launch", "tl", "triton"]

INTERPRETED = interpreted()


def launch(kernel: Any, num_programs: int, *args: Any, **meta: Any) -> None:
    """Launches `num_programs` programs of a kernel on its tensors' device; 0 launches nothing."""
    if num_programs:
        with torch.cuda.device_of(next(value for value in args if value is not None)):
            kernel[(num_programs,)](*args, **meta)
