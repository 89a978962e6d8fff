"""Compiles a C++ file of ours when it is first asked for, keeps the library, and loads it.

The compiler is called directly: what is compiled here knows nothing of torch's headers, so it takes
seconds, and wants a C++ compiler and nothing else. It is compiled in a folder of this process's own
and then put in place by one rename, so nobody sees half a file. Processes that start together wait
for the first of them by a lock of the kernel's, which is free again when its holder dies; torch's
own is a file that a killed process leaves behind, and for which everybody waits for ever.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What a library's functions are called and take: name, result, arguments.
Function = tuple[str, Any, Sequence[Any]]


@dataclass(frozen=True)
class CppLibrary:
    """A C++ source beside the module that uses it.

    Args:
        name: of the library among those of this machine.
        source: the file.
        flags: of the compiler, without -march=native: the library may lie on a folder that machines
            share.
        functions: what is called, `extern "C"`.
        takes: how long compiling takes, for the line that people read while they wait.
        otherwise: what can be done without it; the end of a sentence of its errors.
    """

    name: str
    source: Path
    flags: Sequence[str]
    functions: Sequence[Function]
    takes: str
    otherwise: str

    @property
    def file(self) -> Path:
        """Returns the path of the compiled library, whether it exists or not.

        Its name changes with all that it is made of: the source, the flags, and the kind of
        processor, for machines of two kinds may share a home folder.
        """
        made_of = self.source.read_bytes() + " ".join((*self.flags, platform.machine())).encode()
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(
            os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "torch_extensions"
        )
        return Path(root) / self.name / f"{hashlib.sha256(made_of).hexdigest()[:16]}.so"

    def reason_against(self) -> str | None:
        """Says why it can neither be loaded nor compiled here; None where it can.

        Compiles nothing.
        """
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

    def load(self) -> ctypes.CDLL:
        """Loads the library, compiled first if it must be, once per machine.

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
                    f"{self.source.name} could not be compiled; {self.otherwise}. It was said:\n"
                    f"{said}"
                ) from error
        library = ctypes.CDLL(str(path))
        for name, result, arguments in self.functions:
            function = getattr(library, name)
            function.restype, function.argtypes = result, list(arguments)
        return library

    def load_or_warn(self) -> ctypes.CDLL | None:
        """Loads the library; None where it cannot be had, with a warning if a compiler is there and
        does not work.
        """
        if self.reason_against() is not None:
            return None
        try:
            return self.load()
        except ValueError as error:
            warnings.warn(str(error), stacklevel=2)
            return None

    def compile(self, path: Path) -> None:
        """Compiles the source into that file, unless another process has done so meanwhile."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go by the kernel, however its holder ends
            if path.exists():
                return
            print(
                f"compiling {self.source.name}, once on this machine: {self.takes}",
                file=sys.stderr,
                flush=True,
            )
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                built = Path(folder) / path.name
                subprocess.run(
                    [
                        *(*_compiler(), "-shared", "-fPIC", *self.flags),
                        *(str(self.source), "-o", str(built)),
                    ],
                    check=True,
                    capture_output=True,
                    text=True,
                )
                os.replace(built, path)


def _compiler() -> list[str]:
    """Returns the compiler's command: what CXX says, which may have options, or g++."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]
