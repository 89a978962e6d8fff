"""Lists all tasks by name. To add one, add an entry and a function that reads its records.

The functions define a record's fields and the item's wording: as in the paper's training code and
in the harness's task files (0.4.13, names in the docstrings).
"""

import re
from collections.abc import Callable
from dataclasses import replace

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
    " '": "'", " \n": "\n", "\n ": "\n", " n't": "n't", "`` ": '"', "''": '"',
    " :": ":", " ;": ";", " !": "!", " ?": "?", " ,": ",", " .": ".",
}  # fmt: skip
_BLANK = "XXXXX"
_ACC = ("acc",)


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


def _asked(template: str, *answers: str, first: int = 0) -> Callable[[Record], ChoiceQuestion]:
    """Returns the reader of a context with fields in braces; each answer is a field, or one lists them."""

    def read(record: Record) -> ChoiceQuestion:
        context = re.sub(r"{(\w+)}", lambda field: text_in(record, field[1]), template)
        listed = texts_in(record, *answers, least=2) if len(answers) == 1 else ()
        found = listed or [text_in(record, key) for key in answers]
        answer = number_in(record, "label", below=len(found), first=first)
        return replace(after(context, found, answer), in_paper=len(found) == 4)

    return read


def _piqa(record: Record) -> ChoiceQuestion:
    """Reads piqa; the paper strips the goal."""
    read = _asked("Question: {goal}\nAnswer:", "sol1", "sol2")
    paper = read({**record, "goal": text_in(record, "goal").strip()})
    return replace(read(record), paper_options=paper.options, in_paper=True)


_siqa = _asked("Q: {context} {question}\nA:", "answerA", "answerB", "answerC", first=1)
_arc = _asked("Question: {question}\nAnswer:", "choices")
"""Reads arc_easy and arc_challenge; the paper skips questions without four choices."""


def _copa(record: Record) -> ChoiceQuestion:
    """Reads copa; the harness puts two blanks before a choice."""
    words = {"cause": "because", "effect": "therefore"}
    if (asked := text_in(record, "question")) not in words:
        raise TaskError(f"field 'question' is {asked!r}; it must be cause or effect")
    choices = [text_in(record, key) for key in ("choice1", "choice2")]
    lowered = [f" {choice[:1].lower()}{choice[1:]}" for choice in choices]
    context = f"{text_in(record, 'premise').strip()[:-1]} {words[asked]}"
    return after(context, lowered, number_in(record, "label", below=2))


def _boolq(record: Record) -> ChoiceQuestion:
    """Reads boolq: no against yes; the hub has a number `label` for `answer`."""
    context = _asked("{passage}\nQuestion: {question}?\nAnswer:", "words")
    label = record.get("label", record.get("answer"))
    if label not in (0, 1):
        raise TaskError(f"field 'answer' is {label!r}; it must be true or false")
    return context({**record, "words": ["no", "yes"], "label": int(label)})


def _winogrande(record: Record) -> ChoiceQuestion:
    """Reads winogrande: the end of a sentence after each of its beginnings."""
    before, blank, rest = text_in(record, "sentence").partition("_")
    if not blank:
        raise TaskError("field 'sentence' has no _")
    options = [
        Option(before + text_in(record, key), f" {rest.strip()}") for key in ("option1", "option2")
    ]
    return ChoiceQuestion(tuple(options), number_in(record, "answer", below=2, first=1))


def _wsc273(record: Record) -> ChoiceQuestion:
    """Reads wsc273; the harness puts a blank before what follows the pronoun, also before a blank."""
    rest, contexts = text_in(record, "continuation"), texts_in(record, "context_options", least=2)
    if rest[:1] != " ":  # as in files, which lack the text's own blank, too
        rest = f"  {rest}" if rest[:1].isalnum() or rest[:1] == '"' else f" {rest}"
    options = tuple(Option(context, rest) for context in contexts)
    return ChoiceQuestion(options, number_in(record, "gold", below=len(options)))


TASKS: dict[str, Task] = {
    "lambada": LastWordTask("LAMBADA, last word", 5153, hub=hub.LAMBADA),
    "blimp": ChoiceTask(
        "BLiMP, grammar", 67_000, _blimp, "sum", harness=_ACC, by_group=True, hub=hub.BLIMP
    ),
    "cbt": ChoiceTask(
        "Children's Book Test", 10_000, _cloze(_detokenised), "mean", (), by_group=True, hub=hub.CBT
    ),
    "cbt_style": ChoiceTask(
        "cloze in the shape of CBT, not CBT", 0, _cloze(str), "mean", (), by_group=True
    ),
    "hellaswag": ChoiceTask("HellaSwag, endings", 10_042, _hellaswag, "mean", hub=hub.HELLASWAG),
    "piqa": ChoiceTask("PIQA, physical tasks", 1838, _piqa, "mean", hub=hub.PIQA),
    "arc_easy": ChoiceTask("ARC-Easy, science", 2376, _arc, "mean", hub=hub.ARC_EASY),
    "arc_challenge": ChoiceTask(
        "ARC-Challenge, science", 1172, _arc, "mean", hub=hub.ARC_CHALLENGE
    ),
    "winogrande": ChoiceTask(
        "WinoGrande, pronouns", 1267, _winogrande, harness=_ACC, hub=hub.WINOGRANDE
    ),
    "copa": ChoiceTask("COPA, cause or effect", 100, _copa, harness=_ACC, hub=hub.COPA),
    "openbookqa": ChoiceTask(
        "OpenBookQA, science", 500, _asked("{question}", "choices"), hub=hub.OPENBOOKQA
    ),
    "boolq": ChoiceTask("BoolQ, yes or no", 3270, _boolq, harness=_ACC, hub=hub.BOOLQ),
    "siqa": ChoiceTask("Social IQa", 1954, _siqa, harness=_ACC, hub=hub.SIQA),
    "wsc273": ChoiceTask("Winograd schemas", 273, _wsc273, harness=_ACC, hub=hub.WSC273),
}

PAPER_TASKS = ("lambada", "blimp", "cbt", "hellaswag", "piqa", "arc_easy")
"""The tasks of the paper's mean."""

STAND_INS = {"cbt": "cbt_style"}
"""Replace a task whose own file is missing."""
