"""Listens to a model's sparse layers: which routes went through them, and on demand the rows and
the outputs.

Forward hooks that only look: nothing is computed, no random number is drawn, nothing is kept that
autograd would follow. They are there while `tap` is open and not a moment longer, so neither a
backward pass that recomputes nor an evaluation is recorded.

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


@dataclass(frozen=True, order=True)
class CallId:
    """Which pass through which sparse layer: the same on every rank of a step."""

    step: int  # of the optimizer, from 1
    micro_batch: int  # of that step, from 0
    depth: int  # the depth step, from 1
    layer: str  # the module's name

    @property
    def kind(self) -> str:
        """What the layer does: feed_forward, value, output or query."""
        return kind_of(self.layer)

    def __str__(self) -> str:
        return (
            f"step {self.step}, micro-batch {self.micro_batch}, depth step {self.depth}, "
            f"{self.kind}"
        )


@dataclass(frozen=True)
class RoutedCall:
    """What one rank routed in one call and, where they were kept, the values."""

    id: CallId
    routes: Routes  # detached; the gate weights are 1 where they were not recorded
    num_rows: int  # U
    width_in: int  # D
    width_out: int  # O
    rows_UD: Tensor | None = None  # as the layer got them
    outputs_TO: Tensor | None = None


def kind_of(layer: str) -> str:
    """Returns what a sparse layer does, by its module's name.

    group.0.attention.value is a `value`, group.0.feed_forward.sparse the `feed_forward`.
    """
    last = layer.rpartition(".")[2]
    return "feed_forward" if last == "sparse" else last


@contextmanager
def tap(
    model: Transformer, *, step: int = 1, micro_batch: int = 0, with_values: bool = False
) -> Iterator[list[RoutedCall]]:
    """Records every pass through a sparse layer while the context lasts.

    The list fills while the model runs, in the order of the calls. Of several forward passes the
    calls follow each other.

    Args:
        step: the optimizer step that the calls are recorded for.
        micro_batch: the micro-batch of that step.
        with_values: keep the rows and the outputs too, and not only the routes.
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
                    CallId(step, micro_batch, depths[passed % len(depths)], layer),
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
    """Returns the depth steps, from 1, at which a pass goes through that layer."""
    member = int(layer.split(".")[1])
    return [step.depth for step in model.config.schedule if step.member == member]


def _detached(routes: Routes) -> Routes:
    return replace(routes, weight_N=routes.weight_N.detach())
