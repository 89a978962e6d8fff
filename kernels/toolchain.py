"""Says what is lacking here for code that is compiled while it runs."""

import functools
import os
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple

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
