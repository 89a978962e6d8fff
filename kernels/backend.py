"""Selects the backend of an operation by name, once, never by what happens to import."""

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Literal, get_args

import torch
from pydantic import BaseModel, ConfigDict

from .calls import Backend
from .cpu import brgemm
from .triton import available as triton_library

logger = logging.getLogger(__name__)

Name = Literal["auto", "reference", "segments", "brgemm", "triton", "grouped_mm", "megablocks"]
BACKENDS: tuple[str, ...] = get_args(Name)[1:]
Resolver = Callable[[str, torch.device, torch.dtype], str]
# Module and class of each backend; `reference` has none (functional.py).
_CLASSES = {
    "segments": ("segments", "Segments"),
    "brgemm": ("cpu.brgemm", "Brgemm"),
    "triton": ("triton.backend", "TritonKernels"),
    "grouped_mm": ("libraries.grouped_mm", "GroupedMM"),
    "megablocks": ("libraries.megablocks", "MegaBlocks"),
}


class KernelConfig(BaseModel, use_attribute_docstrings=True):
    """Names the kernels of the expert layers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Name = "auto"
    """The backend of the expert layers; `auto` selects the fastest for the device and dtype."""


def _constant_to_the_compiler(function: Resolver) -> Resolver:
    """Does what `torch.compiler.assume_constant_result` does, without importing torch._dynamo.

    That import takes 1 to 2 s in every process that imports this module.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


@_constant_to_the_compiler
def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Resolves a backend name for a device and the dtype of the weights.

    Raises:
        ValueError: the name is unknown, or the backend cannot run here.
    """
    if backend == "auto":
        return _fastest(device.type, dtype)
    if backend not in BACKENDS:
        raise ValueError(
            f"kernels.backend={backend!r} is unknown: choose auto, {', '.join(BACKENDS)}"
        )
    if reason := reason_against(backend, device.type, dtype):
        raise ValueError(
            f"kernels.backend={backend!r} cannot run here: {reason}; or set kernels.backend=auto"
        )
    return backend


@functools.cache
def _fastest(device_type: str, dtype: torch.dtype) -> str:
    """Resolves `auto` to the first backend that can run, in the order measured in docs/kernels.md."""
    wanted = {"cpu": ("brgemm",), "cuda": ("triton", "grouped_mm")}.get(device_type, ())
    reasons = {name: reason_against(name, device_type, dtype) for name in wanted}
    found = next((name for name, reason in reasons.items() if reason is None), "segments")
    if device_type == "cuda" and (reason := reasons["triton"]) and dtype is not torch.float64:
        logger.warning("kernels.backend=auto is %s, which is slower: %s", found, reason)
    return found


@functools.cache
def reason_against(backend: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Returns why a backend cannot run on a device in a dtype, or None if it can."""
    if backend == "brgemm":
        if device_type not in ("cpu", "meta"):
            return f"it runs on CPUs only, and the weights are on {device_type}"
        return brgemm.reason_against(dtype)
    if backend == "triton":
        return triton_library.reason_against(device_type, dtype)
    if backend == "grouped_mm":
        return _reason_against_grouped_mm(device_type, dtype)
    if backend == "megablocks":
        library = import_module(".libraries.megablocks", __package__)
        return library.reason_against(device_type, dtype)
    return None  # plain torch operations: every device and dtype


def runs_triton(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether norms, rotary embeddings and routers run in Triton for rows of a dtype.

    They do if the expert layers' `backend` is `triton` or resolves to it.
    """
    if backend == "auto":
        return resolve_backend(backend, device, dtype) == "triton"
    return backend == "triton" and reason_against("triton", device.type, dtype) is None


def _reason_against_grouped_mm(device_type: str, dtype: torch.dtype) -> str | None:
    known = (torch.bfloat16,) if device_type == "cuda" else (torch.bfloat16, torch.float32)
    if dtype in known:
        return None
    names = " and ".join(str(each).removeprefix("torch.") for each in known)
    return f"torch's grouped_mm supports {names} on {device_type}, and the weights are {dtype}: choose segments"


@functools.cache
def implementation(backend: str) -> Backend:
    """Imports a backend that `resolve_backend` returned."""
    module, name = _CLASSES[backend]
    return getattr(import_module(f".{module}", __package__), name)()


def build_backend(backend: str) -> None:
    """Compiles a backend ahead of its first call.

    Raises:
        ValueError: compilation failed, or the products are not exact on this CPU.
    """
    if backend == "brgemm":
        brgemm.prepare()
