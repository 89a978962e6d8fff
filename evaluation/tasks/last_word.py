"""LAMBADA: predict the last word of a passage, which its last sentence alone does not reveal.

paper        the passage goes through the model once. Take the most likely tokens in the last
             places, as many as the last word has characters, and decode them; the text after the
             last blank must equal the word
acc          the harness's: every token of " word" is the most likely one
perplexity   the harness's: exp of the mean −log P(" word" | passage), per word
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..scoring import RowScore
from .task import (
    PAPER,
    Encoder,
    HubSet,
    Judgement,
    Question,
    Record,
    RowList,
    TaskError,
    TaskMetric,
    text_in,
)


@dataclass(frozen=True)
class LastWordTask:
    """Reads passages and asks for their last word."""

    title: str
    published: int
    hub: HubSet | None = None
    metrics: tuple[TaskMetric, ...] = (
        TaskMetric(PAPER),
        TaskMetric("acc"),
        TaskMetric("perplexity", "perplexity"),
    )

    def question(self, record: Record, encoder: Encoder) -> Question:
        """Returns the question of a record, with the rows of both conventions."""
        text = text_in(record, "text")
        context, blank, word = text.rpartition(" ")
        if not blank or not word:
            raise TaskError("field 'text' has no last word after a blank")
        rows = RowList()
        whole = encoder.ids(text)
        num_read = min(len(word), len(whole) - 1)  # the first token has none before it
        read = rows.add(encoder.row(whole[:-num_read], whole[-num_read:]))
        before, scored = encoder.pair(context, " " + word)
        asked = rows.add(encoder.row(before, scored))
        decode = encoder.tokenizer.decode

        def judge(scores: Sequence[RowScore]) -> dict[str, Judgement]:
            tail = decode(scores[read[0]].greedy_S[-read[1] :])
            said = scores[asked[0]].greedy_S[-asked[1] :]
            return {
                PAPER: Judgement(float(tail.split(" ")[-1] == word)),
                "acc": Judgement(float(said.tolist() == scored[-asked[1] :])),
                "perplexity": Judgement(scores[asked[0]].total(asked[1])),
            }

        return Question(tuple(rows.rows), judge)
