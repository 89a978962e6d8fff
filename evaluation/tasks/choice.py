"""Judges questions with several answers, one of which should be more likely than all others.

paper      right only if the answer strictly beats every other, by the sum of log-probabilities or
           by their mean per token
acc        the harness's: the largest sum, ties to the first
acc_norm   the harness's: the largest sum divided by the characters of the answer
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..scoring import RowScore
from .task import (
    PAPER,
    Encoder,
    HubSet,
    Judge,
    Judgement,
    Question,
    Record,
    RowList,
    TaskError,
    TaskMetric,
)

PaperRule = Literal["sum", "mean"]


@dataclass(frozen=True)
class Option:
    """Holds one answer: the scored text and its context."""

    context: str
    continuation: str


@dataclass(frozen=True)
class ChoiceQuestion:
    """Holds the text of one question."""

    options: tuple[Option, ...]  # in the harness's wording
    answer: int
    group: str = ""
    paper_options: tuple[Option, ...] | None = None  # in the paper's wording, if it differs
    in_paper: bool = True  # whether the paper includes this question


def after(context: str, answers: Sequence[str], answer: int) -> ChoiceQuestion:
    """Returns the question whose answers follow one context and a blank."""
    return ChoiceQuestion(tuple(Option(context, f" {text}") for text in answers), answer)


@dataclass(frozen=True)
class ChoiceTask:
    """Reads questions with several answers.

    `paper` is the paper's rule for comparing answers; None: it has no such task. Like the paper, it
    scores an option without context from the second token on.
    """

    title: str
    published: int
    read: Callable[[Record], ChoiceQuestion]
    paper: PaperRule | None = None
    harness: tuple[str, ...] = ("acc", "acc_norm")
    by_group: bool = False  # average over questions of a group, then over groups
    hub: HubSet | None = None

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """Returns the scores of the task, the paper's first."""
        aggregation = "mean_of_groups" if self.by_group else "mean"
        names = ((PAPER,) if self.paper else ()) + self.harness
        return tuple(TaskMetric(name, aggregation) for name in names)

    def question(self, record: Record, encoder: Encoder) -> Question:
        """Returns the question of a record, with the rows of both conventions."""
        choice, rows = self.read(record), RowList()
        paper, harness = [], []
        if self.paper and choice.in_paper:
            options = choice.paper_options or choice.options
            paper = [_paper_row(option, encoder, rows) for option in options]
        if self.harness:
            for option in choice.options:
                pair = encoder.pair(option.context, option.continuation)
                harness.append(rows.add(encoder.row(*pair)))
        # The harness counts an answer's characters without the blank that joins it to its context.
        lengths = [len(option.continuation.removeprefix(" ")) for option in choice.options]
        if "acc_norm" in self.harness and not all(lengths):
            raise TaskError("an answer is empty, so acc_norm cannot divide by its length")
        return Question(
            tuple(rows.rows), self._judge(choice.answer, paper, harness, lengths), choice.group
        )

    def _judge(
        self,
        answer: int,
        paper: Sequence[tuple[int, int]],
        harness: Sequence[tuple[int, int]],
        lengths: Sequence[int],
    ) -> Judge:
        """Returns the judge of rows given by their place and number of scored tokens."""

        def judge(scores: Sequence[RowScore]) -> dict[str, Judgement]:
            found = {}
            if paper:
                values = [
                    scores[place].total(count) / (count if self.paper == "mean" else 1)
                    for place, count in paper
                ]
                others = [*values[:answer], *values[answer + 1 :]]
                found[PAPER] = Judgement(float(all(values[answer] > other for other in others)))
            totals = np.array([scores[place].total(count) for place, count in harness])
            if "acc" in self.harness:
                found["acc"] = Judgement(float(totals.argmax() == answer))
            if "acc_norm" in self.harness:
                found["acc_norm"] = Judgement(float((totals / lengths).argmax() == answer))
            return found

        return judge


def _paper_row(option: Option, encoder: Encoder, rows: RowList) -> tuple[int, int]:
    """Adds an option's row in the paper's encoding; returns its place and scored tokens."""
    scored = encoder.ids(option.continuation)
    if option.context:
        return rows.add(encoder.row(encoder.ids(option.context), scored))
    return rows.add(encoder.row(scored[:1], scored[1:]))
