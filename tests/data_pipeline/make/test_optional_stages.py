"""The optional stages inside a preparation: what they drop, on any number of workers."""

import json
import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from moebius.data_pipeline.errors import InputError, PrepareError
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.manifest import read_manifest
from moebius.data_pipeline.prepare_config import PrepareConfig

ITEM = "which of the seven rivers that flow past the old mill carries most of the snow in april"
needs_rensa = pytest.mark.skipif(
    find_spec("rensa") is None, reason="rensa is not installed (extra dedup)"
)


def prose(seed: int, num_words: int = 120) -> str:
    rng = random.Random(seed)
    return " ".join(
        rng.choice(("the", "of", "and")) if n % 3 == 0 else f"w{rng.randrange(10**6)}"
        for n in range(num_words)
    )


@pytest.fixture
def corpus(tmp_path) -> dict[str, object]:
    """Two files with planted documents; returns what `PrepareConfig` needs."""
    kept = [prose(seed) for seed in range(20)]
    planted = [
        "too short",
        f"{prose(100)} {ITEM} {prose(101)}",
        f"{kept[3]} and a last remark",
        "le chat " + prose(102),
        "buy now " * 60,
    ]
    for name, texts in (("a", kept[:10] + planted[:2]), ("b", planted[2:] + kept[10:])):
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": ITEM, "label": 1}) + "\n")
    return {"input": [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], "tokenizer": "bytes"}


def dropped(folder: Path, values: dict) -> dict[str, int]:
    prepare(PrepareConfig.model_validate(values), folder)
    manifest = read_manifest(folder)
    total = manifest.num_documents("train") + manifest.num_documents("validation")
    assert total + sum(manifest.dropped.values()) == 25
    return manifest.dropped


def test_nothing_is_dropped_unless_asked_for(corpus, tmp_path):
    assert dropped(tmp_path / "data", corpus) == {}


def test_filters_drop_what_they_name(corpus, tmp_path):
    values = corpus | {"filters": {"min_words": 50, "repetition": True}}
    assert dropped(tmp_path / "data", values) == {
        "length: too few words": 1,
        "repetition: the most frequent 2-gram": 1,
    }


def test_contaminated_documents_are_dropped_and_the_set_is_named(corpus, tmp_path):
    sets = {"evaluation_sets": [str(tmp_path / "questions.jsonl")]}
    values = corpus | {"decontaminate": sets}
    assert dropped(tmp_path / "data", values) == {"evaluation set: questions": 1}


@needs_rensa
def test_of_near_duplicates_the_first_stays(corpus, tmp_path):
    values = corpus | {"near_duplicates": {}}
    assert dropped(tmp_path / "data", values) == {"near duplicate": 1}


def test_the_language_hook_decides(corpus, tmp_path, monkeypatch):
    (tmp_path / "languages_of_a_test.py").write_text(
        "def language(text):\n    return 'fr' if text.startswith('le ') else 'en'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = {"function": "languages_of_a_test:language", "allow": ["en"]}
    assert dropped(tmp_path / "data", corpus | {"language": asked}) == {"language: fr": 1}


def test_a_hook_that_is_not_there_is_told_before_anything_is_made(corpus, tmp_path):
    asked = {"function": "not_there_at_all:language", "allow": ["en"]}
    with pytest.raises(InputError, match="no module 'not_there_at_all'"):
        dropped(tmp_path / "data", corpus | {"language": asked})
    assert not list((tmp_path / "data").glob("*.arrow"))


def test_evaluation_sets_that_change_meanwhile_are_noticed(corpus, tmp_path):
    questions = tmp_path / "questions.jsonl"
    values = corpus | {"decontaminate": {"evaluation_sets": [str(questions)]}}
    (tmp_path / "b.jsonl").rename(tmp_path / "away")
    (tmp_path / "b.jsonl").write_text("not JSON\n")
    with pytest.raises(InputError, match="not valid JSON"):
        dropped(tmp_path / "data", values)
    questions.write_text(json.dumps({"question": f"{ITEM} and why"}) + "\n")
    with pytest.raises(PrepareError, match="evaluation sets have changed since"):
        dropped(tmp_path / "data", values)


@needs_rensa
def test_all_stages_together_give_the_same_bytes_again(corpus, tmp_path):
    values = corpus | {
        "filters": {"min_words": 50, "repetition": True},
        "decontaminate": {"evaluation_sets": [str(tmp_path / "questions.jsonl")]},
        "near_duplicates": {},
    }
    for name in ("one", "other"):
        assert sum(dropped(tmp_path / name, values).values()) == 4
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*[!d].*")}
        for name in ("one", "other")
    ]
    names = [name for name in files[0] if not name.startswith("report")]
    assert len(names) > 4
    assert all(files[0][name] == files[1][name] for name in names)
