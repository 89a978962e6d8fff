"""Defines tasks: records become questions, and a question knows its rows and how to judge their
scores.

Two conventions judge every task over the same rows. `paper` is that of MoEUT's zero-shot evaluation
(arXiv 2405.16039 and its training code). The others are those of EleutherAI's lm-evaluation-harness
(0.4.13), under its names: acc, acc_norm, perplexity, ….

They tokenize context and continuation differently. The paper encodes each by itself. The harness
moves blanks from the end of the context to the continuation, encodes both together, and takes the
tokens after the context's own encoding. If the tokens are the same, the row is scored once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ...data_pipeline.tokenizers.interface import Tokenizer
from ..batches import Row
from ..scoring import RowScore

Record = Mapping[str, Any]
"""One line of a task's file."""

PAPER = "paper"
Aggregation = Literal["mean", "mean_of_groups", "perplexity"]


class TaskError(ValueError):
    """Reports task data that cannot be read, or an item that cannot be scored."""


class TooLongError(TaskError):
    """Reports an answer that alone is longer than the context."""

    def __init__(self, num_scored: int, context: int) -> None:
        super().__init__(
            f"{num_scored} tokens to score exceed the context of {context}; leave the item out, or "
            "use a longer context if the model can read it"
        )
        self.num_scored = num_scored


@dataclass(frozen=True)
class Judgement:
    """Holds one question's contribution to a metric: a value, and its weight."""

    value: float  # 0 or 1; for a perplexity the log-probability
    weight: float = 1.0  # 1; for a perplexity words, bytes or tokens


Judge = Callable[[Sequence[RowScore]], dict[str, Judgement]]


@dataclass(frozen=True)
class Question:
    """Holds the rows that one item asks a model, and how to judge their scores."""

    rows: tuple[Row, ...]
    judge: Judge  # takes the rows' scores in order; returns metrics by name
    group: str = ""  # BLiMP's phenomenon, CBT's word class

    @property
    def is_cut(self) -> bool:
        """Tells whether a row was too long and lost its left end."""
        return any(row.num_cut for row in self.rows)


class Encoder:
    """Makes rows from texts, with a run's tokenizer and context length.

    Args:
        tokenizer: of the run.
        context: the longest input; longer rows lose their left end.
    """

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self.tokenizer, self.context = tokenizer, context
        self._last: tuple[str, list[int]] = ("", [])

    @property
    def end_of_document(self) -> int:
        """Returns the id that replaces a missing context."""
        return self.tokenizer.end_of_document_id

    def ids(self, text: str) -> list[int]:
        """Returns a text's tokens, without special ones."""
        if text != self._last[0]:  # the options of a question share their context
            self._last = (text, self.tokenizer.encode_batch([text])[0].tolist())
        return list(self._last[1])

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of a context and of its continuation, split as in the harness."""
        if not context:
            return [self.end_of_document], self.ids(continuation)
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        before = self.ids(bare)
        whole = self.tokenizer.encode_batch([bare + continuation])[0].tolist()
        return before, whole[len(before) :]

    def row(self, before: Sequence[int], scored: Sequence[int]) -> Row:
        """Returns the row of context tokens and scored tokens, cut on the left if too long.

        Raises:
            TaskError: there is no token to score, or none before it.
            TooLongError: the scored tokens alone do not fit.
        """
        if not scored or not before:
            raise TaskError(
                f"{len(scored)} tokens to score after {len(before)}: at least one of each is needed; "
                "the text is empty or too short for this tokenizer"
            )
        if len(scored) > self.context:
            raise TooLongError(len(scored), self.context)
        line = [*before, *scored]
        cut = max(0, len(line) - self.context - 1)
        return Row(tuple(line[cut:]), len(scored), cut)


@dataclass
class RowList:
    """Collects the rows of a question without duplicates; the conventions mostly share rows."""

    rows: list[Row] = field(default_factory=list)
    _places: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, row: Row) -> tuple[int, int]:
        """Adds a row; returns its place and how many of its last tokens count."""
        place = self._places.setdefault(row.tokens, len(self.rows))
        if place == len(self.rows):
            self.rows.append(row)
        elif row.num_scored > self.rows[place].num_scored:
            self.rows[place] = row
        return place, row.num_scored


@dataclass(frozen=True)
class TaskMetric:
    """Names a score of a task and how to aggregate it over questions."""

    name: str
    aggregation: Aggregation = "mean"


@dataclass(frozen=True)
class HubSet:
    """Locates a published set on the Hugging Face hub and converts its records."""

    repository: str
    split: str
    configurations: tuple[str, ...] = ()  # of the repository; empty: its only one
    convert: Callable[[Record, str], Record] = lambda record, configuration: record


class Task(Protocol):
    """Declares the interface of a task."""

    @property
    def title(self) -> str:
        """Returns a title that people can read."""
        ...

    @property
    def published(self) -> int:
        """Returns the number of items in the published set; 0: there is none."""
        ...

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """Returns the task's scores, the paper's first."""
        ...

    @property
    def hub(self) -> HubSet | None:
        """Returns the published set's place on the hub, or None."""
        ...

    def question(self, record: Record, encoder: Encoder) -> Question:
        """Returns the question of a record.

        Raises:
            TaskError: the record does not belong to this task or cannot be scored.
        """
        ...


def text_in(record: Record, key: str) -> str:
    """Returns a field's text.

    Raises:
        TaskError: the field is missing or not a string.
    """
    value = record.get(key)
    if not isinstance(value, str):
        raise TaskError(f"field {key!r} is {_shown(record, key)}; it must be a string")
    return value


def texts_in(record: Record, key: str, *, least: int = 1) -> list[str]:
    """Returns a field's list of texts.

    Raises:
        TaskError: the field is missing or not a list of strings.
    """
    value = record.get(key)
    if (
        not isinstance(value, list)
        or len(value) < least
        or not all(isinstance(one, str) for one in value)
    ):
        raise TaskError(
            f"field {key!r} is {_shown(record, key)}; it must be a list of at least {least} strings"
        )
    return value


def number_in(record: Record, key: str, *, below: int, first: int = 0) -> int:
    """Returns which of `below` answers is right, from 0; the record counts from `first`, maybe as text.

    Raises:
        TaskError: the field is missing or names no answer.
    """
    value = record.get(key)
    try:
        number = -1 if isinstance(value, bool | float) else int(str(value)) - first
    except ValueError:
        number = -1
    if not 0 <= number < below:
        raise TaskError(
            f"field {key!r} is {_shown(record, key)}; it must be the number of the right answer, "
            f"{first} to {below - 1 + first}"
        )
    return number


def _shown(record: Record, key: str) -> str:
    """Returns the field's value, shortened, or "missing"."""
    if key not in record:
        return "missing"
    text = repr(record[key])
    return text if len(text) <= 60 else f"{text[:59]}…"
