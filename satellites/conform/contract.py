"""Defines the contract between the kit and a layer: what a user declares, and how a layer is named.

At minimum it is a function `build(group)` that returns this rank's layer, with a linear router
named `gate` or `router` and stacked or listed expert weights. The kit infers sharding from shapes,
by comparing with the layer of the same function on a group of one rank. Everything else is a field
of `Layer` with a default.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup


class ContractError(ValueError):
    """Reports a layer that cannot be checked as described; the message says what to change."""


@dataclass(frozen=True)
class Shard:
    """Locates a parameter of one rank in the reference's parameter.

    With `dim` None it is the whole parameter `full`, which no other rank has.
    """

    full: str
    dim: int | None = 0
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Layer:
    """Describes an expert-parallel layer to the kit.

    Args:
        build: makes this rank's layer for a process group. It is called on every rank, and with a
            group of one rank to make the reference. The kit overwrites all parameters.
        width: of a row; needed if it cannot be read from the router's weight.
        num_experts: needed in the same case.
        top_k: experts per row.
        tokens: "own": every rank has its own rows, as with data parallelism; "same": all ranks have
            the same rows, as inside a tensor-parallel group.
        routes: "router": called as `layer(x)`, which routes itself; "given": called as
            `layer(x, experts, gates)` with (T, K) expert numbers and gate weights.
        router: name of the router's weight, (experts, width), through which routes are steered;
            None: found by name and shape.
        scaling: "sum": a weight's gradient belongs to the sum of all ranks' losses; "mean": to
            their mean.
        call: calls the layer, `call(layer, x)` or `call(layer, x, experts, gates)`, with x of
            (tokens, width), and returns the output rows.
        finish: what the training loop does between backward and the optimizer, `finish(layer,
            group)`: sums of gradients. By default the kit sums gradients of replicated weights if
            `tokens` is "own".
        grad_norm: `grad_norm(layer, group)`: the global norm, as the stack's clipping computes it.
        reference: makes the correct layer on one rank; None: `build` with a group of one.
        shards: `shards(name, rank, size)` if shapes are ambiguous; returns None for a replicated
            parameter.
        rtol: relative error (2-norm) from which a tensor counts as wrong; None: by dtype.
        skip: names of scenes that the layer does not support.
    """

    build: "Callable[[ProcessGroup], nn.Module]"
    width: int | None = None
    num_experts: int | None = None
    top_k: int = 2
    tokens: Literal["own", "same"] = "own"
    routes: Literal["router", "given"] = "router"
    router: str | None = None
    scaling: Literal["sum", "mean"] = "sum"
    call: "Callable[..., Tensor] | None" = None
    finish: "Callable[[nn.Module, ProcessGroup], None] | None" = None
    grad_norm: "Callable[[nn.Module, ProcessGroup], Tensor | float] | None" = None
    reference: "Callable[[], nn.Module] | None" = None
    shards: Callable[[str, int, int], Shard | None] | None = None
    rtol: float | None = None
    skip: Sequence[str] = ()


def load(spec: str) -> Layer:
    """Returns the layer named by MODULE:NAME or FILE.py:NAME.

    NAME is a `Layer`, a function without arguments that returns one, or a bare `build(group)`.

    Raises:
        ContractError: NAME does not exist or is none of these.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not name:
        raise ContractError(f"{spec!r} is neither MODULE:NAME nor FILE.py:NAME")
    found: Any = _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ContractError(f"{place} has no {name!r}")
        found = getattr(found, part)
    return as_layer(found, spec)


def as_layer(found: object, spec: str) -> Layer:
    """Returns a `Layer` for the user's object; a bare function becomes its `build`."""
    if isinstance(found, Layer):
        return found
    if not callable(found):
        raise ContractError(f"{spec} is {type(found).__name__}, neither a Layer nor a function")
    if not inspect.signature(found).parameters:
        made = found()
        if isinstance(made, Layer):
            return made
        raise ContractError(f"{spec}() returned {type(made).__name__}, not a Layer")
    return Layer(build=found)  # type: ignore[arg-type] - checked when it is called


def spec_of(found: object) -> str:
    """Returns FILE:NAME for a function or a module's `Layer`, so that ranks can find it.

    Raises:
        ContractError: it is not an attribute of a module in a file.
    """
    inner = found.build if isinstance(found, Layer) else found
    module = sys.modules.get(getattr(inner, "__module__", ""))
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        raise ContractError(f"{found!r} is not defined in a file, so ranks cannot find it")
    if isinstance(found, Layer):
        names = (name for name, value in vars(module).items() if value is found)
        name = next(names, None)
    else:
        name = getattr(inner, "__qualname__", None)
    if name is None or "<" in name:
        raise ContractError(
            f"ranks find a layer by its name: make it an attribute of {Path(file).name}, or give "
            "'FILE.py:NAME'"
        )
    return f"{file}:{name}"


def with_skip(layer: Layer, names: Sequence[str]) -> Layer:
    """Returns the same layer with more scenes skipped."""
    return dataclasses.replace(layer, skip=(*layer.skip, *names))


def _module(place: str) -> types.ModuleType:
    path = Path(place)
    if path.suffix == ".py":
        return _module_of_file(path)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{place}.".startswith(f"{error.name}."):
            raise ContractError(f"there is no module {place!r} ({error})") from error
        raise


def _module_of_file(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise ContractError(f"there is no file {path}")
    name = f"_conform_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ContractError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python FILE` does
    spec.loader.exec_module(module)
    return module
