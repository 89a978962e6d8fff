"""Runs a function on all ranks and raises an error of one rank on all of them."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed as dist

from ..process.json_messages import all_gather_json
from .format import CheckpointError, CorruptCheckpointError, StaleGenerationError

T = TypeVar("T")

# Errors that ranks send each other by name.
_ERRORS = {
    kind.__name__: kind for kind in (CheckpointError, CorruptCheckpointError, StaleGenerationError)
}


def gathered(group: dist.ProcessGroup | None, act: Callable[[], T]) -> list[T]:
    """Returns the results of `act` on every rank; if it raises on one rank, all raise.

    Collective unless `group` is None. Results are sent as JSON.
    """
    if group is None:
        return [act()]
    value, error = None, None
    try:
        value = act()
    except Exception as caught:  # noqa: BLE001 - the other ranks wait for it
        error = caught if isinstance(caught, CheckpointError) else CheckpointError(causes(caught))
    told = None if error is None else (type(error).__name__, str(error))
    outcomes = all_gather_json((value, told), group)
    failures = {
        rank: _ERRORS[told[0]](told[1])
        for rank, (_, told) in enumerate(outcomes)
        if told is not None
    }
    if failures:
        raise _joined(failures)
    return [value for value, _ in outcomes]


def together(group: dist.ProcessGroup | None, act: Callable[[], T]) -> T:
    """Returns the result of `act` on this rank; if it raises on one rank, all raise.

    Collective unless `group` is None.
    """
    own: list[T] = []
    gathered(group, lambda: own.append(act()))  # append returns None, so no result is sent
    return own[0]


def _joined(failures: Mapping[int, CheckpointError]) -> CheckpointError:
    """Joins the errors of several ranks into one; ranks with the same text share a line."""
    ranks: dict[str, list[int]] = {}
    for rank, error in failures.items():
        ranks.setdefault(str(error), []).append(rank)
    kind = type(next(iter(failures.values())))
    if len(ranks) == 1:
        return kind(next(iter(ranks)))
    lines = [
        text if text.startswith("rank ") else f"rank {', '.join(map(str, who))}: {text}"
        for text, who in ranks.items()
    ]
    return kind("\n".join(lines))


def causes(error: BaseException) -> str:
    """Returns an error's text, prefixed with its type unless the type is a known one."""
    known = isinstance(error, CheckpointError | OSError)
    return str(error) if known else f"{type(error).__name__}: {error}"
