"""Documents whose tokens are all scored, each document by itself, as the harness rolls over them.

Windows are as long as the context and do not overlap in what they score: the first begins with an
end of document, the last is filled with context on its left. The harness's three figures divide the
same sum by the words or the UTF-8 bytes of the document, so tokenizers compare.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..batches import Row
from ..scoring import RowScore
from .task import Encoder, HubSet, Judgement, Metric, Question, Record, TaskError, text_in


@dataclass(frozen=True)
class DocumentTask:
    """Reads documents; of several splits one."""

    title: str
    published: int
    split: str
    hub: HubSet | None = None
    metrics: tuple[Metric, ...] = (
        Metric("word_perplexity", "perplexity"),
        Metric("byte_perplexity", "perplexity"),
        Metric("bits_per_byte", "bits"),
    )

    def takes(self, record: Record) -> bool:
        """Implements `Task.takes`."""
        return record.get("split", self.split) == self.split

    def question(self, record: Record, encoder: Encoder) -> Question:
        """Implements `Task.question`."""
        text = text_in(record, "text")
        tokens = encoder.ids(text)
        if not tokens:
            raise TaskError("field 'text' is empty")
        num_bytes, num_words = len(text.encode()), len(re.split(r"\s+", text))

        def judge(scores: Sequence[RowScore]) -> dict[str, Judgement]:
            total = sum(score.total() for score in scores)
            return {
                "word_perplexity": Judgement(total, num_words),
                "byte_perplexity": Judgement(total, num_bytes),
                "bits_per_byte": Judgement(total, num_bytes),
            }

        rows = rolling_rows(tokens, encoder.end_of_document, encoder.context)
        return Question(tuple(rows), judge)


def rolling_rows(
    tokens: Sequence[int], prefix: int, context: int, *, stride: int | None = None
) -> list[Row]:
    """Returns rows that together score every token of a text once.

    Args:
        tokens: of the text.
        prefix: stands before its first token.
        context: tokens of a row's input.
        stride: how many tokens a row scores, but for the first, which scores all that it has; None:
            as many as the context, so that only the last row has more context than it needs.
    """
    line, stride = [prefix, *tokens], stride or context
    rows, done = [], 0
    while done < len(tokens):
        scored = min(context if not rows else stride, len(tokens) - done)
        done += scored
        rows.append(Row(tuple(line[max(0, done - context) : done + 1]), scored))
    return rows
