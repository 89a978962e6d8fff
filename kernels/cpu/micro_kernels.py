"""Hands torch's micro-kernels to brgemm.cpp, and says where they cannot run.

They are `at::native::cpublas::brgemm` (ATen/native/CPUBlas.h; tried with torch 2.13), found by name
in torch's library: its headers would take a minute to compile, and bind what is compiled to one
torch. They are oneDNN's, which compiles them at run time for what the CPU has.
"""

import ctypes
import functools
import os
import platform
import sys
from ctypes import c_void_p
from pathlib import Path

import torch
from torch import Tensor

from .library import AVX2, AVX512, BFLOAT16, call, cpu_flags, is_x86, library
from .onednn import EXACT

_NAMES = (
    "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb",
    "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
    "_ZN2at6native7cpublas14brgemm_releaseEb",
)
# What oneDNN asks of a CPU. It brings bfloat16 to AVX-512 without AVX512_BF16 as well, but not as
# these kernels: "could not generate a kernel".
_WANTED = {torch.float32: AVX2, torch.bfloat16: AVX512 | {BFLOAT16}}


def reason_against(dtype: torch.dtype) -> str | None:
    """Says why this machine cannot run brgemm.cpp in `dtype`; compiles nothing."""
    name = str(dtype).removeprefix("torch.")
    if dtype not in _WANTED:
        return f"it is for float32 and bfloat16, not {name}"
    if not is_x86():
        return "torch has its micro-kernels on x86-64 alone, and this CPU is " + platform.machine()
    if missing := sorted(_WANTED[dtype] - cpu_flags()):
        allowed = os.environ.get("ONEDNN_MAX_CPU_ISA")
        limit = f" (with ONEDNN_MAX_CPU_ISA={allowed})" if allowed else ""
        return f"for {name} this CPU has no {', '.join(missing)}{limit}"
    if not torch.backends.mkldnn.is_available():
        return "this torch is built without oneDNN"
    if addresses() is None:
        return f"torch {torch.__version__} has no at::native::cpublas::brgemm, as 2.13 has"
    return library().reason_against()


@functools.cache
def prepare() -> None:
    """Loads the library, compiled first if it must be, and gives it the micro-kernels.

    Raises:
        ValueError: it cannot be compiled, with the compiler's own words; or a trial shows that
            float32 is rounded here.
    """
    loaded, found = library().load(), addresses()
    assert found is not None, "ask `reason_against` first"
    loaded.moebius_use(*map(c_void_p, found))
    if not (error := relative_error()) < EXACT:
        raise ValueError(
            f"float32 products of torch's micro-kernels have a relative error of {error:.1e} on "
            f"this CPU ({EXACT:.0e} are allowed), whose units round the operands: set "
            "kernels.backend=segments"
        )


def relative_error() -> float:
    """Measures the error of float32 products of micro-kernels on this CPU against float64.

    Infinite where they cannot be had.
    """
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(77, 412, generator=generator)
    b, out = torch.randn(1, 412, 128, generator=generator), torch.empty(77, 128)
    starts = torch.tensor([0, len(a)], dtype=torch.int32)
    no_epilogue: list[Tensor | int | None] = [0, None, None, None, 0, None, None]
    status = call(
        "rows_times_bank_float32",
        *(a, 412, None, b, 412, 128, False, starts, 1, *no_epilogue, out, 1),
    )
    expected = a.double() @ b[0].double()
    return float("inf") if status else float((out - expected).norm() / expected.norm())


def addresses() -> list[int] | None:
    """Returns the addresses of the micro-kernels; None where torch lacks one."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    path = Path(torch.__file__).with_name("lib") / f"libtorch_cpu{suffix}"
    try:
        found = ctypes.CDLL(str(path))
        pointers = [ctypes.cast(getattr(found, name), c_void_p) for name in _NAMES]
    except (OSError, AttributeError):
        return None
    return [pointer.value or 0 for pointer in pointers]
