"""`moebius eval --tasks`: reports, and what is said of bad input."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import zstandard
from bytes_run import train_bytes
from small_model import TINY

from moebius.cli.main import main
from moebius.cli.models.evaluate_report import plain_report, render_report
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.evaluation.scoring import Scorer
from moebius.evaluation.zero_shot import measure_tasks

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


def run(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code, and everything printed with line breaks folded."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    assert "Traceback" not in err
    return int(ended.value.code or 0), re.sub(r"\s+", " ", out + err)


def test_the_papers_tasks_as_json(
    bytes_run: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(bytes_run), "--tasks", "paper", "--data", str(data), "--json"])
    assert ended.value.code == 0
    found = json.loads(capfd.readouterr().out)
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


def test_the_table_says_what_it_is_of(
    bytes_run: Path,
    data: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, said = run(capfd, "eval", bytes_run, "--tasks", "paper", "--data", data, "--limit", 3)
    assert code == 0
    assert "3 of 2,376" in said
    assert "Scores are of a subset" in said
    assert "The mean has cbt_style in place of cbt" in said
    assert "1 items were longer than the context" in said
    assert "mean of the paper's six" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "piqa,arc_challenge"], "task 'arc_challenge' has no file"),
        (["--tasks", "piqqa"], r"unknown task 'piqqa'; did you mean piqa\?"),
        (["--tasks", "piqa", "--limit", "0"], "at least 1 is needed"),
        (
            ["--tasks", "piqa", "--context", "5"],
            "the context has 5 tokens, and items have longer answers: piqa 1 of 1 items",
        ),
        (["--tasks", ","], "holds no file of a task"),
        (["--limit", "3"], "goes with --tasks"),
        (["--too-long", "skip"], "--too-long goes with --tasks"),
    ],
)
def test_requests_that_cannot_be(
    arguments: list[str],
    message: str,
    bytes_run: Path,
    data: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = [] if "--tasks" not in arguments else ["--data", str(data)]
    code, said = run(capfd, "eval", bytes_run, *arguments, *given)
    assert code == 2
    assert re.search(message, said), said


@pytest.fixture
def long_answers(data: Path) -> Path:
    """The same folder; two of five PIQA items and one of seven ARC items have a long answer."""
    piqa = [{"goal": "Go.", "sol1": "a", "sol2": "b" * n, "label": 0} for n in (3, 70, 5, 4, 99)]
    arc = [*ARC, {"question": "?", "choices": ["x" * 80, "b", "c", "d"], "label": 0}]
    for name, records in (("piqa", piqa), ("arc_easy", arc)):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return data


def test_all_answers_that_are_too_long_are_told_before_anything_is_scored(
    bytes_run: Path,
    long_answers: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Scorer, "score", lambda *_, **__: pytest.fail("began to score"))
    code, said = run(capfd, "eval", bytes_run, "--tasks", "paper", "--data", long_answers)
    assert code == 2
    assert "the context has 64 tokens, and items have longer answers: " in said
    assert re.search(r"piqa 2 of 5 items, the longest of 100 tokens \(\S+: line 5\); arc", said)
    assert re.search(r"arc_easy 1 of 7 items, the longest of 81 tokens \(\S+: line 7\)\. ", said)
    assert "--too-long skip leaves them out" in said
    assert "--context 100 makes room" in said


@pytest.mark.parametrize(
    ("how", "items", "note"),
    [
        ("skip", 3, "PIQA, physical tasks: 2 items were skipped: an answer is longer"),
        ("truncate", 5, "PIQA, physical tasks: 2 items have an answer longer than the context"),
    ],
)
def test_answers_that_are_too_long_are_left_out_or_cut_and_counted(
    how: str,
    items: int,
    note: str,
    bytes_run: Path,
    long_answers: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    asked = ("eval", bytes_run, "--tasks", "piqa", "--data", long_answers, "--too-long", how)
    code, said = run(capfd, *asked)
    assert (code, note in said) == (0, True), said
    code, said = run(capfd, *asked, "--json")
    assert code == 0
    found = json.loads(said)
    piqa = found["tasks"]["piqa"]
    assert found["too_long"] == how
    assert (piqa["items"], piqa["available"], piqa["metrics"]["acc"]["count"]) == (items, 5, items)
    assert (piqa["skipped"], piqa["truncated"]) == ((2, 0) if how == "skip" else (0, 2))


def test_a_task_of_which_nothing_is_left(
    bytes_run: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ("--context", 5, "--too-long", "skip")
    code, said = run(capfd, "eval", bytes_run, "--tasks", "piqa", "--data", data, *asked)
    assert code == 2
    assert "task 'piqa': nothing is left, for the answers of all 1 items are longer" in said


def test_a_context_beyond_the_learned_positions(
    mixture_folder: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    positions = {"attention.positions": {"kind": "learned", "max_positions": 64}}
    run_dir = train_bytes(mixture_folder, tmp_path / "run", TINY.changed(positions))
    asked = ("eval", run_dir, "--tasks", "piqa", "--data", data, "--context")
    code, said = run(capfd, *asked, 65)
    assert code == 2
    assert "--context 65 is more than the 64 positions that the model has learned" in said
    assert run(capfd, *asked, 64)[0] == 0


def test_no_folder_and_none_that_is_there(
    bytes_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, said = run(capfd, "eval", bytes_run, "--tasks", "paper")
    assert (code, "--tasks needs --data" in said) == (2, True)
    code, said = run(capfd, "eval", bytes_run, "--tasks", "paper", "--data", tmp_path / "none")
    assert (code, "is no folder" in said) == (2, True)


SPOILED = {
    "a field that is missing": (b'{"goal": "a"}\n', r"line 1: field 'sol1' is missing"),
    "a half line": (b'\n\n{"goal": ', r"line 3: not valid JSON"),
    "a list": (b"[1]\n", r"line 1: a JSON list; each line must be one JSON object"),
    "no UTF-8": (b'{"goal": "\xff"}\n', "not UTF-8"),
    "nothing": (b"\n", "task 'piqa' has no items"),
    "half a surrogate": (
        b'{"goal": "\\ud800", "sol1": "a", "sol2": "b", "label": 0}\n',
        r"line 1: a text is no Unicode",
    ),
}


@pytest.mark.parametrize("mistake", SPOILED)
def test_files_that_are_damaged(
    mistake: str, bytes_run: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    content, message = SPOILED[mistake]
    (data / "piqa.jsonl").write_bytes(content)
    code, said = run(capfd, "eval", bytes_run, "--tasks", "piqa", "--data", data)
    assert code == 2
    assert re.search(message, said), said


def test_a_packed_file_that_ends_too_early(
    bytes_run: Path, data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = data / "piqa.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-5])
    code, said = run(capfd, "eval", bytes_run, "--tasks", "piqa", "--data", data)
    assert code == 2
    assert re.search(r"piqa\.jsonl\.zst", said), said


def test_a_folder_that_was_prepared_for_another_vocabulary(
    bytes_run: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = " ".join(f"word{n} other{n * 7}" for n in range(900))
    (tmp_path / "text.txt").write_text(words, encoding="utf-8")
    other = PrepareConfig(
        input=(str(tmp_path / "text.txt"),),
        tokenizer="bpe",
        vocab_size=400,
        validation_fraction=0.2,
    )
    prepare(other, tmp_path / "shards")
    shutil.copytree(bytes_run, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["data"]["directory"] = str(tmp_path / "shards")
    path.write_text(json.dumps(config))
    code, said = run(capfd, "eval", tmp_path / "run", "--tasks", "piqa", "--data", data)
    assert code == 2
    assert re.search(r"has 2\d\d ids, the run was trained with 257", said), said


def test_a_mixture_is_drawn_several_times(
    mixture_folder: Path,
    data: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    router = {"kind": "mixture_of_tokens", "sequences_per_group": 2}
    model = TINY.changed({"feed_forward.router": router, "norm": "pre", "attention.kind": "dense"})
    run_dir = train_bytes(mixture_folder, tmp_path / "run", model)
    first, again, other = (
        measure_tasks(run_dir, ["arc_easy", "lambada"], data, draws=3, seed=seed)
        for seed in (0, 0, 1)
    )
    assert first is not None
    assert again is not None
    assert other is not None
    perplexity = first.tasks[1].metrics["perplexity"]
    assert perplexity.spread
    assert first.tasks == again.tasks != other.tasks
    assert plain_report(first)["draws"] == 3
    assert render_report(first)
    monkeypatch.setenv("COLUMNS", "200")
    code, said = run(capfd, "eval", run_dir, "--tasks", "lambada", "--data", data, "--draws", 2)
    assert code == 0
    assert re.search(r"perplexity \S+ ± \S+ \(draws ± \S+\)", said), said
    assert "2 draws from seed 0" in said
