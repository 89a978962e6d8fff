"""What code inside a forward pass shares without being handed it; all of it begins and ends here.

    made    from `DepthSteps.open` on: what every call on a weight uses (kernels/gradients.py)
    draws   in one layer's step in training: its random numbers (model/execution/draws.py)
    saved   in a recomputed step's two runs: decisions (model/execution/recompute.py)

A second run belongs to the backward pass, where no forward pass is open: nothing is `made` there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class PassScope:
    """Holds what the innermost open contexts share; None: no such context is open."""

    made: dict[tuple, Any] | None = None
    draws: Any = None
    saved: Any = None


_NOTHING = PassScope()
# Per thread, because ranks may be threads.
_scope: ContextVar[PassScope] = ContextVar("pass_scope", default=_NOTHING)


def pass_scope() -> PassScope:
    """Returns what this code shares with the rest of its pass."""
    return _scope.get()


@contextmanager
def sharing(**changes: Any) -> Iterator[None]:
    """Shares other values while the context lasts; contexts nest."""
    token = _scope.set(replace(_scope.get(), **changes))
    try:
        yield
    finally:
        _scope.reset(token)
