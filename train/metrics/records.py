"""What is handed to a sink, and what a sink is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ..config.metrics_config import MetricsConfig


@dataclass(frozen=True)
class Record:
    """One line of the metrics, secrets blotted out."""

    kind: str  # "train", "eval", "checkpoint", …
    step: int
    time_s: float  # since the epoch
    values: Mapping[str, Any]
    number: int = 0  # among the lines of its kind that this process has written, from 0

    def without_matrices(self) -> "Record":
        """Returns the record without what holds a number per expert and depth step."""
        kept = {name: value for name, value in self.values.items() if not is_matrix(value)}
        return replace(self, values=kept)


def is_matrix(value: Any) -> bool:
    """Returns whether a value of a record is rows of numbers, such as the load of every expert."""
    return isinstance(value, list) and len(value) > 0 and isinstance(value[0], list)


@dataclass(frozen=True)
class RunFacts:
    """What a sink is told about the run when it is opened."""

    run_dir: Path
    settings: MetricsConfig
    config: Mapping[str, Any]  # the run's configuration as plain values, secrets blotted out
    expert_depths: tuple[int, ...]  # depth steps that have experts, from 1

    @property
    def name(self) -> str:
        """Returns the run's name, which is its folder's."""
        return self.run_dir.absolute().name


class Sink(Protocol):
    """Writes metrics somewhere. All calls come from one thread; what one raises is told and retried."""

    def write(self, records: Sequence[Record]) -> None:
        """Writes records, in order."""
        ...

    def go_back_to(self, step: int) -> None:
        """Forgets, where that is possible, what was written beyond a step."""
        ...

    def close(self, state: str) -> None:
        """Ends with what is written; `state` is "finished", "stopped" or "failed"."""
        ...


def flat_values(values: Mapping[str, Any], before: str = "") -> dict[str, bool | str | float | int]:
    """Returns nested values under dotted names; what is no number, text or truth is spelled."""
    flat: dict[str, bool | str | float | int] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            flat |= flat_values(value, f"{name}.")
        elif isinstance(value, bool | str | float | int):
            flat[name] = value
        else:
            flat[name] = "none" if value is None else json.dumps(value)
    return flat
