"""Says whether Triton's kernels can run here, without importing them."""

import os
from importlib.util import find_spec

import torch

from ..cpu.build import lacking

_AMD = ("gfx942", "gfx950")  # with tiles of their own (tiles.py)
INSTALL_LINE = 'pip install "triton>=3.6,<3.9"'


def reason_against(device_type: str, dtype: torch.dtype) -> str | None:
    """Says why Triton's kernels cannot run on such a device in such a dtype; None where they can.

    Its interpreter (TRITON_INTERPRET=1, set before the kernels are imported) runs them on CPUs,
    slowly, for tests. Its bfloat16 arithmetic is silently wrong in all releases up to 3.9 (casts
    truncate, products are off by powers of ten): refused.
    """
    if find_spec("triton") is None:
        return f"Triton is not installed: {INSTALL_LINE}"
    if dtype not in (torch.float32, torch.bfloat16):
        return (
            f"Triton's kernels are for float32 and bfloat16, and the weights are {dtype}: choose "
            "segments"
        )
    if device_type == "meta":
        return None
    if interpreted():
        if dtype is torch.bfloat16:
            return (
                "Triton's interpreter computes bfloat16 wrongly without saying so: give it float32"
            )
        return None
    if device_type != "cuda":
        return (
            f"Triton's kernels are for CUDA, and the weights are on {device_type}: choose segments"
        )
    if reason := _reason_against_chip():
        return reason
    if lack := lacking(device_type):  # it would be found out in the middle of the first pass
        return f"Triton needs {lack.need}, and {lack.advice}"
    return None


def _reason_against_chip() -> str | None:
    """Says why the kernels do not run on this process's GPU, by what they were compiled for."""
    if not torch.cuda.is_available():
        return None
    if (name := _amd_name()) is not None:
        return (
            None
            if name in _AMD
            else f"of AMD's GPUs Triton's kernels are compiled for {' and '.join(_AMD)}, and this is "
            f"{name}: choose segments"
        )
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return (
            "Triton's kernels want a compute capability of 8.0 at least, and this GPU has "
            f"{major}.{minor}: choose segments"
        )
    return None


def _amd_name() -> str | None:
    """Returns what this process's GPU is called where it is AMD's."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName.partition(":")[
        0
    ]


def interpreted() -> bool:
    """Tells whether kernels that are imported now will run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "on", "true", "yes", "y")
