"""Records the routes through a model's sparse layers, and optionally the rows and outputs.

The forward hooks only observe: they compute nothing, draw no random number and keep nothing that
autograd would follow. They exist only while `tap` is open, so neither a recomputing backward pass
nor an evaluation is recorded.

Legend: U source rows of width D, T target rows of width O.
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
class CallId:
    """Identifies a pass through a sparse layer, the same on every rank of a step."""

    step: int  # of the optimizer, from 1
    depth: int  # the depth step, from 1
    layer: str  # the module's name

    @property
    def kind(self) -> str:
        """Returns the layer's role: feed_forward, value, output or query."""
        last = self.layer.rpartition(".")[2]
        return "feed_forward" if last == "sparse" else last

    def __str__(self) -> str:
        return f"step {self.step}, depth step {self.depth}, {self.kind}"


@dataclass(frozen=True)
class RoutedCall:
    """Holds one rank's routes in one call and, if kept, the values."""

    id: CallId
    routes: Routes  # detached
    num_rows: int  # U
    width_in: int  # D
    width_out: int  # O
    rows_UD: Tensor | None = None  # the layer's input
    outputs_TO: Tensor | None = None


@contextmanager
def tap(
    model: Transformer, *, step: int = 1, with_values: bool = False
) -> Iterator[list[RoutedCall]]:
    """Records every pass through a sparse layer while the context is open.

    The list fills in the order of calls, over all forward passes.

    Args:
        model: to record.
        step: the optimizer step of the calls.
        with_values: also keep the rows and the outputs.
    """
    recorded: list[RoutedCall] = []
    num_passes: dict[str, int] = {}

    def recorder(layer: str) -> Any:
        depths = depths_of(model, layer)

        def record(_layer: SparseLayer, inputs: tuple[Any, ...], outputs_TO: Tensor) -> None:
            rows_UD, routes = inputs[0], inputs[1]
            passed = num_passes.get(layer, 0)
            num_passes[layer] = passed + 1
            recorded.append(
                RoutedCall(
                    CallId(step, depths[passed % len(depths)], layer),
                    _detached(routes),
                    num_rows=rows_UD.shape[0],
                    width_in=rows_UD.shape[1],
                    width_out=outputs_TO.shape[1],
                    rows_UD=rows_UD.detach() if with_values else None,
                    outputs_TO=outputs_TO.detach() if with_values else None,
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
    """Returns the model's sparse layers with their modules' names."""
    return [
        (name, layer) for name, layer in model.named_modules() if isinstance(layer, SparseLayer)
    ]


def depths_of(model: Transformer, layer: str) -> list[int]:
    """Returns the depth steps, from 1, that use that layer."""
    member = int(layer.split(".")[1])
    return [step.depth for step in model.config.schedule if step.member == member]


def _detached(routes: Routes) -> Routes:
    return replace(routes, weight_N=routes.weight_N.detach())
