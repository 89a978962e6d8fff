"""Reads a run's curves from metrics.jsonl, in bounded memory.

A generation that resumes from a checkpoint writes the steps after it again; the last line of a step counts.
Every step keeps four numbers (about 400 bytes), and only the newest keeps the loads of all experts. From a long
run it reads 2,000 steps and the end of the file.
"""

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..job import METRICS
from .json_lines import JsonLinesTail, sampled

END_BYTES = 256 << 10


@dataclass(frozen=True)
class GenerationStart:
    """Records where a generation began to train."""

    generation: int
    resumed_from: int | None  # step of the checkpoint; None: from the beginning
    reached: int | None  # the last step before the start
    time: float = 0.0  # since the epoch


@dataclass(frozen=True)
class ExpertLoad:
    """Holds the expert statistics of one step, with one entry per depth step that has experts."""

    fractions: list[list[float]]  # of the routes, per expert
    max_violation: list[float]
    effective_experts: list[float]
    depths: tuple[int, ...] = ()  # the numbers of these depth steps, from 1; empty: all

    def depth_name(self, index: int) -> int:
        """Returns the number, from 1, of the depth step at `index`."""
        return self.depths[index] if self.depths else index + 1


@dataclass
class History:
    """Holds the curves of a run, by step."""

    loss: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    average: dict[int, float] = field(default_factory=dict)  # validation loss of averaged weights
    scores: dict[str, dict[int, float]] = field(default_factory=dict)  # accuracy by task and step
    tokens_per_s: dict[int, float] = field(default_factory=dict)
    learning_rate: dict[int, float] = field(default_factory=dict)
    hottest: dict[int, float] = field(default_factory=dict)  # the most loaded expert ÷ mean
    load: ExpertLoad | None = None  # at the newest step that has experts
    starts: list[GenerationStart] = field(default_factory=list)
    last: Mapping[str, Any] = field(default_factory=dict)  # the newest "train" line, whole
    _expert_depths: tuple[int, ...] = ()

    @property
    def step(self) -> int | None:
        """Returns the newest step, or None before the first."""
        return self.last.get("step")

    @property
    def restarts(self) -> list[GenerationStart]:
        """Returns all starts but the first."""
        return self.starts[1:]

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Adds decoded lines, in the order of the file; skips those that lack what it needs."""
        take = {
            "start": self._add_start,
            "train": self._add_train,
            "eval": self._add_eval,
            "scores": self._add_scores,
        }
        for line in lines:
            with contextlib.suppress(KeyError, TypeError, ValueError):
                take[line["kind"]](line)

    def _add_start(self, line: Mapping[str, Any]) -> None:
        self._expert_depths = tuple(line.get("expert_depths", ()))
        self.starts.append(
            GenerationStart(
                line.get("generation", 0),
                line.get("resumed_from_step"),
                self.step,
                line.get("time", 0.0),
            )
        )

    def _add_train(self, line: Mapping[str, Any]) -> None:
        step = line["step"]
        loss = line["loss"]  # "nan" is written as a string, and None if no target counts
        self.loss[step] = math.nan if loss is None else float(loss)
        self.last = line
        self.tokens_per_s[step] = float(line.get("tokens_per_s", 0.0))
        if "learning_rate" in line:
            self.learning_rate[step] = float(line["learning_rate"])
        if line.get("expert_load"):
            self.hottest[step] = 1 + max(line["max_violation"])
            self.load = ExpertLoad(
                line["expert_load"],
                line["max_violation"],
                line["effective_experts"],
                self._expert_depths,
            )

    def _add_eval(self, line: Mapping[str, Any]) -> None:
        self.validation[line["step"]] = float(line["loss"])
        if "average_loss" in line:
            self.average[line["step"]] = float(line["average_loss"])

    def _add_scores(self, line: Mapping[str, Any]) -> None:
        for task, accuracy in scores_of(line).items():
            self.scores.setdefault(task, {})[line["step"]] = accuracy


def read_history(run_dir: Path) -> History:
    """Reads the history of a run folder; it is empty if nothing was measured."""
    history, end = begin_history(run_dir)
    history.add(end.stream())
    return history


def begin_history(run_dir: Path) -> tuple[History, JsonLinesTail]:
    """Returns the history but for the last 256 KiB, and the reader of what follows."""
    history, end = History(), JsonLinesTail.near_the_end(run_dir / METRICS, num_bytes=END_BYTES)
    history.add(sampled(run_dir / METRICS, end=end.offset))
    return history, end


def scores_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Returns the accuracies in a line about scores, by task."""
    others = ("time", "seconds")
    return {k: v for k, v in line.items() if isinstance(v, float) and k not in others}


def describe_trouble(line: Mapping[str, Any]) -> str | None:
    """Describes a metrics line about a checkpoint or a loss spike that belongs in the journal.

    Returns None for other lines, for successful saves, and for spikes that are not the first in a row.
    """
    match line.get("kind"):
        case "checkpoint_set_aside":
            return (
                f"the checkpoint of step {line['step']} was damaged and renamed {line['path']}; "
                f"the run continues from step {line['resumed_from_step']}: {line['why']}"
            )
        case "gap":
            return f"{line['of']} {line['why']}"
        case "checkpoint" | "checkpoint_copy" if line.get("error"):
            return str(line["error"])
        case "spike" if line["in_a_row"] == 1:
            return (
                f"step {line['step']} was a spike, and its update was skipped: loss "
                f"{spell_number(line['loss'])} (limit {spell_number(line['loss_limit'])}), gradient norm "
                f"{spell_number(line['grad_norm'])} (limit {spell_number(line['grad_norm_limit'])})"
            )
    return None


def spell_number(value: object) -> str:
    """Formats a measured number; numbers that are not finite are stored as text."""
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
