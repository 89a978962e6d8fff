"""Finds MegaBlocks' operators where it is installed, and says what to do where it is not."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

# Without pip's cache: it would give a wheel that was compiled against one torch to an environment
# with another.
INSTALL_LINE = (
    "pip install --no-cache-dir --no-deps --no-build-isolation "
    "stanford-stk==0.7.1 grouped_gemm==0.3.0 megablocks==0.10.0"
)


@dataclass(frozen=True)
class Library:
    """Holds the operators that are used, by their names in MegaBlocks."""

    gather: Callable[..., Tensor]
    scatter: Callable[..., Tensor]
    gmm: Callable[..., Tensor]


@functools.cache
def load_library() -> Library:
    """Imports MegaBlocks' operators.

    Raises:
        ImportError: a part of it is missing, or was compiled against another torch.
    """
    ops, products = import_module("megablocks.ops"), import_module("grouped_gemm.backend")
    return Library(ops.gather, ops.scatter, products.gmm)


def reason_against(device_type: str, dtype: torch.dtype) -> str | None:
    """Says why MegaBlocks cannot run on such a device in such a dtype; None where it can."""
    if device_type == "meta":
        return None
    if device_type != "cuda" or dtype is not torch.bfloat16:
        return (
            f"MegaBlocks is for bfloat16 on CUDA, and the weights are {dtype} on {device_type}: "
            "choose segments"
        )
    try:
        load_library()
    except ImportError as error:
        return (
            f"MegaBlocks cannot be imported ({error}); it is compiled against the torch that is "
            f"there: `{INSTALL_LINE}`; "
            "docs/kernels.md says what that needs"
        )
    return None
