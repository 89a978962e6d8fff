"""Scores of every task, against sums by hand over a table of bytes."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shared import shared_folder
from table_model import random_table, summed, table_model

from moebius.data_pipeline.tokenizers.raw_bytes import BytesTokenizer
from moebius.evaluation.scoring import RowScore, Scorer
from moebius.evaluation.tasks.items import read_items, read_records
from moebius.evaluation.tasks.table import PAPER_TASKS, TASKS
from moebius.evaluation.tasks.task import Encoder, Judgement, Question, TaskError, TaskMetric
from moebius.evaluation.zero_shot import chosen_tasks, estimate, judge
from moebius.plugins import PluginError

TABLE = random_table(257, seed=4)
MODEL = table_model(TABLE)


def ask(name: str, record: Mapping[str, Any], *, context: int = 400) -> dict[str, float]:
    """Returns one item's contribution to the metrics of its task."""
    question = TASKS[name].question(record, Encoder(BytesTokenizer(), context))
    [scores] = Scorer(MODEL).score([question.rows])
    return {name: found.value for name, found in question.judge(scores).items()}


def logp(before: str, scored: str) -> float:
    return summed(TABLE, before, scored)


def best(values: list[float], answer: int) -> float:
    """1 if the answer beats all others."""
    return float(all(values[answer] > v for n, v in enumerate(values) if n != answer))


CHOICES = ["a tundra", "the marsh!", "plains", "some desert"]


@pytest.mark.parametrize("answer", range(4))
def test_science_questions(answer: int) -> None:
    record = {"question": "Where is fog?", "choices": CHOICES, "label": answer}
    before = "Question: Where is fog?\nAnswer:"
    sums = [logp(before, f" {choice}") for choice in CHOICES]
    per_token = [total / (len(choice) + 1) for total, choice in zip(sums, CHOICES, strict=True)]
    per_letter = [total / len(choice) for total, choice in zip(sums, CHOICES, strict=True)]
    expected = {
        "paper": best(per_token, answer),
        "acc": best(sums, answer),
        "acc_norm": best(per_letter, answer),
    }
    assert ask("arc_easy", record) == ask("arc_challenge", record) == expected
    three = {**record, "choices": CHOICES[:3], "label": min(answer, 2)}
    assert set(ask("arc_easy", three)) == {"acc", "acc_norm"}  # the paper skips it


@pytest.mark.parametrize("answer", range(2))
def test_physical_tasks(answer: int) -> None:
    record = {"goal": " Boil an egg. ", "sol1": "Use water.", "sol2": "Use a bed", "label": answer}
    solutions = ["Use water.", "Use a bed"]
    paper = [
        logp("Question: Boil an egg.\nAnswer:", f" {text}") / (len(text) + 1) for text in solutions
    ]
    harness = [logp("Question:  Boil an egg. \nAnswer:", f" {text}") for text in solutions]
    found = ask("piqa", record)
    assert found["paper"] == best(paper, answer)
    assert found["acc"] == best(harness, answer)
    norm = [total / len(text) for total, text in zip(harness, solutions, strict=True)]
    assert found["acc_norm"] == best(norm, answer)


def test_grammar_is_scored_without_and_with_something_before_it() -> None:
    good, bad = "Who left?", "Who leave?"
    for one, other in ((good, bad), (bad, good)):
        record = {"sentence_good": one, "sentence_bad": other, "UID": "agreement"}
        plain = [logp(text[0], text[1:]) for text in (one, other)]
        prefixed = [logp("", f" {text}") for text in (one, other)]
        assert ask("blimp", record) == {"paper": best(plain, 0), "acc": best(prefixed, 0)}
    same = {"sentence_good": good, "sentence_bad": good, "UID": "none"}
    assert ask("blimp", same) == {"paper": 0.0, "acc": 1.0}  # a tie is not better; the first wins


def test_the_last_word_is_read_from_its_last_places() -> None:
    text = "we met Zoe"
    leads = random_table(257)
    for here, after in zip(text.encode(), text.encode()[1:], strict=False):
        leads[here, after] = 50.0  # every byte leads to the next, and "e" to a blank
    leads[ord("e"), ord(" ")] = 60.0
    other = leads.clone()
    other[ord("o"), ord("y")] = 70.0
    for table, is_right in ((leads, 1.0), (other, 0.0)):
        table = table.log_softmax(-1)
        question = TASKS["lambada"].question({"text": text}, Encoder(BytesTokenizer(), 99))
        [scores] = Scorer(table_model(table)).score([question.rows])
        found = question.judge(scores)
        assert found["paper"].value == found["acc"].value == is_right
        assert found["perplexity"].value == pytest.approx(summed(table, "we met", " Zoe"))


def test_the_conventions_of_the_last_word_differ() -> None:
    """The paper reads as many tokens as the word has characters, and drops text before a blank.

    Here the word has fewer tokens than characters.
    """

    class Pairs(BytesTokenizer):
        """Two bytes form one token if the first is a blank."""

        def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
            return [np.array(self.split(text), dtype=np.uint16) for text in texts]

        def split(self, text: str) -> list[int]:
            words = {" Z": 1, "o": 2, "e": 3, "we": 4, " m": 5, "et": 6}
            return [words[part] for part in re.findall(r" .|we|et|o|e", text)]

        def decode(self, ids: Sequence[int] | np.ndarray) -> str:
            words = {1: " Z", 2: "o", 3: "e", 4: "we", 5: " m", 6: "et", 7: "Zo "}
            return "".join(words[int(n)] for n in ids)

    question = TASKS["lambada"].question({"text": "we met Zoe"}, Encoder(Pairs(), 99))
    assert [row.num_scored for row in question.rows] == [3]
    assert question.rows[0].tokens == (4, 5, 6, 1, 2, 3)
    log_p = np.log([0.5, 0.5, 0.25])
    for said, paper, acc in (((1, 2, 3), 1.0, 1.0), ((7, 1, 3), 0.0, 0.0), ((1, 2, 2), 0.0, 0.0)):
        found = question.judge([RowScore(log_p, np.array(said))])
        assert (found["paper"].value, found["acc"].value) == (paper, acc)
        assert found["perplexity"].value == pytest.approx(np.log(1 / 16))


def test_a_cloze_scores_all_after_the_blank_per_token() -> None:
    words = [f"w{'x' * n}" for n in range(10)]
    asked = {"kind": "CN", "context": ["One .", "Two ,"], "question": "The XXXXX did n't go ."}
    for name, before, rest in (
        ("cbt_style", "One . Two , The", " did n't go ."),
        ("cbt", "One. Two, The", " didn't go."),
    ):
        means = [logp(before, f" {w}{rest}") / len(f" {w}{rest}") for w in words]
        for place, answer in enumerate(words):
            record = asked | {"answer": answer, "candidates": words}
            assert ask(name, record) == {"paper": best(means, place)}
    nine = asked | {"answer": words[3], "candidates": words[:9]}
    assert ask("cbt", nine) == {}  # the paper takes ten


def test_a_task_without_a_convention_of_the_paper_has_the_harness_accuracy_alone() -> None:
    record = {"passage": "It rained.", "question": "is it wet", "answer": False}
    before = "It rained.\nQuestion: is it wet?\nAnswer:"
    sums = [logp(before, f" {word}") for word in ("no", "yes")]
    assert ask("boolq", record) == {"acc": best(sums, 0)}
    for name in ("winogrande", "copa", "boolq", "siqa", "wsc273"):
        assert TASKS[name].metrics == (TaskMetric("acc"),)
    record = {"question": "Fog is at", "choices": CHOICES, "label": 1}
    assert set(ask("openbookqa", record)) == {"acc", "acc_norm"}


def test_the_tokens_that_hellaswag_asks() -> None:
    record = {
        "query": "Roof removal: A man [substeps] sits [title] on a  roof. he",
        "fragment": "he",
        "endings": ["[step]falls.", " jumps  up."],
        "label": 1,
    }
    question = TASKS["hellaswag"].question(record, Encoder(BytesTokenizer(), 400))
    texts = [bytes(row.tokens).decode() for row in question.rows]
    before = "Roof removal: A man sits. on a roof. He"
    assert texts == [f"{before} falls.", f"{before} jumps up."]
    assert [row.num_scored for row in question.rows] == [7, 10]
    sums = [logp(before, " falls."), logp(before, " jumps up.")]
    assert ask("hellaswag", record) == {
        "paper": best([sums[0] / 7, sums[1] / 10], 1),
        "acc": best(sums, 1),
        "acc_norm": best([sums[0] / 6, sums[1] / 9], 1),
    }


def test_long_items_lose_their_left_end_and_are_counted() -> None:
    record = {"question": "x" * 50, "choices": CHOICES, "label": 0}
    question = TASKS["arc_easy"].question(record, Encoder(BytesTokenizer(), 30))
    assert question.is_cut
    assert all(len(row.tokens) == 31 for row in question.rows)
    assert not TASKS["arc_easy"].question(record, Encoder(BytesTokenizer(), 300)).is_cut
    with pytest.raises(TaskError, match="12 tokens to score exceed the context of 11"):
        TASKS["arc_easy"].question(record, Encoder(BytesTokenizer(), 11))


def _arc(**changes: Any) -> dict[str, Any]:
    return {"question": "Why?", "choices": CHOICES, "label": 0, **changes}


def _cbt(**changes: Any) -> dict[str, Any]:
    return {
        "context": ["a"],
        "question": "XXXXX",
        "answer": "b",
        "candidates": ["b", "c"],
    } | changes


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("arc_easy", {"question": "Why?", "choices": CHOICES}, "field 'label' is missing"),
        ("arc_easy", _arc(label=4), "the number of the right answer, 0 to 3"),
        ("arc_easy", _arc(label=True), "the number of the right answer"),
        ("arc_easy", _arc(question=7), "field 'question' is 7; it must be a string"),
        ("arc_easy", _arc(choices="abc"), "a list of at least 2 strings"),
        ("arc_easy", _arc(choices=["a", "b", "c", ""]), "an answer is empty"),
        ("lambada", {"text": "word"}, "no last word"),
        ("lambada", {"text": "ends with "}, "no last word"),
        (
            "hellaswag",
            {"query": "Run: he is", "fragment": "he"},
            "must end with field 'fragment', 'he'",
        ),
        ("winogrande", {"sentence": "It is.", "answer": "1"}, "field 'sentence' has no _"),
        (
            "winogrande",
            {"sentence": "A _.", "option1": "a", "option2": "b", "answer": 0},
            "field 'answer' is 0; it must be the number of the right answer, 1 to 2",
        ),
        ("copa", {"question": "why"}, "'question' is 'why'; it must be cause or effect"),
        ("boolq", {"answer": "yes"}, "field 'answer' is 'yes'; it must be true or false"),
        ("blimp", {"sentence_good": "", "sentence_bad": "a", "UID": "u"}, "0 tokens to score"),
        ("cbt", _cbt(question="no blank"), "has no XXXXX"),
        ("cbt", _cbt(answer="x"), "must contain the answer exactly once"),
    ],
)
def test_records_that_are_none(name: str, record: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        ask(name, record)


def test_estimates_by_hand() -> None:
    def question(value: float, group: str = "") -> Question:
        return Question((), lambda scores: {"m": Judgement(value, 2.0)}, group)

    nothing: list[RowScore] = []
    right = [question(v, g) for v, g in ((1, "a"), (0, "a"), (1, "b"), (1, "b"), (0, "b"))]
    judged = judge(right, [nothing] * 5)
    found = estimate(right, [judged], TaskMetric("m"), drawn=False)
    assert (found.value, found.count, found.spread) == (0.6, 5, None)
    assert found.stderr == pytest.approx(np.std([1, 0, 1, 1, 0], ddof=1) / 5**0.5)
    found = estimate(right, [judged], TaskMetric("m", "mean_of_groups"), drawn=False)
    assert found.value == pytest.approx((1 / 2 + 2 / 3) / 2)
    parts = [np.std([1, 0], ddof=1) / 2**0.5, np.std([1, 1, 0], ddof=1) / 3**0.5]
    assert found.stderr == pytest.approx(np.hypot(parts[0], parts[1]) / 2)
    texts = [question(-3.0), question(-5.0)]
    judged = judge(texts, [nothing] * 2)
    found = estimate(texts, [judged], TaskMetric("m", "perplexity"), drawn=False)
    assert found.value == pytest.approx(np.exp(8 / 4))
    other = judge([question(-4.0), question(-8.0)], [nothing] * 2)
    found = estimate(texts, [judged, other], TaskMetric("m", "perplexity"), drawn=True)
    assert found.value == pytest.approx((np.exp(2) + np.exp(3)) / 2)
    assert found.spread == pytest.approx(np.std(np.exp([2, 3]), ddof=1))
    assert estimate(texts, [judged], TaskMetric("none"), drawn=False).count == 0


def write(folder: Path, name: str, records: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def test_a_limit_takes_items_from_the_whole_file(tmp_path: Path) -> None:
    pairs = [
        {"sentence_good": f"yes {n}", "sentence_bad": "no", "UID": f"u{n // 5}"} for n in range(20)
    ]
    write(tmp_path, "blimp", pairs)
    found = read_items("blimp", TASKS["blimp"], tmp_path, Encoder(BytesTokenizer(), 99), limit=4)
    assert found.available == 20
    assert [question.group for question in found.questions] == ["u0", "u1", "u2", "u3"]


def test_the_papers_six_with_a_stand_in(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="task 'lambada' has no file"):
        chosen_tasks(["paper"], tmp_path)
    for name in (*PAPER_TASKS, "cbt_style"):
        write(tmp_path, name, [{}])
    assert tuple(chosen_tasks(["paper"], tmp_path)) == PAPER_TASKS
    assert set(chosen_tasks(["all"], tmp_path)) == {*PAPER_TASKS, "cbt_style"}
    (tmp_path / "cbt.jsonl").unlink()
    assert "cbt_style" in chosen_tasks(["paper"], tmp_path)
    with pytest.raises(PluginError, match=r"'hellaswg' is not a task; did you mean hellaswag\?"):
        chosen_tasks(["hellaswg"], tmp_path)
    with pytest.raises(TaskError, match="is not a folder"):
        chosen_tasks(["paper"], tmp_path / "none")


@pytest.mark.slow
@pytest.mark.needs_shared
def test_every_file_that_there_is_can_be_asked() -> None:
    data, encoder = shared_folder() / "data" / "eval", Encoder(BytesTokenizer(), 8192)
    for name in sorted(set(TASKS) - {"cbt"}):
        found = read_items(name, TASKS[name], data, encoder, limit=3)
        assert 0 < found.available <= (TASKS[name].published or found.available), name
        assert all(question.rows for question in found.questions)
    records = [record for _, record in read_records(data, "blimp", TASKS["blimp"])]
    assert len({record["UID"] for record in records}) == 67
