"""The C++ libraries of the CPU kernels, compiled on first use.

    lists.cpp   lists of routes: sums, sorting, counting and packing for an exchange
    scores.cpp  a router's scores: top-k, and sums of softmaxes
    brgemm.cpp  grouped products, on x86-64 with AVX2: a library of its own, because it needs a torch
                with the header of its micro-kernels

Without a compiler, torch operations compute the same results in more passes (`segments` replaces
brgemm.cpp). On x86-64 they are compiled for AVX2, or for AVX-512 if the CPU has it. Multiplies and
adds are never contracted, so all processors give the same bits.
"""

import functools
import math
import os
import platform
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .build import CppLibrary, LoadedLibrary

AVX2 = frozenset({"avx2", "bmi2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
BFLOAT16 = "avx512_bf16"
_TORCH = Path(torch.__file__).parent
HEADER = _TORCH / "include" / "ATen" / "native" / "CPUBlas.h"  # of torch's micro-kernels
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fno-math-errno",
)


def library() -> CppLibrary:
    """Returns the library of lists and scores for this CPU's instruction sets."""
    return _library("moebius_kernels", "lists.cpp", "scores.cpp")


def products() -> CppLibrary:
    """Returns the library of products for this CPU's instruction sets and this torch."""
    found = _library("moebius_products", "brgemm.cpp")
    return replace(
        found,
        flags=(*found.flags, f"-DMOEBIUS_TORCH={torch.__version__}"),  # another torch compiles anew
        links=(f"-I{_TORCH / 'include'}", f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"),
    )


def _library(name: str, *sources: str) -> CppLibrary:
    flags = list(_FLAGS)
    if is_x86() and cpu_flags() >= AVX2:
        level = AVX512 if cpu_flags() >= AVX512 else AVX2
        flags += [f"-m{each}" for each in sorted(level)]
        flags += ["-mprefer-vector-width=512"] if level is AVX512 else []
    return CppLibrary(
        name=name,
        sources=[Path(__file__).with_name(source) for source in sources],
        flags=flags,
        otherwise="torch operations do the same, slower (kernels.backend=segments)",
    )


@functools.cache
def loaded() -> LoadedLibrary | None:
    """Loads the library; returns None without a compiler, and warns if the compiler fails."""
    found = library()
    if found.reason_against() is not None:
        return None
    try:
        return found.load()
    except ValueError as error:
        warnings.warn(str(error), stacklevel=2)
        return None


def handles(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Returns whether the library accepts a tensor: plain (no tracer's), on the CPU, of a given dtype."""
    is_plain = type(tensor) is Tensor and tensor.device.type == "cpu"
    return is_plain and tensor.dtype in dtypes and loaded() is not None


def call(name: str, *arguments: Tensor | int | None) -> int:
    """Calls a function of the library; callers ask `handles` first."""
    library = loaded()
    assert library is not None, "ask `handles` first"
    return library.call(name, *arguments)


# The CPU ------------------------------------------------------------------------------------------


def is_x86() -> bool:
    """Returns whether this is an x86-64 CPU."""
    return platform.machine() in ("x86_64", "AMD64")


def cpu_flags() -> frozenset[str]:
    """Returns this CPU's flags that oneDNN may use (ONEDNN_MAX_CPU_ISA)."""
    allowed, flags = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(), _flags_of_cpu()
    if allowed in ("SSE41", "AVX"):
        return flags - AVX512 - {BFLOAT16}
    if allowed.startswith("AVX2"):
        return flags - (AVX512 - AVX2) - {BFLOAT16}
    if allowed in ("AVX512_CORE", "AVX512_CORE_VNNI"):
        return flags - {BFLOAT16}
    return flags


@functools.cache
def _flags_of_cpu() -> frozenset[str]:
    """Reads the CPU's flags from /proc/cpuinfo; empty without such a file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(flags, ()))


# Memory -------------------------------------------------------------------------------------------

_held = threading.local()  # ranks may be threads


def workspace(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Returns uninitialised memory of a shape, with the dtype and device of `like`.

    The next call with that name returns the same memory: first touching a fresh page costs ten times
    as much as writing to a used one, and a call's rows take tens of megabytes. On GPUs this is an
    ordinary allocation, because their allocator reuses memory.
    """
    if like.device.type != "cpu":
        return like.new_empty(shape)
    held: dict[str, Tensor] = _held.__dict__
    size = math.prod(shape) * like.element_size()
    block = held.get(name)
    if block is None or block.numel() < size:
        held.pop(name, None)
        block = held[name] = torch.empty(size, dtype=torch.uint8)
    return block[:size].view(like.dtype).view(*shape)
