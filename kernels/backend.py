"""Which implementation stands behind a door. Chosen by name once, never by what happens to import."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

BACKENDS = ("reference", "segments")


class KernelConfig(BaseModel):
    """The implementation of the expert layers: `auto` takes the fastest that this device and dtype have."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["auto", "reference", "segments"] = "auto"


def resolve_backend(backend: str) -> str:
    """The backend that a name stands for.

    Raises:
        ValueError: the name is unknown.
    """
    if backend == "auto":
        return "segments"  # plain torch operations: every device and dtype
    if backend not in BACKENDS:
        raise ValueError(f"kernels.backend={backend!r} is unknown: choose auto, {', '.join(BACKENDS)}")
    return backend
