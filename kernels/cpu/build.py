"""Compiles the package's C++ on first use, caches the library, and loads it.

It calls the compiler directly, without torch's extension header. That takes seconds instead of a
minute, and needs only a C++ compiler (torch's `cpp_extension` also needs ninja). Concurrent processes
wait on a file lock, which the kernel releases when its holder dies; torch's own lock file survives a
killed process. A finished library is renamed into place.
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
    """C++ sources of one library.

    Args:
        name: the library's name in the cache folder.
        sources: source files.
        flags: compiler flags, without -march=native because machines may share the folder.
        otherwise: what works without the library; ends a sentence of its errors.
        links: flags that find headers and libraries; they do not change the library.
    """

    name: str
    sources: Sequence[Path]
    flags: Sequence[str]
    otherwise: str
    links: Sequence[str] = ()

    @property
    def file(self) -> Path:
        """Returns the path of the compiled library, whether or not it exists.

        The name depends on sources, flags and architecture: x86 and ARM nodes may share a home.
        """
        text = b"".join(source.read_bytes() for source in self.sources)
        text += " ".join((*self.flags, platform.machine())).encode()
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions"
        )
        return Path(root) / self.name / f"{hashlib.sha256(text).hexdigest()[:16]}.so"

    def reason_against(self) -> str | None:
        """Returns why the library can neither be loaded nor compiled here, or None; compiles nothing."""
        if self.file.exists():
            return None
        compiler = _compiler()[0]
        if shutil.which(compiler) is None:
            return f"there is no C++ compiler {compiler!r}: install g++, or name another in the environment variable CXX"
        nearest = next(folder for folder in self.file.parents if folder.exists())
        if not os.access(nearest, os.W_OK):
            return (
                f"{nearest} is not writable, so nothing can be compiled there: name another folder in "
                "TORCH_EXTENSIONS_DIR"
            )
        return None

    def load(self) -> "LoadedLibrary":
        """Loads the library, compiling it if no process has.

        Raises:
            ValueError: compilation failed; contains the compiler's output.
        """
        path = self.file
        if not path.exists():
            try:
                self.compile(path)
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or error
                raise ValueError(
                    f"{self.name} could not be compiled; {self.otherwise}. The compiler said:\n{said}"
                ) from error
        return LoadedLibrary(path)

    def compile(self, path: Path) -> None:
        """Compiles the sources into `path`, unless another process has done so meanwhile."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return
            print(f"compiling {self.name}, once on this machine", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                built = Path(folder) / path.name
                command = [*_compiler(), "-shared", "-fPIC", *map(str, self.sources)]
                command += [*self.flags, *self.links, "-o", str(built)]
                subprocess.run(command, check=True, capture_output=True, text=True)
                os.replace(built, path)


class LoadedLibrary:
    """A library whose functions take only pointers and int64_t, and return int64_t or nothing.

    No table of signatures is therefore needed.
    """

    def __init__(self, path: Path) -> None:
        self.handle = ctypes.CDLL(str(path))
        self._functions: dict[str, Any] = {}

    def call(self, name: str, *arguments: Any) -> int:
        """Calls the function moebius_<name>.

        The first call fixes the argument types: numbers, or addresses (tensors, `byref`, None).
        Tensors must be contiguous, or the arguments give their strides. The result is undefined for
        functions that return nothing.
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
    """Returns the compiler command: CXX, which may contain options, or g++."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


# Compilers of torch and Triton ---------------------------------------------------------------------

# By device type: the language, the variable that names a compiler, and the default compilers.
_COMPILERS = {"cpu": ("C++", "CXX", ("g++",)), "cuda": ("C", "CC", ("gcc", "clang"))}


class MissingTool(NamedTuple):
    """Names a missing tool, to follow "needs …", and gives advice, to follow "and …"."""

    need: str
    advice: str


def lacking(device_type: str) -> MissingTool | None:
    """Returns what is missing to compile code for a device type, or None.

    On CPUs torch generates C++. On GPUs Triton compiles a C module for the driver on first use
    (triton/backends/nvidia/driver.c; versions 3.6 to 3.9). Both include Python's header.
    """
    if device_type not in _COMPILERS:
        return None
    variables = (os.environ.get(name) for name in (_COMPILERS[device_type][1], "CPATH", "PATH"))
    return _lacking(device_type, sysconfig.get_path("include", "posix_prefix"), *variables)


@functools.cache
def _lacking(
    device_type: str, usual: str, compiler: str | None, cpath: str | None, _path: str | None
) -> MissingTool | None:
    language, variable, known = _COMPILERS[device_type]
    names = known if compiler is None else (compiler,)
    if not any(shutil.which(name) for name in names):
        return MissingTool(
            f"a {language} compiler on {device_type.upper()} devices",
            f"there is no {' and no '.join(map(repr, names))} here: install {known[0]}, or name "
            f"another in the environment variable {variable}",
        )
    # where compilers search for it, the usual folder first
    folders = [usual, *filter(None, (cpath or "").split(os.pathsep))]
    if not any((Path(folder) / "Python.h").is_file() for folder in folders):
        return MissingTool(
            "the headers of Python",
            f"there is no {Path(usual) / 'Python.h'}: install them (python3-dev on Debian and "
            "Ubuntu), or name their folder in the environment variable CPATH",
        )
    return None
