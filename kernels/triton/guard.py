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

__all__ = ["INTERPRETED", "cdiv", "launch", "next_power_of_2", "tl", "triton"]

INTERPRETED = interpreted()


def launch(kernel: Any, num_programs: int, *args: Any, **meta: Any) -> None:
    """Launches `num_programs` programs of a kernel on its tensors' device; 0 launches nothing."""
    if not num_programs:
        return
    first = next(value for value in args if value is not None)
    if first.is_cuda and first.get_device() != torch.cuda.current_device():
        with torch.cuda.device_of(first):
            kernel.run(*args, grid=(num_programs,), warmup=False, **meta)
    else:  # as `kernel[grid](…)`, which makes a function for every launch
        kernel.run(*args, grid=(num_programs,), warmup=False, **meta)


# Of Triton's own `cdiv` and `next_power_of_2` a call on the host takes 3 µs, a fourth of a launch.


def cdiv(number: int, divisor: int) -> int:
    """Divides and rounds up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Returns the least power of 2 that is not below a positive number."""
    return 1 << (number - 1).bit_length()
