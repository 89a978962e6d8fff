"""A task's items as questions for a model, and what is done with those that are too long for it.

An item is too long where one of its answers alone has more tokens to score than the context holds.
(Where only what stands before the answer is too long, its left end is cut off: task.py.) The
harness stops there with a failed assertion; `fail` does so too, but only after all items were read,
so that one error tells of all of them before anything is scored.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .reading import read_records
from .task import Encoder, Question, Task, TaskError, TooLongError

WhenTooLong = Literal["fail", "skip", "truncate"]
"""`truncate` scores the last tokens of an answer, as many as the context holds."""


@dataclass(frozen=True)
class TooLong:
    """Names an item whose answer does not fit."""

    where: str
    num_scored: int  # tokens to score


@dataclass(frozen=True)
class TaskItems:
    """Holds the items of a task that are asked."""

    name: str
    task: Task
    questions: tuple[Question, ...]  # without those that are too long
    available: int  # items that the file has
    too_long: tuple[TooLong, ...] = ()


def read_items(
    name: str, task: Task, data: Path | str, encoder: Encoder, limit: int | None
) -> TaskItems:
    """Returns the items of a task, evenly over its file.

    Args:
        name: of the task.
        task: what it is.
        data: the folder of the task files, or "hub".
        encoder: of the run; it says how long an answer may be, and whether longer ones are cut.
        limit: so many items at most; None: all.

    Raises:
        TaskError: the file cannot be read, an item cannot be scored, or there is none.
    """
    records = [found for found in read_records(data, name, task) if task.takes(found[1])]
    if not records:
        raise TaskError(f"task {name!r} has no items in {data}")
    count = len(records) if limit is None else min(limit, len(records))
    questions, too_long = [], []
    for number in range(count):
        where, record = records[number * len(records) // count]
        try:
            questions.append(task.question(record, encoder))
        except TooLongError as error:
            too_long.append(TooLong(where, error.num_scored))
        except TaskError as error:
            raise TaskError(f"{where}: {error}") from error
        except UnicodeEncodeError as error:
            raise TaskError(f"{where}: a text is no Unicode ({error.reason})") from error
    return TaskItems(name, task, tuple(questions), len(records), tuple(too_long))


def refuse_too_long(items: Iterable[TaskItems], context: int) -> None:
    """Raises if there are items that are too long.

    Raises:
        TaskError: names the tasks, how many items of each, and the longest.
    """
    found = [one for one in items if one.too_long]
    if not found:
        return
    longest = max(item.num_scored for one in found for item in one.too_long)
    raise TaskError(
        f"the context has {context} tokens, and items have longer answers: "
        f"{'; '.join(map(_told, found))}. --too-long skip leaves them out, --too-long truncate "
        f"scores the last {context} tokens of such an answer, and --context {longest} makes room "
        "if the model can read so far"
    )


def refuse_nothing_left(items: Iterable[TaskItems], context: int) -> None:
    """Raises if leaving out what is too long leaves a task without items.

    Raises:
        TaskError: names the task.
    """
    for one in items:
        if not one.questions:
            raise TaskError(
                f"task {one.name!r}: nothing is left, for the answers of all {len(one.too_long)} "
                f"items are longer than the context of {context} tokens; --too-long truncate scores "
                "their ends"
            )


def _told(found: TaskItems) -> str:
    """The line about one task."""
    longest = max(found.too_long, key=lambda item: item.num_scored)
    asked = len(found.questions) + len(found.too_long)
    return (
        f"{found.name} {len(found.too_long):,} of {asked:,} items, the longest of "
        f"{longest.num_scored:,} tokens ({longest.where})"
    )
