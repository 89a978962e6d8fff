"""Says whether this machine can run brgemm.cpp, loads it, and hands it torch's micro-kernels.

These are `at::native::cpublas::brgemm` (ATen/native/CPUBlas.h; tried with torch 2.13),
found by name in torch's library: its headers would take a minute to compile, and bind what is
compiled to one torch. They are oneDNN's, which compiles them at run time for what the CPU has.
"""

import ctypes
import functools
import os
import platform
import sys
from ctypes import byref, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from .build import CppLibrary
from .onednn import EXACT

# Argument types of the C functions, in the order of brgemm.cpp.
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
    *(c_int32, c_void_p, c_int32),  # add, into, threads
]
_MICRO_KERNELS = (
    "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb",
    "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
    "_ZN2at6native7cpublas14brgemm_releaseEb",
)
_AVX2 = frozenset({"avx2", "bmi2", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# What oneDNN asks of a CPU. It brings bfloat16 to AVX-512 without AVX512_BF16 as well, but not as
# these kernels: "could not generate a kernel".
_WANTED = {torch.float32: _AVX2, torch.bfloat16: _AVX512 | {"avx512_bf16"}}


class Epilogue(ctypes.Structure):
    """What is made of a product's rows: brgemm.cpp says it."""

    _fields_ = (
        ("mode", c_int32),
        ("gate", c_void_p),
        ("hidden", c_void_p),
        ("hidden_rows", c_void_p),
        ("hidden_stride", c_int64),
        ("gated", c_void_p),
        ("gate_gradient", c_void_p),
    )


def library() -> CppLibrary:
    """Returns the library for this CPU: what is around the products is compiled for AVX2, or for
    AVX-512 where there is that. (By names of instruction sets, and not -march=native: the library
    may lie on a folder that machines share.)
    """
    level = _AVX512 if cpu_flags() >= _AVX512 else _AVX2
    wide = ["-mprefer-vector-width=512"] if level is _AVX512 else []
    return CppLibrary(
        name="moebius_brgemm",
        source=Path(__file__).with_name("brgemm.cpp"),
        flags=["-O3", "-std=c++17", "-fopenmp", *(f"-m{name}" for name in sorted(level)), *wide],
        functions=[
            ("moebius_use", None, [c_void_p] * 3),
            *(
                (f"moebius_{name}_{dtype}", c_int32, arguments)
                for dtype in ("float32", "bfloat16")
                for name, arguments in (
                    ("rows_times_bank", _ROWS_TIMES_BANK),
                    ("bank_gradient", _BANK_GRADIENT),
                )
            ),
        ],
        takes="a few seconds",
        otherwise="set kernels.backend=segments to do without it",
    )


def reason_against(dtype: torch.dtype) -> str | None:
    """Says why this machine cannot run the C++ kernels in `dtype`; None where it can.

    Compiles nothing.
    """
    name = str(dtype).removeprefix("torch.")
    if dtype not in _WANTED:
        return f"it is for float32 and bfloat16, not {name}"
    if (machine := platform.machine()) not in ("x86_64", "AMD64"):
        return f"torch has its micro-kernels on x86-64 alone, and this CPU is {machine}"
    if missing := sorted(_WANTED[dtype] - cpu_flags()):
        return f"for {name} this CPU has no {', '.join(missing)}" + _limit()
    if not torch.backends.mkldnn.is_available():
        return "this torch is built without oneDNN"
    if _micro_kernels() is None:
        return f"torch {torch.__version__} has no at::native::cpublas::brgemm, as 2.13 has"
    return library().reason_against()


@functools.cache
def load_library() -> ctypes.CDLL:
    """Loads the library, compiled first if it must be: a few seconds, once per machine.

    Raises:
        ValueError: it cannot be compiled, with the compiler's own words; or a trial shows that
            float32 is rounded here.
    """
    loaded, micro_kernels = library().load(), _micro_kernels()
    assert micro_kernels is not None, "ask `reason_against` first"
    loaded.moebius_use(*micro_kernels)
    if not (error := relative_error(loaded)) < EXACT:
        raise ValueError(
            f"float32 products of torch's micro-kernels have a relative error of {error:.1e} on "
            f"this CPU ({EXACT:.0e} are allowed), whose units round the operands: set "
            "kernels.backend=segments"
        )
    return loaded


def relative_error(loaded: ctypes.CDLL) -> float:
    """Measures the error of float32 products of micro-kernels on this CPU against float64.

    Infinite where they cannot be had.
    """
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(77, 412, generator=generator)
    b, out = torch.randn(1, 412, 128, generator=generator), torch.empty(77, 128)
    starts = torch.tensor([0, len(a)], dtype=torch.int32)
    status = loaded.moebius_rows_times_bank_float32(
        *(a.data_ptr(), 412, None, b.data_ptr(), 412, 128, False, starts.data_ptr(), 1),
        *(byref(Epilogue()), out.data_ptr(), 1),
    )
    expected = a.double() @ b[0].double()
    return float("inf") if status else float((out - expected).norm() / expected.norm())


def _micro_kernels() -> list[Any] | None:
    """Returns the addresses of _MICRO_KERNELS; None where torch lacks one."""
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    path = Path(torch.__file__).with_name("lib") / f"libtorch_cpu{suffix}"
    try:
        found = ctypes.CDLL(str(path))
        return [ctypes.cast(getattr(found, name), c_void_p) for name in _MICRO_KERNELS]
    except (OSError, AttributeError):
        return None


# The CPU ------------------------------------------------------------------------------------------


def cpu_flags() -> frozenset[str]:
    """Returns what this CPU has, as far as oneDNN is allowed to use it (ONEDNN_MAX_CPU_ISA)."""
    allowed, flags = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(), _flags_of_cpu()
    if allowed in ("SSE41", "AVX"):
        return flags - _AVX512 - {"avx512_bf16"}
    if allowed.startswith("AVX2"):
        return flags - (_AVX512 - _AVX2) - {"avx512_bf16"}
    if allowed in ("AVX512_CORE", "AVX512_CORE_VNNI"):
        return flags - {"avx512_bf16"}
    return flags


def _limit() -> str:
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA")
    return f" (with ONEDNN_MAX_CPU_ISA={allowed})" if allowed else ""


@functools.cache
def _flags_of_cpu() -> frozenset[str]:
    """Reads the CPU's flags from /proc/cpuinfo; none where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return next(
        (frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")),
        frozenset(),
    )
