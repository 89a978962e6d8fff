"""Tells what each parameter does in a model; the optimizer's rule, rate and decay follow from it.

A module's name says to which part it belongs: a router, a gate, a norm, the head. Within the body its
class says in `roles` what its parameters are. The number of dimensions decides nothing, because an embedding
and a router have two as well.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn import Parameter

Part = Literal["body", "embedding", "head", "router", "gate", "norm"]
Kind = Literal["matrix", "bank", "table", "vector", "unknown"]
KINDS = ("matrix", "bank", "table", "vector")
_DIMS = {"matrix": 2, "bank": 3, "table": 2}
# By a module's name, or its last word. Halting, injections and conditions count as gates.
_PARTS: dict[str, Part] = {
    "router": "router",
    "norm": "norm",
    "gate": "gate",
    "halting": "gate",
    "injection": "gate",
    "condition": "gate",
}


@dataclass(frozen=True)
class Role:
    """Says what a parameter is.

    A "matrix" (out, in) multiplies rows, a "bank" (E, in, out) holds one for each expert, the rows of a
    "table" are looked up, and a "vector" scales or shifts.
    """

    part: Part
    kind: Kind
    maps: int = 1  # matrices side by side along the outputs: 2 for gate | up
    decays: bool = True  # False: never, as its paper says

    @property
    def is_matrix(self) -> bool:
        """Returns whether it multiplies rows on their way to the logits, or to a router's."""
        return self.kind in ("matrix", "bank") and self.part in ("body", "head", "router")

    def is_muons(self, *, routers: bool) -> bool:
        """Returns whether Muon updates it; with `routers` those of routers, too."""
        return self.is_matrix and (self.part == "body" or (routers and self.part == "router"))


def roles_of(model: nn.Module) -> dict[str, Role]:
    """Returns the role of every parameter by its name, whatever the layout has left of it here."""
    decays_by_path = {"": True}
    found: dict[str, Role] = {}
    for path, module in model.named_modules():
        owner, part = path.rpartition(".")[0], _part_of(path)
        decays = decays_by_path.get(owner, True) and getattr(module, "decays", True)
        decays_by_path[path] = decays
        maps = getattr(module, "maps", {})
        for name, parameter in module.named_parameters(recurse=False):
            kind = _kind_of(module, name, part, parameter.ndim)
            own = "embedding" if kind == "table" else part
            key = f"{path}.{name}" if path else name
            found[key] = Role(own, kind, maps.get(name, 1), decays)
    return found


def parts_of(model: nn.Module) -> dict[Parameter, str]:
    """Returns every parameter, in the model's order, with the part whose gradient norm counts it.

    These are "embedding", "head", "routers" and "norms" wherever they are; "attention", its experts
    included; "experts", those of the feed-forward that tokens are routed to; "feed_forward", dense
    layers and shared experts; and "other".
    """
    roles = roles_of(model)
    return {each: _place_of(path, roles[path].part) for path, each in model.named_parameters()}


def deciding(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields what keeps float32 in any cast of the model: its name, its module, and its name there.

    That is every buffer, which learns without a gradient, and what a module names in `keeps_float32`:
    a rounded bias or threshold decides otherwise, and small steps no longer move it.
    """
    for path, module in model.named_modules():
        for name in (*getattr(module, "keeps_float32", ()), *module._buffers):
            if isinstance(getattr(module, name), Tensor):
                yield (f"{path}.{name}" if path else name), module, name


def _place_of(path: str, part: Part) -> str:
    """Returns what gradient norms call a part; of a body or a gate, where it is."""
    if part not in ("body", "gate"):
        return f"{part}s" if part in ("router", "norm") else part
    modules, places = path.split("."), ("attention", "experts", "feed_forward")
    return next((place for place in places if place in modules), "other")


def _part_of(path: str) -> Part:
    names = path.split(".")
    if names[0] == "head":
        return "head"
    words = {name.rpartition("_")[2] for name in names}
    for word, part in _PARTS.items():
        if word in words:
            return part
    return "body"


def _kind_of(module: nn.Module, name: str, part: Part, num_dims: int) -> Kind:
    """Returns what a parameter is; a user's own router, gate or norm need not say it."""
    declared = getattr(module, "roles", {}).get(name)
    if declared is None and isinstance(module, nn.Linear | nn.Embedding):  # in a user's own part
        declared = "table" if isinstance(module, nn.Embedding) else "matrix"
        declared = declared if name == "weight" else "vector"
    if declared is not None:
        fits = declared in KINDS and _DIMS.get(declared, num_dims) == num_dims
        return declared if fits else "unknown"
    if num_dims < 2 or part == "norm":
        return "vector"
    return "unknown" if part == "body" else "matrix"
