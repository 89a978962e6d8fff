"""Says whether this machine can run avx512.cpp, and loads it."""

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from ..cpp_library import CppLibrary

# Argument types of the C functions, in the order of avx512.cpp.
_ROWS_TIMES_BANK = [
    *(c_void_p, c_int64, c_void_p),  # a, stride, rows
    *(c_void_p, c_int64, c_int64, c_int32),  # bank, k, columns, transposed
    *(c_void_p, c_int64),  # starts, experts
    *(c_void_p, c_void_p, c_int32),  # epilogue, out, threads
]
_BANK_GRADIENT = [
    *(c_void_p, c_int64, c_void_p),  # a, a_width, a_rows
    *(c_void_p, c_int64, c_void_p),  # b, b_width, b_rows
    *(c_void_p, c_int64),  # starts, experts
    *(c_void_p, c_int32),  # into, threads
]
LIBRARY = CppLibrary(
    name="moebius_avx512",
    source=Path(__file__).with_name("avx512.cpp"),
    # Only what the run-time check below asks the CPU for.
    flags=[
        *("-O3", "-std=c++17", "-fopenmp"),
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16"),
        *("-mfma", "-mbmi2"),
    ],
    functions=[
        (f"moebius_{name}_{dtype}", None, arguments)
        for dtype in ("float32", "bfloat16")
        for name, arguments in (
            ("rows_times_bank", _ROWS_TIMES_BANK),
            ("bank_gradient", _BANK_GRADIENT),
        )
    ],
    takes="a few seconds",
    otherwise="set kernels.backend=segments to do without it",
)


def reason_against(dtype: torch.dtype) -> str | None:
    """Says why this machine cannot run the C++ kernels in `dtype`; None where it can.

    Compiles nothing.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return f"they are for float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    flags = _cpu_flags()
    wanted = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma", "bmi2"}
    wanted |= {"avx512_bf16"} if dtype == torch.bfloat16 else set()
    if missing := sorted(wanted - flags):
        return f"this CPU has no {', '.join(missing)}"
    return LIBRARY.reason_against()


@functools.cache
def load_library() -> ctypes.CDLL:
    """Loads the library, compiled first if it must be: some ten seconds, once per machine.

    Raises:
        ValueError: it cannot be compiled; with the compiler's own words.
    """
    return LIBRARY.load()


@functools.cache
def _cpu_flags() -> frozenset[str]:
    """Reads the CPU's flags from /proc/cpuinfo; none where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")),
        frozenset(),
    )
