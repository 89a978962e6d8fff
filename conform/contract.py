"""The contract between the kit and a layer: what a user must say, and how a layer is named.

Least of all: a function `build(group)` that returns the layer of this rank, whose router is a
linear map named `gate` or `router`, and whose experts' weights are stacked or listed. What is
sharded, and how, is read off the shapes: the kit compares them with those of the same function's
layer for a group of one rank. Everything else is a field of `Layer` with a default.
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
    """The layer cannot be tried as it is described; the message says what to change."""


@dataclass(frozen=True)
class Shard:
    """Where a parameter of one rank lies in the reference's.

    `dim` None: it is the whole of the parameter `full`, and no other rank has it.
    """

    full: str
    dim: int | None = 0
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Layer:
    """One expert-parallel layer, as the kit must know it.

    Args:
        build: makes this rank's layer for a process group; called on every rank, and for a group of
            one rank to make the reference. The kit overwrites all parameters.
        width: of a row; needed where it cannot be read off the router's weight.
        num_experts: as above.
        top_k: experts of a row.
        tokens: "own": every rank has rows of its own, as between data-parallel ranks; "same": all
            ranks have the same rows, as inside a tensor-parallel group.
        routes: "router": called as `layer(x)`, routes itself; "given": called as
            `layer(x, experts, gates)` with (T, K) expert numbers and gate weights.
        router: the name of the router's weight, (experts, width); found by its name and shape where
            it is None. Routes are steered through it.
        scaling: "sum": a weight's gradient is that of the sum of all ranks' losses; "mean": of
            their mean.
        call: calls the layer, `call(layer, x)` or `call(layer, x, experts, gates)`, with x of
            (tokens, width), and returns the output rows.
        finish: what the training loop does between backward and the optimizer, `finish(layer,
            group)`: sums of gradients. Without it the kit itself adds up the gradients of
            replicated weights where `tokens` is "own".
        grad_norm: `grad_norm(layer, group)`: the global norm, as the stack's clipping computes it.
        reference: makes the layer that is right, on one rank; None: `build` with a group of one.
        shards: `shards(name, rank, size)` where shapes do not tell; None for a replicated
            parameter.
        rtol: relative error (2-norm) from which a tensor counts as wrong; None: by dtype.
        skip: names of scenes that the layer does not promise to bear.
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
    """Returns the layer that MODULE:NAME or FILE.py:NAME names.

    NAME is a `Layer`, a function without arguments that returns one, or a bare `build(group)`.

    Raises:
        ContractError: there is no such thing, or it is none of these.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not name:
        raise ContractError(f"{spec!r} is not MODULE:NAME, nor FILE.py:NAME")
    found: Any = _module(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ContractError(f"{place} has no {name!r}")
        found = getattr(found, part)
    return as_layer(found, spec)


def as_layer(found: object, spec: str) -> Layer:
    """Returns a `Layer` for what a user named; a bare function becomes its `build`."""
    if isinstance(found, Layer):
        return found
    if not callable(found):
        raise ContractError(f"{spec} is {type(found).__name__}, neither a Layer nor a function")
    if not inspect.signature(found).parameters:
        made = found()
        if isinstance(made, Layer):
            return made
        raise ContractError(f"{spec}() returned {type(made).__name__}, not a Layer")
    return Layer(build=found)  # type: ignore[arg-type] - what it returns is seen when it is called


def spec_of(found: object) -> str:
    """Returns FILE:NAME for a function or a module's `Layer`, by which ranks find it again.

    Raises:
        ContractError: it is no attribute of a module that lies in a file.
    """
    inner = found.build if isinstance(found, Layer) else found
    module = sys.modules.get(getattr(inner, "__module__", ""))
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        raise ContractError(f"{found!r} lies in no file, so that ranks could not find it")
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
    """Returns the same layer with more scenes left out."""
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
