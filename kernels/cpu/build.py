"""Compiles our C++ into a library when it is first asked for, keeps it, and loads it.

The compiler is called directly, without torch's headers: that takes two seconds instead of a minute,
binds the library to no version of torch, and needs a C++ compiler and nothing else (torch's own
`cpp_extension` needs ninja too). Processes that start together wait for the first of them by a file
lock, which the kernel frees when its holder dies; torch's own lock is a file that a killed process
leaves behind. A library is compiled in a folder of its own and moved into place by one rename.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class CppLibrary:
    """C++ sources that become one library.

    Args:
        name: of the library among those of this machine.
        sources: the files.
        flags: of the compiler, without -march=native: machines may share the folder.
        otherwise: what works without the library; the end of a sentence of its errors.
    """

    name: str
    sources: Sequence[Path]
    flags: Sequence[str]
    otherwise: str

    @property
    def file(self) -> Path:
        """Returns the path of the compiled library, whether it exists or not.

        The name depends on the sources, the flags, and the kind of processor: an x86 node and an
        ARM node may share a home folder.
        """
        text = b"".join(source.read_bytes() for source in self.sources)
        text += " ".join((*self.flags, platform.machine())).encode()
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions"
        )
        return Path(root) / self.name / f"{hashlib.sha256(text).hexdigest()[:16]}.so"

    def reason_against(self) -> str | None:
        """Says why the library can neither be loaded nor compiled here; compiles nothing."""
        if self.file.exists():
            return None
        compiler = _compiler()[0]
        if shutil.which(compiler) is None:
            return (
                f"there is no C++ compiler {compiler!r}: install g++, or name another in the "
                "environment variable CXX"
            )
        nearest = next(folder for folder in self.file.parents if folder.exists())
        if not os.access(nearest, os.W_OK):
            return (
                f"nothing can be compiled into {nearest}, which is not yours to write: name "
                "another in TORCH_EXTENSIONS_DIR"
            )
        return None

    def load(self) -> "LoadedLibrary":
        """Loads the library, and compiles it first where no process has.

        Raises:
            ValueError: it cannot be compiled; with the compiler's own words.
        """
        path = self.file
        if not path.exists():
            try:
                self.compile(path)
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or error
                raise ValueError(
                    f"{self.name} could not be compiled; {self.otherwise}. It was said:\n{said}"
                ) from error
        return LoadedLibrary(path)

    def compile(self, path: Path) -> None:
        """Compiles the sources into that file, unless another process has done so meanwhile."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return
            print(f"compiling {self.name}, once on this machine", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                built = Path(folder) / path.name
                command = [*_compiler(), "-shared", "-fPIC", *self.flags]
                command += [*map(str, self.sources), "-o", str(built)]
                subprocess.run(command, check=True, capture_output=True, text=True)
                os.replace(built, path)


class LoadedLibrary:
    """A library whose functions take pointers and int64_t alone, and return one of them or nothing.

    So there is no table of their signatures to keep in step.
    """

    def __init__(self, path: Path) -> None:
        self.handle = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}

    def call(self, name: str, *arguments: Any) -> int:
        """Calls the function moebius_<name>.

        The types of its first call stay: numbers, or addresses (tensors, `byref`, None). Tensors are
        contiguous, or the arguments say how they lie. A result means something only for a function
        that has one.
        """
        function = self._functions.get(name) or self._typed(name, arguments)
        given = (each.data_ptr() if isinstance(each, Tensor) else each for each in arguments)
        return function(*given)

    def _typed(self, name: str, arguments: tuple[Any, ...]) -> Any:
        function = self._functions[name] = getattr(self.handle, f"moebius_{name}")
        function.restype = c_int64
        function.argtypes = [c_int64 if isinstance(each, int) else c_void_p for each in arguments]
        return function


def _compiler() -> list[str]:
    """Returns the compiler's command: what CXX says, which may have options, or g++."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


# What torch and Triton compile ---------------------------------------------------------------------

# By type of device: the language of what is compiled, the variable that names a compiler, and those
# that are looked for else.
_COMPILERS = {"cpu": ("C++", "CXX", ("g++",)), "cuda": ("C", "CC", ("gcc", "clang"))}


class Lack(NamedTuple):
    """What is needed, as the end of "needs …", and what to do, as a sentence goes on: "and …"."""

    need: str
    advice: str


def lacking(device_type: str) -> Lack | None:
    """Returns what is lacking to compile code for that type of device; None: nothing.

    On CPUs torch writes C++; on GPUs Triton writes the kernels, but reaches the driver through a
    module in C that it compiles when it is first used (triton/backends/nvidia/driver.c; versions
    3.6 to 3.9). Both modules include Python's own header.
    """
    if device_type not in _COMPILERS:
        return None
    variables = (os.environ.get(name) for name in (_COMPILERS[device_type][1], "CPATH", "PATH"))
    return _lacking(device_type, sysconfig.get_path("include", "posix_prefix"), *variables)


@functools.cache
def _lacking(
    device_type: str, usual: str, compiler: str | None, cpath: str | None, _path: str | None
) -> Lack | None:
    language, variable, known = _COMPILERS[device_type]
    names = known if compiler is None else (compiler,)
    if not any(shutil.which(name) for name in names):
        return Lack(
            f"a {language} compiler on {device_type.upper()} devices",
            f"there is no {' and no '.join(map(repr, names))} here: install {known[0]}, name "
            f"another in the environment variable {variable}",
        )
    # the folders where compilers look for it, the usual one first
    folders = [usual, *filter(None, (cpath or "").split(os.pathsep))]
    if not any((Path(folder) / "Python.h").is_file() for folder in folders):
        return Lack(
            "the headers of Python",
            f"there is no {Path(usual) / 'Python.h'}: install them (python3-dev on Debian and "
            "Ubuntu), name their folder in the environment variable CPATH",
        )
    return None
