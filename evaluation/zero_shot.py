"""Scores a checkpoint zero-shot on tasks, on one rank or split over several.

The paper's mean covers its six tasks by the paper's convention (arXiv 2405.16039). A limit takes
items evenly over a task's file, so that every phenomenon of BLiMP keeps its share.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

import numpy as np

from ..data_pipeline.sources.columns import write_rows
from ..distributed.checkpoint.format import Weights
from ..distributed.process.process import start_process
from ..plugins import Registry
from .restore import ModelChoice, Restored, refuse_pairs, restore, tokenizer_of_run
from .scoring import Advance, RowScore, Scorer, open_scorer
from .tasks.items import (
    HUB,
    TaskItems,
    WhenTooLong,
    read_items,
    refuse_nothing_left,
    refuse_too_long,
    required_file,
    task_file,
)
from .tasks.table import PAPER_TASKS, STAND_INS, TASKS
from .tasks.task import PAPER, Encoder, Judgement, Question, Task, TaskError, TaskMetric

StartTask = Callable[[str, int], Advance]
"""Called with a task's name and its number of rows; returns the callback for finished rows."""


@dataclass(frozen=True)
class Estimate:
    """Holds a score and its uncertainty."""

    value: float
    stderr: float  # over the items; nan for a single one
    spread: float | None  # standard deviation over draws of the group context; None without draws
    count: int  # items


@dataclass(frozen=True)
class TaskResult:
    """Holds the result of one task."""

    name: str
    title: str
    items: int
    available: int  # items of the file
    published: int  # items of the published set; 0: there is none
    cut: int  # items longer than the context, which lost their left end
    skipped: int  # items left out of `items` because an answer is longer than the context
    metrics: dict[str, Estimate]
    groups: dict[str, float] = field(default_factory=dict)  # the first metric's mean per group


@dataclass(frozen=True)
class ZeroShotReport:
    """Holds a checkpoint's scores on tasks."""

    run: str
    step: int
    data: str
    context: int
    too_long: WhenTooLong  # treatment of items with a longer answer
    draws: int  # of the group context; 0: the model needs none
    seed: int
    ranks: int
    seconds: float
    tasks: tuple[TaskResult, ...]
    weights: Weights = "trained"

    @property
    def paper_mean(self) -> Estimate | None:
        """Returns the mean over the paper's tasks or their stand-ins; None if one is missing."""
        found = {result.name: result for result in self.tasks}
        named = [name if name in found else STAND_INS.get(name, name) for name in PAPER_TASKS]
        if not all(name in found for name in named):
            return None
        scores = [found[name].metrics[PAPER] for name in named]
        return Estimate(
            value=sum(score.value for score in scores) / len(scores),
            stderr=math.sqrt(sum(score.stderr**2 for score in scores)) / len(scores),
            spread=None,
            count=sum(score.count for score in scores),
        )


def measure_tasks(
    run_dir: Path | Restored,
    names: Sequence[str],
    data: Path | str,
    *,
    limit: int | None = None,
    context: int | None = None,
    too_long: WhenTooLong = "fail",
    draws: int = 1,
    seed: int = 0,
    per_item: Path | None = None,
    on_task: StartTask | None = None,
    **which: Unpack[ModelChoice],
) -> ZeroShotReport | None:
    """Scores a checkpoint on tasks.

    Ranks started by torchrun share the items.

    Args:
        run_dir: the run folder, or a model.
        names: of the tasks; "paper" means the paper's six, "all" those with a file.
        data: the folder of their files, or "hub".
        limit: upper limit of items per task; None: all.
        context: the longest input in tokens; None: as in training.
        too_long: treatment of items with a longer answer.
        draws: of the group context, for a model that routes sequences together.
        seed: of these draws.
        per_item: Parquet file for each item's scores (`item_rows`); None: none is written.
        on_task: called when a task begins.
        which: as for `restore`.

    Returns:
        The report on the first rank, None on others.

    Raises:
        ValueError: the run, its checkpoint or a task cannot be read, an item cannot be scored, or
            the model reads later positions.
    """
    started = time.monotonic()
    if (limit is not None and limit < 1) or draws < 1 or (context is not None and context < 1):
        raise TaskError(f"{limit=}, {draws=}, {context=} must each be at least 1")
    if per_item is not None and not per_item.absolute().parent.is_dir():
        raise TaskError(f"--per-item {per_item}: the folder {per_item.parent} does not exist")
    chosen = chosen_tasks(names, data)
    with start_process("auto") as process:
        restored = restore(run_dir, process, **which)
        refuse_pairs(restored)
        encoder = encoder_of(restored, context)
        scorer = open_scorer(restored, process, seed=seed)
        items = [read_items(name, task, data, encoder, limit) for name, task in chosen.items()]
        if too_long == "fail":
            refuse_too_long(items, encoder.context)
        refuse_nothing_left(items, encoder.context)
        num_draws = draws if scorer.needs_draws else 0
        judged = [_judged(one, scorer, max(1, num_draws), on_task) for one in items]
        if process.rank > 0:
            return None
        if per_item is not None:
            write_rows(per_item, item_rows(items, judged))
        results = tuple(
            _result(one, own, drawn=scorer.needs_draws)
            for one, own in zip(items, judged, strict=True)
        )
        return ZeroShotReport(
            run=str(run_dir),
            step=restored.step,
            data=str(data),
            context=encoder.context,
            too_long=too_long,
            draws=num_draws,
            seed=seed,
            ranks=process.world_size,
            seconds=time.monotonic() - started,
            tasks=results,
            weights=restored.weights,
        )


def chosen_tasks(names: Sequence[str], data: Path | str) -> dict[str, Task]:
    """Returns the requested tasks by name, with a stand-in where a paper's task has no file.

    Raises:
        TaskError: no such task, folder or file.
    """
    if data != HUB and not Path(data).is_dir():
        raise TaskError(
            f"{data}: is not a folder; set --data (evaluate.data) to the folder of task files or 'hub'"
        )
    found: dict[str, Task] = {}
    for name in names:
        if name == PAPER:
            found |= {one: TASKS[one] for one in (_there(n, data) for n in PAPER_TASKS)}
        elif name == "all":
            found |= {one: task for one, task in TASKS.items() if _has(one, data)}
        else:
            found[name.rpartition(":")[2]] = _TASK.get(name)
    if not found:
        raise TaskError(f"{data}: has no task files, named NAME.jsonl[.zst]")
    if data != HUB:
        for name in found:
            required_file(Path(data), name)
    return found


_TASK = Registry(
    "evaluate.tasks or --tasks",
    "a task",
    dict.fromkeys([PAPER, "all"]) | TASKS,
    "a Task",
    lambda found: hasattr(found, "question") and hasattr(found, "metrics"),
)


def _has(name: str, data: Path | str) -> bool:
    return TASKS[name].hub is not None if data == HUB else task_file(Path(data), name) is not None


def _there(name: str, data: Path | str) -> str:
    stand_in = STAND_INS.get(name)
    return stand_in if stand_in and not _has(name, data) and _has(stand_in, data) else name


def encoder_of(restored: Restored, context: int | None = None) -> Encoder:
    """Returns the maker of rows with a run's tokenizer; `context` None: as long as in training.

    Raises:
        ValueError: the tokenizer is missing, or the model has fewer learned positions.
    """
    tokenizer = tokenizer_of_run(restored)
    learned = restored.config.model.attention.max_positions
    if context is not None and learned is not None and context > learned:
        raise TaskError(
            f"--context {context} exceeds the model's {learned} learned positions "
            "(attention.positions.max_positions); use a shorter one"
        )
    length = context or restored.config.data.seq_len
    return Encoder(tokenizer, length)


def _judged(
    items: TaskItems, scorer: Scorer, draws: int, on_task: StartTask | None
) -> "list[Judged]":
    """Returns each question's contribution to the metrics, for every draw of the group context."""
    questions = items.questions
    families = [question.rows for question in questions]
    num_rows = sum(map(len, families)) * draws
    advance = None if on_task is None else on_task(items.name, num_rows)
    scores = [scorer.score(families, draw=draw, advance=advance) for draw in range(draws)]
    return [judge(questions, one) for one in scores]


def first_score(items: TaskItems, scorer: Scorer, advance: Advance) -> float:
    """Returns a task's first metric, an accuracy: the paper's, or the harness's acc; collective."""
    judged = _judged(items, scorer, 1, lambda _name, _rows: advance)
    metric = items.task.metrics[0]
    return estimate(items.questions, judged, metric, drawn=False).value


def item_rows(
    items: Sequence[TaskItems], judged: "Sequence[Sequence[Judged]]"
) -> list[dict[str, object]]:
    """Returns one row per item and metric, so that models can be compared in pairs.

    Keys: task; item, its place in the task's file from 0; group; metric; value, which is 0 or 1, or
    a perplexity's log-probability in nats, averaged over draws; weight, the words, bytes or tokens
    that a perplexity divides by.
    """
    return [
        {
            "task": one.name,
            "item": number,
            "group": question.group,
            "metric": metric,
            "value": sum(draw[place][metric].value for draw in own) / len(own),
            "weight": judgement.weight,
        }
        for one, own in zip(items, judged, strict=True)
        for place, (number, question) in enumerate(zip(one.numbers, one.questions, strict=True))
        for metric, judgement in own[0][place].items()
    ]


def _result(items: TaskItems, judged: "Sequence[Judged]", *, drawn: bool) -> TaskResult:
    questions, task = items.questions, items.task
    first = task.metrics[0]
    return TaskResult(
        name=items.name,
        title=task.title,
        items=len(questions),
        available=items.available,
        published=task.published,
        cut=sum(question.is_cut for question in questions),
        skipped=len(items.too_long),
        metrics={
            metric.name: estimate(questions, judged, metric, drawn=drawn) for metric in task.metrics
        },
        groups=_group_means(questions, judged, first),
    )


Judged = list[dict[str, Judgement]]


def judge(questions: Sequence[Question], scores: Sequence[Sequence[RowScore]]) -> Judged:
    """Returns each question's contribution to the metrics."""
    return [question.judge(own) for question, own in zip(questions, scores, strict=True)]


def estimate(
    questions: Sequence[Question], judged: Sequence[Judged], metric: TaskMetric, *, drawn: bool
) -> Estimate:
    """Returns a metric over all questions that have it.

    The standard error is that of a mean over items. For a mean over groups the groups are
    independent; for a perplexity it is exact to first order. With several draws of the group
    context the value is their mean.

    Args:
        questions: of a task.
        judged: for every draw, each question's contribution.
        metric: of the task.
        drawn: whether group contexts are drawn.
    """
    places = [n for n, found in enumerate(judged[0]) if metric.name in found]
    if not places:
        return Estimate(math.nan, math.nan, None, 0)
    value_RN = np.array([[one[n][metric.name].value for n in places] for one in judged])
    weight_N = np.array([judged[0][n][metric.name].weight for n in places])
    groups = [questions[n].group for n in places]
    values = [_aggregate(value_N, weight_N, groups, metric)[0] for value_N in value_RN]
    _, stderr = _aggregate(value_RN.mean(0), weight_N, groups, metric)
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return Estimate(float(np.mean(values)), stderr, spread if drawn else None, len(places))


def _aggregate(
    value_N: np.ndarray, weight_N: np.ndarray, groups: Sequence[str], metric: TaskMetric
) -> tuple[float, float]:
    if metric.aggregation == "mean":
        return _mean(value_N)
    if metric.aggregation == "mean_of_groups":
        names = np.array(groups)
        parts = [_mean(value_N[names == name]) for name in sorted(set(groups))]
        stderr = math.sqrt(sum(part[1] ** 2 for part in parts)) / len(parts)
        return sum(part[0] for part in parts) / len(parts), stderr
    nats = -value_N.sum() / weight_N.sum()  # per word
    rest = value_N + nats * weight_N  # each item's deviation from that
    num = len(value_N)
    stderr = math.nan
    if num > 1:
        stderr = math.sqrt(num / (num - 1) * float((rest**2).sum())) / float(weight_N.sum())
    perplexity = math.exp(min(nats, 700.0))
    return perplexity, perplexity * stderr


def _mean(value_N: np.ndarray) -> tuple[float, float]:
    """Returns the mean and its standard error, with the unbiased variance."""
    if len(value_N) < 2:
        return float(value_N.mean()), math.nan
    return float(value_N.mean()), float(value_N.std(ddof=1) / math.sqrt(len(value_N)))


def _group_means(
    questions: Sequence[Question], judged: Sequence[Judged], metric: TaskMetric
) -> dict[str, float]:
    """Returns a metric's mean in every group, over all draws; empty without groups."""
    if metric.aggregation != "mean_of_groups":
        return {}
    found: dict[str, list[float]] = {}
    for one in judged:
        for question, own in zip(questions, one, strict=True):
            if metric.name in own:
                found.setdefault(question.group, []).append(own[metric.name].value)
    return {name: sum(values) / len(values) for name, values in sorted(found.items())}
