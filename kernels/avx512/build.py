"""Compiles avx512.cpp when it is first asked for, by torch's extension loader, and keeps the file.

It is compiled in a folder of this process's own and then put in place by one rename, so nobody sees
half a file. Processes that start together wait for the first of them by a lock of the kernel's,
which is free again when its holder dies; torch's own is a file that a killed process leaves behind,
and for which everybody waits for ever.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int32, c_int64, c_void_p
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("avx512.cpp")
_NAME = "moebius_avx512"
# Only what the run-time check below asks the CPU for: no -march=native, for the file may lie on a
# folder that machines share.
_FLAGS = [
    "-O3",
    "-std=c++17",
    "-fopenmp",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512bf16",
    "-mfma",
    "-mbmi2",
]
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


_FUNCTIONS = (("rows_times_bank", _ROWS_TIMES_BANK), ("bank_gradient", _BANK_GRADIENT))


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
    if library_file().exists():
        return None
    from torch.utils import cpp_extension  # it imports setuptools: only where something is compiled

    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        return (
            f"there is no C++ compiler {compiler!r}: install g++, or name another in the "
            "environment variable CXX"
        )
    with _scripts_on_path():
        has_ninja = cpp_extension.is_ninja_available()
    if not has_ninja:
        return "torch builds extensions with ninja, which is not here: pip install ninja"
    nearest = next(folder for folder in library_file().parents if folder.exists())
    if not os.access(nearest, os.W_OK):
        return (
            f"nothing can be compiled into {nearest}, which is not yours to write: name another in "
            "TORCH_EXTENSIONS_DIR"
        )
    return None


def library_file() -> Path:
    """Returns the path of the compiled library, whether it exists or not.

    Its name changes with all that it is made of: the source, the flags, torch's version.
    """
    made_of = _SOURCE.read_bytes() + " ".join(_FLAGS).encode() + torch.__version__.encode()
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions"
    )
    return Path(root) / _NAME / f"{hashlib.sha256(made_of).hexdigest()[:16]}.so"


@functools.cache
def load_library() -> ctypes.CDLL:
    """Loads the library, compiled first if it must be: some ten seconds, once per machine.

    Raises:
        ValueError: it cannot be compiled; with the compiler's own words.
    """
    path = library_file()
    if not path.exists():
        try:
            _build(path)
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"{_SOURCE.name} could not be compiled; set kernels.backend=segments to do without "
                f"it. It was said:\n{error}"
            ) from error
    found = ctypes.CDLL(str(path))
    for dtype in ("float32", "bfloat16"):
        for name, arguments in _FUNCTIONS:
            function = getattr(found, f"moebius_{name}_{dtype}")
            function.argtypes, function.restype = arguments, None
    return found


def _build(path: Path) -> None:
    from torch.utils import cpp_extension

    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go by the kernel, however its holder ends
        if path.exists():
            return
        print(
            f"compiling {_SOURCE.name}, once on this machine: some ten seconds",
            file=sys.stderr,
            flush=True,
        )
        with tempfile.TemporaryDirectory(dir=path.parent) as folder, _scripts_on_path():
            cpp_extension.load(
                _NAME,
                [str(_SOURCE)],
                extra_cflags=_FLAGS,
                extra_ldflags=["-fopenmp"],
                build_directory=folder,
                is_python_module=False,
            )
            # by pattern: torch adds a number to the name of a second one in a process
            [built] = Path(folder).glob("*.so")
            os.replace(built, path)


@contextmanager
def _scripts_on_path() -> Iterator[None]:
    """Puts ninja's command on PATH, where pip has installed it.

    So an environment need not be activated to be used.
    """
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join((before, sysconfig.get_path("scripts")))
    try:
        yield
    finally:
        os.environ["PATH"] = before


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
