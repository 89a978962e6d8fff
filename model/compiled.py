"""torch.compile for the dense parts of a layer: norms, attention between its experts, dense
feed-forwards, the read-out.

What routes stays as it is: dispatchers talk to other ranks and read counts on the host, experts run
hand-written kernels are custom ops, routers decide. So every part is compiled by itself and as
a whole (`fullgraph`): a part that cannot be is an error, and never runs half compiled. Weights are
read at every call, so copies in low precision and gathered ones work.

Parts of one class and shape share a graph: a model of any depth has as many as it has kinds of
parts, once for training and once for evaluation. Another batch size costs one more of each, which
then fits all further ones.
"""

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .attention import DenseAttention, SwitchHead
from .halting import Halting
from .layers import DenseMLP, LayerNorm
from .momha import MoMHA
from .transformer import Transformer

_METHODS = {
    LayerNorm: "forward",
    DenseMLP: "forward",
    DenseAttention: "forward",
    SwitchHead: "attend",
    MoMHA: "attend",
    Halting: "gate",
}
# By type of device: the language of what is compiled, the variable that names a compiler, and those
# that are looked for else.
_COMPILERS = {"cpu": ("C++", "CXX", ["g++"]), "cuda": ("C", "CC", ["gcc", "clang"])}


def compile_dense_parts(model: Transformer, *, backend: str = "inductor") -> None:
    """Lets every dense part compile itself when it is first called.

    That takes seconds for each kind of part, once per process.

    Args:
        backend: torch's name of what makes code of a graph; "aot_eager" makes none, and runs the
            operations of the graph.

    Raises:
        ValueError: this machine has not what a compiler needs.
    """
    if backend == "inductor":
        check_compiler(model.embedding.device)
    for owner, name in _parts(model):
        setattr(owner, name, torch.compile(getattr(owner, name), fullgraph=True, backend=backend))


def check_compiler(device: torch.device) -> None:
    """Checks that code for that device can be compiled here; else ValueError.

    On CPUs torch writes C++; on GPUs Triton writes the kernels, but reaches the driver through a
    module in C that it compiles when it is first used (triton/backends/nvidia/driver.c; versions
    3.6 to 3.9). Both modules include Python's own header.
    """
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ValueError(
            "train.compile=true needs Triton on GPUs: pip install triton, or set "
            "train.compile=false"
        )
    if device.type not in _COMPILERS:
        return
    language, variable, known = _COMPILERS[device.type]
    names = [os.environ[variable]] if variable in os.environ else known
    if not any(shutil.which(name) for name in names):
        raise ValueError(
            f"train.compile=true needs a {language} compiler on {device.type.upper()} devices, and "
            "there is no "
            f"{' and no '.join(map(repr, names))} here: install {known[0]}, name another in the "
            f"environment variable {variable}, "
            "or set train.compile=false"
        )
    if not any((folder / "Python.h").is_file() for folder in _include_folders()):
        raise ValueError(
            "train.compile=true needs the headers of Python, and there is no "
            f"{_include_folders()[0] / 'Python.h'}: install them "
            "(python3-dev on Debian and Ubuntu), name their folder in the environment variable "
            "CPATH, or set "
            "train.compile=false"
        )


def _include_folders() -> list[Path]:
    """Returns the folders where compilers look for Python.h, the usual place first."""
    named = os.environ.get("CPATH", "").split(os.pathsep)
    return [
        Path(sysconfig.get_path("include", "posix_prefix")),
        *(Path(folder) for folder in named if folder),
    ]


def _parts(model: Transformer) -> Iterator[tuple[Any, str]]:
    for module in model.modules():
        if type(module) in _METHODS:
            yield module, _METHODS[type(module)]
    yield model.head, "forward"
