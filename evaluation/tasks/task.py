"""What a task is: records in, questions out; a question knows its rows and how to judge their scores.

Every task is judged by two conventions over the same rows. `paper` is that of MoEUT's zero-shot
evaluation (arXiv 2405.16039 and its training code). The others are those of EleutherAI's
lm-evaluation-harness (0.4.13), by the harness's names: acc, acc_norm, perplexity, ….

They differ in how a context and what follows it become tokens. The paper encodes both by
themselves. The harness moves blanks at the end of the context to the continuation, encodes both
together, and takes what is longer than the context's own encoding. Where the tokens are the same
the row is scored once.
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
    """Says that a task's data cannot be read, or that an item of it cannot be scored."""


class TooLongError(TaskError):
    """Says that an answer alone is longer than the context."""

    def __init__(self, num_scored: int, context: int) -> None:
        super().__init__(
            f"{num_scored} tokens are to be scored, and the context has {context}: leave the item "
            "out, or give a longer context if the model can use one"
        )
        self.num_scored = num_scored


@dataclass(frozen=True)
class Judgement:
    """Holds what one question adds to a metric: a value, and what it is divided by."""

    value: float  # 0 or 1; of a perplexity the log-probability
    weight: float = 1.0  # 1; of a perplexity words, bytes or tokens


Judge = Callable[[Sequence[RowScore]], dict[str, Judgement]]


@dataclass(frozen=True)
class Question:
    """Holds the rows that one item asks a model, and what their scores mean."""

    rows: tuple[Row, ...]
    judge: Judge  # told the rows' scores in their order; metrics by name
    group: str = ""  # BLiMP's phenomenon, CBT's word class

    @property
    def is_cut(self) -> bool:
        """Returns whether a row was too long and lost its left end."""
        return any(row.num_cut for row in self.rows)

    @property
    def is_truncated(self) -> bool:
        """Returns whether an answer was too long itself, so that only its end is scored."""
        return any(row.num_unscored for row in self.rows)


class Encoder:
    """Makes rows of texts, with a run's tokenizer and the length that the run was trained with.

    Args:
        tokenizer: of the run.
        context: the longest input; of longer rows the left is cut off.
        truncate: whether that holds where the answer alone is longer, too, which is refused else.
    """

    def __init__(self, tokenizer: Tokenizer, context: int, *, truncate: bool = False) -> None:
        self.tokenizer, self.context, self._truncate = tokenizer, context, truncate
        self._last: tuple[str, list[int]] = ("", [])

    @property
    def end_of_document(self) -> int:
        """Returns the id that stands where there is no context."""
        return self.tokenizer.end_of_document_id

    def ids(self, text: str) -> list[int]:
        """Returns the tokens of a text, without special ones."""
        if text != self._last[0]:  # the options of a question have their context in common
            self._last = (text, self.tokenizer.encode_batch([text])[0].tolist())
        return list(self._last[1])

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of a context and of what follows it, as the harness splits them."""
        if not context:
            return [self.end_of_document], self.ids(continuation)
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        before = self.ids(bare)
        whole = self.tokenizer.encode_batch([bare + continuation])[0].tolist()
        return before, whole[len(before) :]

    def row(self, before: Sequence[int], scored: Sequence[int]) -> Row:
        """Returns the row of a context's tokens and those to score; the left is cut off if need be.

        Raises:
            TaskError: nothing is to be scored, or nothing stands before it.
            TooLongError: what is to be scored does not fit by itself, and may not be truncated.
        """
        if not scored or not before:
            raise TaskError(
                f"there are {len(scored)} tokens to score after {len(before)}; each needs a token "
                "before it: the text is empty, or too short for this tokenizer"
            )
        unscored = max(0, len(scored) - self.context)
        if unscored and not self._truncate:
            raise TooLongError(len(scored), self.context)
        line = [*before, *scored]
        cut = max(0, len(line) - self.context - 1)
        return Row(tuple(line[cut:]), len(scored) - unscored, cut, unscored)


@dataclass
class RowList:
    """Collects the rows of a question, each once; the conventions mostly ask the same."""

    rows: list[Row] = field(default_factory=list)
    _places: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, row: Row) -> tuple[int, int]:
        """Returns the place of a row among the rows, and how many of its last tokens count."""
        place = self._places.setdefault(row.tokens, len(self.rows))
        if place == len(self.rows):
            self.rows.append(row)
        elif row.num_scored > self.rows[place].num_scored:
            self.rows[place] = row
        return place, row.num_scored


@dataclass(frozen=True)
class Metric:
    """Names a score of a task and says how questions make it."""

    name: str
    aggregation: Aggregation = "mean"


@dataclass(frozen=True)
class HubSet:
    """Says where a published set lies on the Hugging Face hub, and how its records become ours."""

    repository: str
    split: str
    configurations: tuple[str, ...] = ()  # of the repository; none: its only one
    convert: Callable[[Record, str], Record] = lambda record, configuration: record


class Task(Protocol):
    """Declares what every task offers."""

    @property
    def title(self) -> str:
        """Returns what the task is, for people."""
        ...

    @property
    def published(self) -> int:
        """Returns how many items the published set has; 0: there is none."""
        ...

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Returns the scores that it has, the paper's first."""
        ...

    @property
    def hub(self) -> HubSet | None:
        """Returns where the published set lies; None: it is nowhere."""
        ...

    def question(self, record: Record, encoder: Encoder) -> Question:
        """Returns the question of a record.

        Raises:
            TaskError: the record is not as this task's are, or cannot be scored.
        """
        ...


def text_in(record: Record, key: str) -> str:
    """Returns the text of a field.

    Raises:
        TaskError: it is not there, or no text.
    """
    value = record.get(key)
    if not isinstance(value, str):
        raise TaskError(f"field {key!r} is {_shown(record, key)}; it must be a text")
    return value


def texts_in(record: Record, key: str, *, least: int = 1) -> list[str]:
    """Returns the texts of a field.

    Raises:
        TaskError: it is not there, or no list of texts.
    """
    value = record.get(key)
    if (
        not isinstance(value, list)
        or len(value) < least
        or not all(isinstance(one, str) for one in value)
    ):
        raise TaskError(
            f"field {key!r} is {_shown(record, key)}; it must be a list of at least {least} texts"
        )
    return value


def number_in(record: Record, key: str, *, below: int) -> int:
    """Returns the number of the right answer among `below`, from 0; it may be written as a text.

    Raises:
        TaskError: it is not there, or names no answer.
    """
    value = record.get(key)
    try:
        number = -1 if isinstance(value, bool | float) else int(str(value))
    except ValueError:
        number = -1
    if not 0 <= number < below:
        raise TaskError(
            f"field {key!r} is {_shown(record, key)}; it must be the number of the right answer, "
            f"0 to {below - 1}"
        )
    return number


def _shown(record: Record, key: str) -> str:
    """The value, short; or that there is none."""
    if key not in record:
        return "missing"
    text = repr(record[key])
    return text if len(text) <= 60 else f"{text[:59]}…"
