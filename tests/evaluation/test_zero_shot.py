"""`moebius eval --tasks`: reports, and errors for bad input."""

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import zstandard
from bytes_run import train_bytes
from small_model import TINY

from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.evaluation.scoring import Scorer

ARC = [
    {"question": f"What is {n}?", "choices": ["one", "two", "three", "four"], "label": n % 4}
    for n in range(6)
]
RECORDS: Mapping[str, list[dict[str, Any]]] = {
    "lambada": [{"text": f"He saw the {word} and took the {word}"} for word in ("hat", "door")],
    "blimp": [
        {"sentence_good": "She runs.", "sentence_bad": "She run.", "UID": "agreement"},
        {"sentence_good": "He sees her.", "sentence_bad": "He sees she.", "UID": "case"},
    ],
    "cbt_style": [
        {
            "kind": "CN",
            "context": ["A long story, longer than the model has room for, all of it."],
            "question": "The XXXXX was there.",
            "answer": "cat",
            "candidates": ["cat", "dog", "sun", "sea", "man", "hat", "bed", "car", "pen", "cup"],
        }
    ],
    "hellaswag": [
        {"query": "Run: he", "fragment": "he", "endings": ["a.", "bb.", "ccc.", "d."], "label": 2}
    ],
    "piqa": [{"goal": "Boil it.", "sol1": "Use fire.", "sol2": "Use ice.", "label": 0}],
    "arc_easy": ARC,
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with the paper's tasks, a few items each."""
    folder = tmp_path / "eval"
    folder.mkdir()
    for name, records in RECORDS.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        packed = zstandard.compress(text.encode()) if name == "piqa" else text.encode()
        (folder / f"{name}.jsonl{'.zst' if name == 'piqa' else ''}").write_bytes(packed)
    return folder


Command = Callable[..., Any]  # the fixture `moebius`


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def evaluate(moebius: Command, data: Path) -> Command:
    """Runs `moebius eval RUN … --data DATA`."""
    return lambda run_dir, *words: moebius("eval", run_dir, *words, "--data", data)


def test_the_papers_tasks_as_json(bytes_run: Path, evaluate: Command) -> None:
    found = json.loads(evaluate(bytes_run, "--tasks", "paper", "--json").out)
    assert list(found["tasks"]) == list(RECORDS)
    tasks = found["tasks"]
    scores = [task["metrics"]["paper"]["value"] for task in tasks.values()]
    assert found["paper_mean"]["value"] == pytest.approx(sum(scores) / 6)
    assert found["paper_mean_with"] == {"cbt": "cbt_style"}
    assert found["is_subset"]
    assert (found["step"], found["context"], found["draws"]) == (2, 64, 0)
    assert tasks["cbt_style"]["cut"] == 1
    assert tasks["lambada"]["cut"] == 0
    assert tasks["arc_easy"]["items"] == 6
    assert tasks["blimp"]["groups"].keys() == {"agreement", "case"}
    assert tasks["piqa"]["metrics"]["acc"]["stderr"] is None  # of a single item
    assert tasks["lambada"]["metrics"]["perplexity"]["value"] > 1


def test_what_each_item_scored_can_be_kept(
    bytes_run: Path, evaluate: Command, tmp_path: Path
) -> None:
    file = tmp_path / "items.parquet"
    words = ("--tasks", "arc_easy,lambada", "--limit", 3, "--json")
    found = json.loads(evaluate(bytes_run, *words, "--per-item", file).out)
    rows = parquet.read_table(file).to_pylist()
    arc = [row for row in rows if (row["task"], row["metric"]) == ("arc_easy", "acc")]
    assert [row["item"] for row in arc] == [0, 2, 4]  # every second of six
    mean = sum(row["value"] for row in arc) / 3
    assert found["tasks"]["arc_easy"]["metrics"]["acc"]["value"] == pytest.approx(mean)
    words = [row for row in rows if row["metric"] == "perplexity"]
    nats = -sum(row["value"] for row in words) / sum(row["weight"] for row in words)
    perplexity = found["tasks"]["lambada"]["metrics"]["perplexity"]["value"]
    assert perplexity == pytest.approx(math.exp(nats))
    answer = evaluate(bytes_run, "--tasks", "arc_easy", "--per-item", tmp_path / "no" / "file")
    assert (answer.code, "no does not exist" in answer.text) == (2, True)


def test_the_table_says_what_it_is_of(bytes_run: Path, evaluate: Command) -> None:
    answer = evaluate(bytes_run, "--tasks", "paper", "--limit", 3)
    assert answer.code == 0
    for words in (
        "3 of 2,376",
        "Scores are from a subset",
        "The mean uses cbt_style instead of cbt",
        "± ? stands where a task, or one of its groups, has a single item.",
        "1 items were longer than the context",
        "mean of the paper's six",
    ):
        assert words in answer.text


def test_tasks_over_loops_are_those_of_every_number(bytes_run: Path, evaluate: Command) -> None:
    words = "--tasks", "lambada", "--context", 12, "--too-long", "skip"
    table = evaluate(bytes_run, *words, "--loops", "1,3").out
    shown = set()
    for loops in (1, 3):
        found = json.loads(evaluate(bytes_run, *words, "--loops", loops, "--json").out)
        shown.add(f"{found['tasks']['lambada']['metrics']['perplexity']['value']:.4f}")
        [row] = [line.split() for line in table.splitlines() if line.split()[:1] == [str(loops)]]
        assert shown & set(row)
    assert len(shown) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tasks piqa,arc_challenge --data DATA", "task 'arc_challenge' has no file"),
        ("--tasks piqqa --data DATA", r"'piqqa' is not a task; did you mean piqa\?"),
        ("--tasks piqa --limit 0 --data DATA", "must each be at least 1"),
        ("--tasks piqa --context 5 --data DATA", "context of 5 tokens: piqa 1 of 1 items"),
        ("--tasks piqa --context 5 --too-long skip --data DATA", "'piqa': no items are left"),
        ("--tasks , --data DATA", "has no task files"),
        ("--tasks paper --data DATA/none", "is not a folder"),
    ],
)
def test_requests_that_cannot_be(
    arguments: str, message: str, bytes_run: Path, data: Path, moebius: Command
) -> None:
    answer = moebius("eval", bytes_run, *arguments.replace("DATA", str(data)).split())
    assert answer.code == 2
    assert re.search(message, answer.text), answer.text


@pytest.fixture
def long_answers(data: Path) -> Path:
    """Two of five PIQA items and one of seven ARC items have a long answer."""
    piqa = [{"goal": "Go.", "sol1": "a", "sol2": "b" * n, "label": 0} for n in (3, 70, 5, 4, 99)]
    arc = [*ARC, {"question": "?", "choices": ["x" * 80, "b", "c", "d"], "label": 0}]
    for name, records in (("piqa", piqa), ("arc_easy", arc)):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return data


@pytest.mark.usefixtures("long_answers")
def test_all_answers_that_are_too_long_are_told_before_anything_is_scored(
    bytes_run: Path, evaluate: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scorer, "score", lambda *_, **__: pytest.fail("began to score"))
    answer = evaluate(bytes_run, "--tasks", "paper")
    assert answer.code == 2
    for message in (
        r"piqa 2 of 5 items, the longest of 100 tokens \(\S+, byte \d+, line 5\)",
        r"arc_easy 1 of 7 items, the longest of 81 tokens \(\S+, byte \d+, line 7\)",
        "--context 100 if the model",
    ):
        assert re.search(message, answer.text)


@pytest.mark.usefixtures("long_answers")
def test_answers_that_are_too_long_are_left_out_and_counted(
    bytes_run: Path, evaluate: Command
) -> None:
    asked = (bytes_run, "--tasks", "piqa", "--too-long", "skip")
    assert "PIQA, physical tasks: 2 items were skipped" in evaluate(*asked).text
    found = json.loads(evaluate(*asked, "--json").out)
    piqa = found["tasks"]["piqa"]
    assert found["too_long"] == "skip"
    assert (piqa["items"], piqa["available"], piqa["metrics"]["acc"]["count"]) == (3, 5, 3)
    assert piqa["skipped"] == 2


def test_a_context_beyond_the_learned_positions(
    mixture_folder: Path, tmp_path: Path, evaluate: Command
) -> None:
    positions = {"attention.positions": {"kind": "learned", "max_positions": 64}}
    run_dir = train_bytes(mixture_folder, tmp_path / "run", TINY.changed(positions))
    asked = (run_dir, "--tasks", "piqa", "--context")
    assert "--context 65 exceeds the model's 64 learned positions" in evaluate(*asked, 65).text
    assert evaluate(*asked, 64).code == 0


SPOILED = {
    "a field that is missing": (b'{"goal": "a"}\n', r"line 1: field 'sol1' is missing"),
    "a half line": (b'\n\n{"goal": ', r"line 3: not valid JSON"),
    "nothing": (b"\n", "task 'piqa' has no items"),
    "half a surrogate": (
        b'{"goal": "\\ud800", "sol1": "a", "sol2": "b", "label": 0}\n',
        r"line 1: a text is not valid Unicode",
    ),
}


@pytest.mark.parametrize("mistake", SPOILED)
def test_files_that_are_damaged(
    mistake: str, bytes_run: Path, data: Path, evaluate: Command
) -> None:
    content, message = SPOILED[mistake]
    (data / "piqa.jsonl").write_bytes(content)
    answer = evaluate(bytes_run, "--tasks", "piqa")
    assert answer.code == 2
    assert re.search(message, answer.text), answer.text


def test_a_mixture_is_drawn_several_times(
    mixture_folder: Path, tmp_path: Path, evaluate: Command
) -> None:
    router = {"kind": "mixture_of_tokens", "sequences_per_group": 2}
    model = TINY.changed({"feed_forward.router": router, "norm": "pre", "attention.kind": "dense"})
    run_dir = train_bytes(mixture_folder, tmp_path / "run", model)
    asked = (run_dir, "--tasks", "arc_easy,lambada", "--draws", 3)
    first, other = (json.loads(evaluate(*asked, "--seed", seed, "--json").out) for seed in (0, 1))
    assert first["draws"] == 3
    assert first["tasks"] != other["tasks"]
    assert first["tasks"]["lambada"]["metrics"]["perplexity"]["spread"]
    answer = evaluate(*asked)
    assert re.search(r"perplexity \S+ ± \S+ \(draws ± \S+\)", answer.text), answer.text
    assert "3 draws from seed 0" in answer.text


def test_a_packed_file_that_ends_too_early(bytes_run: Path, data: Path, evaluate: Command) -> None:
    path = data / "piqa.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-5])
    answer = evaluate(bytes_run, "--tasks", "piqa")
    assert answer.code == 2
    assert "piqa.jsonl.zst" in answer.text


def test_a_folder_that_was_prepared_for_another_vocabulary(
    bytes_run: Path, tmp_path: Path, evaluate: Command
) -> None:
    words = " ".join(f"word{n} other{n * 7}" for n in range(900))
    (tmp_path / "text.txt").write_text(words, encoding="utf-8")
    text = (str(tmp_path / "text.txt"),)
    other = PrepareConfig(input=text, tokenizer="bpe", vocab_size=400, validation_fraction=0.2)
    prepare(other, tmp_path / "shards")
    shutil.copytree(bytes_run, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["data"]["directory"] = str(tmp_path / "shards")
    path.write_text(json.dumps(config))
    answer = evaluate(tmp_path / "run", "--tasks", "piqa")
    assert answer.code == 2
    assert "was prepared with another tokenizer (" in answer.text
