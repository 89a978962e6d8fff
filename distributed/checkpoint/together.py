"""Acts of all ranks on a checkpoint: each acts, and an error of one is raised on all."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch.distributed as dist

from ..process.json_messages import all_gather_json
from .format import CheckpointError, CorruptCheckpointError, StaleGenerationError

T = TypeVar("T")

# Errors as ranks tell each other of them, by name.
_ERRORS = {
    kind.__name__: kind for kind in (CheckpointError, CorruptCheckpointError, StaleGenerationError)
}


def gathered(group: dist.ProcessGroup | None, act: Callable[[], T]) -> list[T]:
    """Returns what `act` returned on every rank; if it raised on one, all ranks raise.

    A collective call unless `group` is None. What `act` returns travels as JSON.
    """
    if group is None:
        return [act()]
    value, error = None, None
    try:
        value = act()
    except Exception as caught:  # noqa: BLE001 - whatever it is, the others wait to hear of it
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
    """Returns what `act` returned here; if it raised on one rank, all ranks raise.

    A collective call unless `group` is None.
    """
    own: list[T] = []
    gathered(group, lambda: own.append(act()))  # append returns None: no value travels
    return own[0]


def _joined(failures: Mapping[int, CheckpointError]) -> CheckpointError:
    """Joins the errors of several ranks to one; a text that they have in common stands once."""
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
    """Returns an error's text, with its type where the text alone may say little."""
    known = isinstance(error, CheckpointError | OSError)
    return str(error) if known else f"{type(error).__name__}: {error}"
