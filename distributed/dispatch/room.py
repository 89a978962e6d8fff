"""How much room a sparse layer has for what comes, where nobody asks how much that is.

How many routes come depends on the routing, and reading it on the host leaves a GPU's queue empty, once
for every layer and pass. Where all ranks send equally many it need not be known: a rank keeps room for
a multiple of those; what is unused of it costs memory and hardly time. Where more comes, that layer
computes nothing, and says so on the device. The loop reads that with the gradients' norm, which it reads
anyway, gives the layer more room on all ranks, and makes the step again, with the same seeds. As many
times as there are ranks is always enough.
"""

from dataclasses import dataclass

from torch import Tensor

_GROWTH = 1.5


@dataclass
class RouteRoom:
    """One sparse layer's room for routes that come; the same on all ranks."""

    factor: float = 2.0  # of the routes that a rank sends
    _is_over: Tensor | None = None

    def note(self, is_over: Tensor) -> None:
        """Notes whether a pass had too little: bool, scalar, on the device."""
        self._is_over = is_over if self._is_over is None else self._is_over | is_over

    def take(self) -> Tensor | None:
        """Returns whether any pass since the last call had too little, unread; None: there was none that
        left it to chance.
        """
        is_over, self._is_over = self._is_over, None
        return is_over

    def grow(self) -> None:
        """Makes more room."""
        self.factor *= _GROWTH
