"""Reads a task's items from DIR/NAME.jsonl[.zst] or from the hub, and makes questions of them.

An item is too long if a single answer has more scored tokens than the context holds. (If only the
context before the answer is too long, its left end is cut off: task.py.) The harness fails an
assertion there. `fail` stops too, but only after reading all items, so that one error names all of
them before anything is scored.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...data_pipeline.sources.lines import json_records
from .hub import hub_records
from .task import Encoder, Question, Record, Task, TaskError, TooLongError

HUB = "hub"
"""Stands for the published sets on the Hugging Face hub, instead of a folder."""

_ENDINGS = (".jsonl", ".jsonl.zst")

WhenTooLong = Literal["fail", "skip"]


@dataclass(frozen=True)
class TooLong:
    """Names an item whose answer does not fit."""

    where: str
    num_scored: int  # tokens to score


@dataclass(frozen=True)
class TaskItems:
    """Holds the items of a task to be scored."""

    name: str
    task: Task
    questions: tuple[Question, ...]  # without those that are too long
    numbers: tuple[int, ...]  # of the questions in the file, from 0
    available: int  # items in the file
    too_long: tuple[TooLong, ...] = ()


def read_items(
    name: str, task: Task, data: Path | str, encoder: Encoder, limit: int | None
) -> TaskItems:
    """Returns a task's items, spread evenly over its file.

    Args:
        name: of the task.
        task: the task itself.
        data: the folder of the task files, or "hub".
        encoder: of the run; it limits the length of answers.
        limit: upper limit of items; None: all.

    Raises:
        TaskError: the file cannot be read, an item cannot be scored, or there are none.
    """
    records = list(read_records(data, name, task))
    if not records:
        raise TaskError(f"task {name!r} has no items in {data}")
    count = len(records) if limit is None else min(limit, len(records))
    questions, numbers, too_long = [], [], []
    for number in (place * len(records) // count for place in range(count)):
        where, record = records[number]
        try:
            questions.append(task.question(record, encoder))
            numbers.append(number)
        except TooLongError as error:
            too_long.append(TooLong(where, error.num_scored))
        except TaskError as error:
            raise TaskError(f"{where}: {error}") from error
        except UnicodeEncodeError as error:
            raise TaskError(f"{where}: a text is not valid Unicode ({error.reason})") from error
    return TaskItems(name, task, tuple(questions), tuple(numbers), len(records), tuple(too_long))


def refuse_too_long(items: Iterable[TaskItems], context: int) -> None:
    """Refuses items that are too long.

    Raises:
        TaskError: names the tasks, how many items of each, and the longest.
    """
    found = [one for one in items if one.too_long]
    if not found:
        return
    longest = max(item.num_scored for one in found for item in one.too_long)
    raise TaskError(
        f"answers are longer than the context of {context} tokens: {'; '.join(map(_told, found))}. "
        f"Use --too-long skip to leave them out, or --context {longest} if the model can read that far"
    )


def refuse_nothing_left(items: Iterable[TaskItems], context: int) -> None:
    """Refuses a task that has no items once too-long ones are left out.

    Raises:
        TaskError: names the task.
    """
    for one in items:
        if not one.questions:
            raise TaskError(
                f"task {one.name!r}: no items are left, because the answers of all "
                f"{len(one.too_long)} are longer than the context of {context} tokens; use "
                "--context if the model can read more"
            )


def _told(found: TaskItems) -> str:
    """Describes one task's items that are too long."""
    longest = max(found.too_long, key=lambda item: item.num_scored)
    asked = len(found.questions) + len(found.too_long)
    return (
        f"{found.name} {len(found.too_long):,} of {asked:,} items, the longest of "
        f"{longest.num_scored:,} tokens ({longest.where})"
    )


# Files ------------------------------------------------------------------------------------------


def task_file(data: Path, name: str) -> Path | None:
    """Returns the file of a task, or None."""
    return next((data / (name + end) for end in _ENDINGS if (data / (name + end)).is_file()), None)


def required_file(data: Path, name: str) -> Path:
    """Returns the file of a task.

    Raises:
        TaskError: it does not exist.
    """
    path = task_file(data, name)
    if path is None:
        raise TaskError(
            f"task {name!r} has no file: {data / name}{' or '.join(_ENDINGS)} does not exist; set "
            "--data (evaluate.data) to the folder of task files or 'hub'"
        )
    return path


def read_records(data: Path | str, name: str, task: Task) -> Iterator[tuple[str, Record]]:
    """Yields a task's records, each with a description of its location.

    Args:
        data: a folder, or "hub".
        name: of the task.
        task: the task itself.

    Raises:
        ValueError: the file is missing or damaged.
    """
    if data == HUB:
        yield from hub_records(name, task.hub)
        return
    yield from json_records(str(required_file(Path(data), name)))
