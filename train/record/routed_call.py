"""One rank's pass through one sparse layer, as it is recorded, replayed and simulated.

`tap` makes these records while a model runs, trace.py writes them to files and reads them back,
and `moebius simulate` gives one per rank to its simulated ranks. A file keeps the routes alone;
rows and outputs are there only where somebody needs the values.

Legend: U source rows of width D, T target rows of width O.
"""

from dataclasses import dataclass

from torch import Tensor

from ...model.routing import Routes


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
