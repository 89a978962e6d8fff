"""Checks whether the Triton kernels can run here, without importing them."""

import functools
import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ..cpu.build import lacking

_AMD = ("gfx942", "gfx950")  # they have tiles (tiles.py)
INSTALL_LINE = 'pip install "triton>=3.6,<3.10"'


@functools.cache
def kernels(name: str) -> Any:
    """Imports a module of this folder on first use: without Triton its import fails."""
    return import_module(f".{name}", __package__)


@functools.cache
def reason_against(device_type: str, dtype: torch.dtype) -> str | None:
    """Returns why the Triton kernels cannot run on a device in a dtype, or None if they can.

    The interpreter (TRITON_INTERPRET=1, set before the kernels are imported) runs them on CPUs,
    slowly, for tests. Its bfloat16 arithmetic is silently wrong in all releases up to 3.9 (casts
    truncate, products are off by powers of ten), so bfloat16 is refused.
    """
    if find_spec("triton") is None:
        return f"Triton is not installed: {INSTALL_LINE}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the Triton kernels support float32 and bfloat16, and the weights are {dtype}: choose segments"
    if device_type == "meta":
        return None
    if interpreted():
        if dtype is torch.bfloat16:
            return "Triton's interpreter computes bfloat16 wrongly and silently: use float32"
        return None
    if device_type != "cuda":
        return (
            f"the Triton kernels run on CUDA, and the weights are on {device_type}: choose segments"
        )
    if reason := _reason_against_chip():
        return reason
    if lack := lacking(device_type):  # else the first pass would fail halfway
        return f"Triton needs {lack.need}, and {lack.advice}"
    return None


def _reason_against_chip() -> str | None:
    """Returns why the kernels do not support this process's GPU, or None."""
    if not torch.cuda.is_available():
        return None
    if (name := _amd_name()) is not None:
        return (
            None
            if name in _AMD
            else f"on AMD the Triton kernels support {' and '.join(_AMD)}, and this GPU is {name}: choose segments"
        )
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"the Triton kernels need at least compute capability 8.0, and this GPU has {major}.{minor}: choose segments"
    return None


def _amd_name() -> str | None:
    """Returns the architecture of this process's GPU if it is AMD's, else None."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName.partition(":")[
        0
    ]


def interpreted() -> bool:
    """Returns whether kernels imported now will run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "on", "true", "yes", "y")
