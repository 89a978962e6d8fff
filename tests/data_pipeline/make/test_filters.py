"""Filters and decontamination drop and count documents; every mistake is one clear error."""

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import small_corpus
from meddling import files_of
from pydantic import ValidationError

from moebius.data_pipeline.errors import InputError, PrepareError
from moebius.data_pipeline.make.filters import document_rules
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.plugins import PluginError

ITEM = "which of the seven rivers that flow past the old mill carries most of the snow in april"
FUNCTIONS = """
def french(text):
    return "language: fr" if text.startswith("le ") else None
def short(text):
    return "short" if len(text) < 20 else None
def breaks(text):
    return 1 / 0
def counts(text):
    return len(text)
def empty(text):
    return ""
class Model:
    def keep(self, text):
        return None
model = Model()
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "filters_of_a_test.py").write_text(FUNCTIONS)
    (tmp_path / "filters_with_a_need.py").write_text("import a_package_that_is_not_there")
    (tmp_path / "filters_that_break.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))


def prose(seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(10**6)}" for _ in range(120))


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, Any]:
    """Returns the `PrepareConfig` of two files with planted documents."""
    kept = [prose(seed) for seed in range(10)]
    planted = ["too short", f"{prose(100)} {ITEM} {prose(101)}", f"le chat {prose(102)}"]
    for name, texts in (("a", kept[:5] + planted[:2]), ("b", planted[2:] + kept[5:])):
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": ITEM, "label": 1}) + "\n")
    return {"input": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], "tokenizer": "bytes"}


def dropped(folder: Path, values: dict[str, Any]) -> dict[str, int]:
    manifest = prepare(PrepareConfig.model_validate(values), folder)
    found = small_corpus.dropped(manifest)
    assert small_corpus.count_of(manifest, "num_documents") + sum(found.values()) == 13
    return found


@pytest.mark.usefixtures("functions")
def test_drops_are_counted_by_reason(corpus: dict[str, Any], tmp_path: Path) -> None:
    assert dropped(tmp_path / "plain", corpus) == {}
    filters = ["filters_of_a_test:french", "filters_of_a_test:short"]
    sets = {"evaluation_sets": [str(tmp_path / "questions.jsonl")]}
    values = corpus | {"filters": filters, "decontaminate": sets}
    expected = {"short": 1, "evaluation set: questions": 1, "language: fr": 1}
    assert dropped(tmp_path / "one", values) == expected
    assert dropped(tmp_path / "other", values) == expected
    assert files_of(tmp_path / "one") == files_of(tmp_path / "other")


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("filters_with_a_need:f", "no module 'a_package_that_is_not_there'"),
        ("filters_that_break:f", "cannot be imported: ZeroDivisionError"),
        ("filters_of_a_test:model.nothing", "has no 'model.nothing'"),
        ("filters_of_a_test:model", "filters_of_a_test:model is a Model .*: it must be a function"),
    ],
)
def test_a_filter_that_is_not_there_is_told_before_anything_is_made(
    path: str, message: str, corpus: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(PluginError, match=message) as caught:
        dropped(tmp_path / "data", corpus | {"filters": [path]})
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert not list((tmp_path / "data").glob("*.arrow"))


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("breaks", "breaks raised ZeroDivisionError .* begins 'sur la table'"),
        ("counts", "counts returned 12 .* begins 'sur la table'"),
        ("empty", "empty returned ''"),
    ],
)
def test_a_filter_that_fails_names_the_document(name: str, message: str, tmp_path: Path) -> None:
    config = PrepareConfig(filters=(f"filters_of_a_test:{name}",))
    (rule,) = document_rules(config, tmp_path)
    with pytest.raises(InputError, match=message):
        rule("sur la table")


def test_what_is_no_path_is_refused_at_once() -> None:
    for path in ("", "module", "module:", ":function", "a b:c", "a.:b", "a:b()"):
        with pytest.raises(ValidationError, match=r"write package\.module:function"):
            PrepareConfig(filters=(path,))


def test_evaluation_sets_that_change_meanwhile_are_noticed(
    corpus: dict[str, Any], tmp_path: Path
) -> None:
    questions = tmp_path / "questions.jsonl"
    values = corpus | {"decontaminate": {"evaluation_sets": [str(questions)]}}
    (tmp_path / "b.jsonl").write_text("not JSON\n")
    with pytest.raises(InputError, match="not valid JSON"):
        dropped(tmp_path / "data", values)
    questions.write_text(json.dumps({"question": f"{ITEM} and why"}) + "\n")
    with pytest.raises(PrepareError, match="evaluation sets have changed since"):
        dropped(tmp_path / "data", values)


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("length", "a few words", "length: too few words"),
        ("length", "one two three " * 30, None),
        ("quality", "of the #### #### #### and to", "quality: symbols"),
        ("quality", "1 22 333 4444 of the people", "quality: words without letters"),
        ("quality", "voici une phrase sans rien", "quality: too few stop words"),
        ("quality", "the people of that town have to be with us", None),
        ("repetition", "buy now " * 50, "repetition: the most frequent pair of words"),
        ("repetition", "same line\n" * 9, "repetition: lines"),
        ("repetition", prose(1), None),
    ],
)
def test_the_filters_of_the_example(
    name: str, text: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    (rule,) = document_rules(PrepareConfig(filters=(f"filter_documents:{name}",)), tmp_path)
    assert rule(text) == reason
