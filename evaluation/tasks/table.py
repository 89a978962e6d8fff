"""Lists all tasks by name. To add one, add an entry and a function that reads its records.

The functions define a record's fields and the item's wording: as in the paper's training code and
in the harness's task files (0.4.13, names in the docstrings).
"""

import re
from collections.abc import Callable

from . import hub
from .choice import ChoiceQuestion, ChoiceTask, Option, after
from .last_word import LastWordTask
from .task import Record, Task, TaskError, number_in, text_in, texts_in


def _blimp(record: Record) -> ChoiceQuestion:
    """Reads BLiMP; the harness (blimp_…) puts a blank before the sentence, the paper does not."""
    sentences = text_in(record, "sentence_good"), text_in(record, "sentence_bad")
    return ChoiceQuestion(
        tuple(Option("", f" {sentence}") for sentence in sentences),
        answer=0,
        group=text_in(record, "UID"),
        paper_options=tuple(Option("", sentence) for sentence in sentences),
    )


_DETOKENISED = {
    " '": "'",
    " \n": "\n",
    "\n ": "\n",
    " n't": "n't",
    "`` ": '"',
    "''": '"',
    " :": ":",
    " ;": ";",
    " !": "!",
    " ?": "?",
    " ,": ",",
    " .": ".",
}
_BLANK = "XXXXX"


def _detokenised(text: str) -> str:
    """Undoes the Penn tokenization of the Children's Book Test, in the paper's order."""
    for tokenised, plain in _DETOKENISED.items():
        text = text.replace(tokenised, plain)
    return text


def _cloze(detokenise: Callable[[str], str]) -> Callable[[Record], ChoiceQuestion]:
    """Returns the reader of cloze questions; all text after the blank is scored, per token."""

    def read(record: Record) -> ChoiceQuestion:
        sentences = [detokenise(sentence) for sentence in texts_in(record, "context")]
        before, *rest = detokenise(text_in(record, "question")).split(_BLANK)
        candidates = texts_in(record, "candidates", least=2)
        if not rest:
            raise TaskError(f"field 'question' has no {_BLANK}")
        if candidates.count(text_in(record, "answer")) != 1:
            raise TaskError("field 'candidates' must contain the answer exactly once")
        context = " ".join([*sentences, before])
        # The blank before the gap belongs to the candidate: SentencePiece drops blanks at the end of
        # the context and puts one before the candidate.
        bare = context.rstrip(" ")
        options = tuple(Option(bare, context[len(bare) :] + word + rest[0]) for word in candidates)
        answer = candidates.index(text_in(record, "answer"))
        return ChoiceQuestion(
            options, answer, text_in(record, "kind"), in_paper=len(candidates) == 10
        )

    return read


def _hellaswag(record: Record) -> ChoiceQuestion:
    """Reads hellaswag: "activity: ctx_a Ctx_b"; the file has ctx_b as `fragment`, not capitalized."""
    query, fragment = text_in(record, "query").rstrip(), text_in(record, "fragment").rstrip()
    if not query.endswith(fragment):
        raise TaskError(f"field 'query' must end with field 'fragment', {fragment!r}")
    query = query.removesuffix(fragment) + fragment.capitalize()
    endings = [_hellaswag_text(ending) for ending in texts_in(record, "endings", least=2)]
    return after(_hellaswag_text(query), endings, number_in(record, "label", below=len(endings)))


def _hellaswag_text(text: str) -> str:
    """Removes WikiHow's marks such as [header] in the harness's order; [title] ends a sentence."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _piqa(record: Record) -> ChoiceQuestion:
    """Reads piqa; the paper strips the goal."""
    goal = text_in(record, "goal")
    solutions = [text_in(record, "sol1"), text_in(record, "sol2")]
    answer = number_in(record, "label", below=2)
    harness = after(f"Question: {goal}\nAnswer:", solutions, answer)
    paper = after(f"Question: {goal.strip()}\nAnswer:", solutions, answer)
    return ChoiceQuestion(harness.options, answer, paper_options=paper.options)


def _arc(record: Record) -> ChoiceQuestion:
    """Reads arc_easy and arc_challenge; the paper skips questions without four choices."""
    choices = texts_in(record, "choices", least=2)
    found = after(
        f"Question: {text_in(record, 'question')}\nAnswer:",
        choices,
        number_in(record, "label", below=len(choices)),
    )
    return ChoiceQuestion(found.options, found.answer, in_paper=len(choices) == 4)


TASKS: dict[str, Task] = {
    "lambada": LastWordTask("LAMBADA, last word", 5153, hub=hub.LAMBADA),
    "blimp": ChoiceTask(
        "BLiMP, grammar",
        67_000,
        _blimp,
        paper="sum",
        harness=("acc",),
        by_group=True,
        hub=hub.BLIMP,
    ),
    "cbt": ChoiceTask(
        "Children's Book Test",
        10_000,
        _cloze(_detokenised),
        paper="mean",
        harness=(),
        by_group=True,
        hub=hub.CBT,
    ),
    "cbt_style": ChoiceTask(
        "cloze in the shape of CBT, not CBT",
        0,
        _cloze(lambda text: text),
        paper="mean",
        harness=(),
        by_group=True,
    ),
    "hellaswag": ChoiceTask(
        "HellaSwag, endings", 10_042, _hellaswag, paper="mean", hub=hub.HELLASWAG
    ),
    "piqa": ChoiceTask("PIQA, physical tasks", 1838, _piqa, paper="mean", hub=hub.PIQA),
    "arc_easy": ChoiceTask("ARC-Easy, science", 2376, _arc, paper="mean", hub=hub.ARC_EASY),
    "arc_challenge": ChoiceTask(
        "ARC-Challenge, science", 1172, _arc, paper="mean", hub=hub.ARC_CHALLENGE
    ),
}

PAPER_TASKS = ("lambada", "blimp", "cbt", "hellaswag", "piqa", "arc_easy")
"""The tasks of the paper's mean."""

STAND_INS = {"cbt": "cbt_style"}
"""Replace a task whose own file is missing."""
