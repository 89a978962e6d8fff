"""Says whether Triton's kernels can run here, without importing them."""

import os
from importlib.util import find_spec

import torch

from ..toolchain import lacking

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
    if lack := lacking(device_type):  # it would be found out in the middle of the first pass
        return f"Triton needs {lack.need}, and {lack.advice}"
    return None


def interpreted() -> bool:
    """Tells whether kernels that are imported now will run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "on", "true", "yes", "y")
