"""Listens to a model's sparse layers: which routes went through them, and on demand the rows and
the answers.

Forward hooks that only look: nothing is computed, no random number is drawn, nothing is kept that
autograd would follow. They are there while `tap` is open and not a moment longer, so neither a
backward pass that recomputes nor an evaluation is recorded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ...model.moe import SparseLayer
from ...model.routing import Routes
from ...model.transformer import Transformer


@dataclass(frozen=True)
class TappedCall:
    """One pass through one sparse layer. U source rows of width D become T target rows of width O."""

    layer: str  # the module's name
    kind: str  # feed_forward, value, output, query
    depth: int  # the depth step, from 1
    routes: Routes  # detached
    num_rows: int
    width_in: int
    width_out: int
    rows_UD: Tensor | None  # as the layer got them; None where only routes are wanted
    answers_TO: Tensor | None


@contextmanager
def tap(model: Transformer, *, with_rows: bool = False) -> Iterator[list[TappedCall]]:
    """The list fills while the model runs, in the order of the calls; several forward passes follow
    each other in it.
    """
    recorded: list[TappedCall] = []
    times: dict[str, int] = {}

    def recorder(name: str) -> Any:
        depths = depths_of(model, name)

        def record(_layer: SparseLayer, given: tuple[Any, ...], answers_TO: Tensor) -> None:
            rows_UD, routes = given[0], given[1]
            depth = depths[times.get(name, 0) % len(depths)]
            times[name] = times.get(name, 0) + 1
            recorded.append(
                TappedCall(
                    name,
                    kind_of(name),
                    depth,
                    _detached(routes),
                    rows_UD.shape[0],
                    rows_UD.shape[1],
                    answers_TO.shape[1],
                    rows_UD.detach() if with_rows else None,
                    answers_TO.detach() if with_rows else None,
                )
            )

        return record

    hooks = [layer.register_forward_hook(recorder(name)) for name, layer in sparse_layers(model)]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


def sparse_layers(model: Transformer) -> list[tuple[str, SparseLayer]]:
    """By the modules' names."""
    return [
        (name, layer) for name, layer in model.named_modules() if isinstance(layer, SparseLayer)
    ]


def kind_of(layer: str) -> str:
    """group.0.attention.value is a `value`, group.0.feed_forward.sparse the `feed_forward`."""
    last = layer.rpartition(".")[2]
    return "feed_forward" if last == "sparse" else last


def depths_of(model: Transformer, layer: str) -> list[int]:
    """The depth steps, from 1, at which a pass goes through that layer."""
    member = int(layer.split(".")[1])
    return [step for step, used in enumerate(model.config.schedule, start=1) if used == member]


def _detached(routes: Routes) -> Routes:
    return replace(routes, weight_N=routes.weight_N.detach())
