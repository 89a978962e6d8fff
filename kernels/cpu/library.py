"""The C++ of the kernels on CPUs: one library, compiled when it is first used.

    lists.cpp   lists of routes: added up, sorted, counted and packed for an exchange
    scores.cpp  a router's scores: the K greatest, and sums of softmaxes
    brgemm.cpp  grouped products, on x86-64 with AVX2

Where there is no compiler, torch's own operations give the same answers, in more passes (brgemm.cpp
is a backend of its own, and `segments` stands in for it). On x86-64 the library is compiled for AVX2,
or for AVX-512 where the CPU has it; multiplications and additions are never contracted, so both give
the same bits, and so does another kind of processor.
"""

import functools
import math
import os
import platform
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .build import CppLibrary, LoadedLibrary

AVX2 = frozenset({"avx2", "bmi2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
BFLOAT16 = "avx512_bf16"
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fno-math-errno",
)


def library() -> CppLibrary:
    """Returns the library for this CPU.

    By names of instruction sets, and not -march=native: machines may share the folder.
    """
    sources, flags = ["lists.cpp", "scores.cpp"], list(_FLAGS)
    if is_x86() and cpu_flags() >= AVX2:
        sources.append("brgemm.cpp")
        level = AVX512 if cpu_flags() >= AVX512 else AVX2
        flags += [f"-m{name}" for name in sorted(level)]
        flags += ["-mprefer-vector-width=512"] if level is AVX512 else []
    return CppLibrary(
        name="moebius_kernels",
        sources=[Path(__file__).with_name(name) for name in sources],
        flags=flags,
        otherwise="torch's own operations do the same, slower (kernels.backend=segments)",
    )


@functools.cache
def loaded() -> LoadedLibrary | None:
    """Loads the library; None where it cannot be had.

    Warns where a compiler is there and does not work.
    """
    found = library()
    if found.reason_against() is not None:
        return None
    try:
        return found.load()
    except ValueError as error:
        warnings.warn(str(error), stacklevel=2)
        return None


def handles(tensor: Tensor, *dtypes: torch.dtype) -> bool:
    """Tells whether the library can work on a tensor: a plain one, on the CPU, of one of the dtypes.

    A tracer's stand-ins are no plain tensors.
    """
    is_plain = type(tensor) is Tensor and tensor.device.type == "cpu"
    return is_plain and tensor.dtype in dtypes and loaded() is not None


def call(name: str, *arguments: Tensor | int | None) -> int:
    """Calls a function of the library; callers ask `handles` first."""
    library = loaded()
    assert library is not None, "ask `handles` first"
    return library.call(name, *arguments)


# The CPU ------------------------------------------------------------------------------------------


def is_x86() -> bool:
    """Tells whether this is an x86-64 CPU."""
    return platform.machine() in ("x86_64", "AMD64")


def cpu_flags() -> frozenset[str]:
    """Returns what this CPU has, as far as oneDNN is allowed to use it (ONEDNN_MAX_CPU_ISA)."""
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
    """Reads the CPU's flags from /proc/cpuinfo; none where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(flags, ()))


# Memory -------------------------------------------------------------------------------------------

_held = threading.local()  # ranks may be threads


def workspace(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Returns uninitialised memory of that shape, in the dtype and on the device of `like`.

    The next call with that name gets the same memory, for the first touch of a fresh page costs ten
    times what writing to a known one does, and a call's rows are tens of megabytes. A GPU's
    allocator reuses what it was given back, so there it is an ordinary allocation.
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
