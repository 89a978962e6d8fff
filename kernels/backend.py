"""Chooses the backend of an operation: by name, once, and never by what happens to import."""

import functools
import logging
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Literal, Self, cast

import torch
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from .cpu import library as brgemm_library
from .interface import DefersWeightGradients
from .libraries import megablocks_available as megablocks_library
from .triton import available as triton_library

logger = logging.getLogger(__name__)

BACKENDS = ("reference", "segments", "brgemm", "triton", "grouped_mm", "megablocks")
DEFERRING_BACKENDS: tuple[str, ...] = ("triton",)  # those that are `DefersWeightGradients`
GONE = {"avx512": "set brgemm, which is as fast and runs on more CPUs, or auto"}
# Those that write gradients of a perceptron's weights into memory that nobody has filled with zeros.
WRITING_BACKENDS: tuple[str, ...] = ("brgemm",)
Resolver = Callable[[str, torch.device, torch.dtype], str]


class KernelConfig(BaseModel):
    """Names the backend of the expert layers: `auto` is the fastest for a device and dtype."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal[
        "auto", "reference", "segments", "brgemm", "triton", "grouped_mm", "megablocks"
    ] = "auto"
    # on CPUs, float32 products through oneDNN (onednn.py); an error where that is not exact
    onednn: bool = False
    # Of triton only (triton.backend.Options):
    #   tf32         float32 products in TensorFloat-32
    #   scatter_add  outputs are added by atomics, in another order each time, and no row per route
    #                is stored
    #   fused        a perceptron's forward is one kernel
    switches: tuple[Literal["tf32", "scatter_add", "fused"], ...] = ()

    @field_validator("backend", mode="before")
    @classmethod
    def _is_not_gone(cls, name: Any) -> Any:
        if isinstance(name, str) and name in GONE:
            raise ValueError(f"kernels.backend={name!r} is no more: {GONE[name]}")
        return name

    @model_validator(mode="after")
    def _switches_belong_to_triton(self) -> Self:
        if self.switches and self.backend != "triton":
            raise ValueError(
                f"kernels.switches={list(self.switches)} are of the Triton kernels, and "
                f"kernels.backend={self.backend!r}: set "
                "kernels.backend=triton, or leave the switches out"
            )
        return self

    @property
    def name(self) -> str:
        """Returns the operations' `backend` argument: the name, and each switch after a plus."""
        return "+".join((self.backend, *self.switches))


def _constant_to_the_compiler(function: Resolver) -> Resolver:
    """Marks a function whose result torch.compile takes for a constant, without importing it.

    `torch.compiler.assume_constant_result` sets this attribute and nothing else, but imports
    torch._dynamo first: 1 to 2 s in every process that reads this module.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


@_constant_to_the_compiler
def resolve_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """Returns the backend that a name stands for on that device, for weights of that dtype.

    Raises:
        ValueError: the name is unknown or was given up, or that backend cannot run here.
    """
    if backend == "auto":
        return _fastest(device.type, dtype)
    name, *switches = backend.split("+")
    if name in GONE:
        raise ValueError(f"kernels.backend={backend!r} is no more: {GONE[name]}")
    if name not in BACKENDS or (switches and name != "triton"):
        raise ValueError(
            f"kernels.backend={backend!r} is unknown: choose auto, {', '.join(BACKENDS)}"
        )
    if reason := reason_against(name, device.type, dtype):
        raise ValueError(
            f"kernels.backend={backend!r} cannot run here: {reason}; or set kernels.backend=auto"
        )
    if "tf32" in switches and (reason := triton_library.reason_against_tf32()):
        raise ValueError(f'kernels.switches=["tf32"] cannot be had here: {reason}; leave it out')
    return backend


@functools.cache
def _fastest(device_type: str, dtype: torch.dtype) -> str:
    """Returns what `auto` is: the first that can run, by the figures of docs/kernels.md."""
    wanted = {"cpu": ("brgemm",), "cuda": ("triton", "grouped_mm")}.get(device_type, ())
    reasons = {name: reason_against(name, device_type, dtype) for name in wanted}
    found = next((name for name, reason in reasons.items() if reason is None), "segments")
    if device_type == "cuda" and (reason := reasons["triton"]) and dtype is not torch.float64:
        logger.warning("kernels.backend=auto is %s, which is slower: %s", found, reason)
    return found


@functools.cache
def reason_against(backend: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Says why a backend cannot run on such a device in such a dtype; None where it can."""
    if backend == "brgemm":
        if device_type not in ("cpu", "meta"):
            return f"it is for CPUs, and the weights are on {device_type}"
        return brgemm_library.reason_against(dtype)
    if backend == "triton":
        return triton_library.reason_against(device_type, dtype)
    if backend == "grouped_mm":
        return _reason_against_grouped_mm(device_type, dtype)
    if backend == "megablocks":
        return megablocks_library.reason_against(device_type, dtype)
    return None  # plain torch operations: every device and dtype


def runs_triton(backend: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Tells whether what stands beside the experts runs in Triton's kernels too, for rows of a dtype.

    So it is where `backend`, that of the expert layers, is or comes to Triton's: another one that is
    asked for, like every device that is no GPU, keeps plain operations.
    """
    if backend == "auto":
        return resolve_backend(backend, device, dtype) == "triton"
    named = backend.partition("+")[0] == "triton"
    return named and reason_against("triton", device.type, dtype) is None


def _reason_against_grouped_mm(device_type: str, dtype: torch.dtype) -> str | None:
    if dtype not in (torch.float32, torch.bfloat16):
        return (
            "torch's grouped product is for float32 and bfloat16, and the weights are "
            f"{dtype}: choose segments"
        )
    if device_type == "cuda" and dtype is not torch.bfloat16:
        return (
            "on CUDA torch's grouped product is for bfloat16, and the weights are "
            f"{dtype}: choose segments"
        )
    return None


def defers(backend: str) -> bool:
    """Tells whether a backend that `resolve_backend` returned is a `DefersWeightGradients`."""
    return backend.partition("+")[0] in DEFERRING_BACKENDS


def reads_unused(backend: str) -> bool:
    """Returns whether a backend takes lists of routes with unused places, as they come where nobody
    reads on the host how many routes there are.
    """
    return backend.partition("+")[0] == "triton"


@functools.cache
def implementation(backend: str) -> DefersWeightGradients:
    """Imports a backend that `resolve_backend` returned, and returns its functions.

    A backend that does not defer has those of `Backend` only.
    """
    name, *switches = backend.split("+")
    module = import_module(f".{_MODULES.get(name, name)}", __package__)
    if switches:
        options = module.Options(**dict.fromkeys(switches, True))
        names = [name for name in dir(DefersWeightGradients) if not name.startswith("_")]
        module = SimpleNamespace(
            **{name: functools.partial(getattr(module, name), options=options) for name in names}
        )
    return cast(DefersWeightGradients, module)


def build_backend(backend: str) -> None:
    """Compiles what a backend's first call would compile.

    Raises:
        ValueError: it cannot be compiled.
    """
    if backend == "brgemm":
        brgemm_library.load_library()


# Where the backends are that a folder holds; others have their backend's name.
_MODULES = {
    "brgemm": "cpu.brgemm",
    "triton": "triton.backend",
    "grouped_mm": "libraries.grouped_mm",
    "megablocks": "libraries.megablocks",
}
