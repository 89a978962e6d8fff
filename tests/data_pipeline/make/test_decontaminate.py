"""Text that shares n words with an evaluation item is found, and its set is named."""

import gzip
import io
import json
import random
from itertools import islice
from pathlib import Path

import pytest
import zstandard
from shared import shared_folder

from moebius.data_pipeline.errors import InputError, ShardError
from moebius.data_pipeline.make.decontaminate import EvaluationIndex, build_index, load_index
from moebius.data_pipeline.prepare_config import DecontaminateConfig

QUESTION = (
    "If a train leaves the station at Oxley at nine and walks uphill for an hour, who pays the "
    "fare of its second driver?"
)
STORY = "It was, as everyone in the valley had said it would be, the coldest winter in forty years."


def random_words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(10**6)}" for _ in range(count))


def write_set(path: Path, records: list) -> str:
    data = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(zstandard.compress(data) if path.suffix == ".zst" else data)
    return str(path)


@pytest.fixture
def index(tmp_path) -> EvaluationIndex:
    riddles = [
        {"id": 7, "question": random_words(1, 30), "choices": [random_words(2, 5)], "label": 0},
        {"id": 8, "question": QUESTION, "choices": ["nobody", "the first driver"], "label": 1},
        {"id": 9, "question": "Too short to be looked for?", "choices": [], "label": 1},
    ]
    return build_index(
        DecontaminateConfig(
            evaluation_sets=(
                write_set(tmp_path / "riddles.jsonl", riddles),
                write_set(tmp_path / "stories.jsonl.zst", [{"text": STORY}, {"text": STORY}]),
            )
        )
    )


def planted(text: str) -> str:
    return f"{random_words(3, 300)}\n\n{text}\n\n{random_words(4, 300)}"


@pytest.mark.parametrize(
    "printed",
    [
        QUESTION,
        QUESTION.upper(),
        QUESTION.replace(" ", "\n"),
        "“" + QUESTION.replace(",", " —") + "”",
        " ".join(QUESTION.split()[5:18]),
    ],
)
def test_a_planted_item_is_found_however_it_is_printed(index, printed):
    assert index.find(planted(printed)) == "riddles"


def test_the_set_of_the_first_shared_words_is_named(index):
    assert index.find(STORY) == "stories"
    assert index.find(f"{QUESTION} {STORY}") == "riddles"
    assert index.find(f"{STORY} {QUESTION}") == "stories"


def test_twelve_words_are_not_enough_and_thirteen_are(index):
    words = QUESTION.split()
    for start in range(len(words) - 13):
        assert index.find(planted(" ".join(words[start : start + 12]))) is None
        assert index.find(planted(" ".join(words[start : start + 13]))) is not None


def test_a_question_is_found_together_with_its_first_answer(index):
    assert index.find(planted("the fare of its second driver? Nobody: the first driver")) is None
    across = "for an hour, who pays the fare of its second driver? Nobody. The"
    assert index.find(planted(across)) is not None


def test_other_text_is_not_found(index):
    assert index.find("") is None
    assert index.find("Too short to be looked for?") is None
    assert index.find(random_words(5, 5000)) is None


def test_named_fields_alone_count(tmp_path):
    path = write_set(tmp_path / "set.jsonl", [{"a": QUESTION, "b": {"c": [STORY, 3]}}])
    config = DecontaminateConfig(evaluation_sets=(path,), fields=("b",))
    index = build_index(config)
    assert index.find(QUESTION) is None
    assert index.find(STORY) is not None
    with pytest.raises(InputError, match="no field 'text'; its fields are 'a', 'b'"):
        build_index(DecontaminateConfig(evaluation_sets=(path,), fields=("text",)))


def test_a_saved_index_finds_the_same(index, tmp_path):
    path = tmp_path / "index.arrow"
    with open(path, "wb") as file:
        index.save(file)
    again = load_index(path)
    for text in (planted(QUESTION), STORY, random_words(5, 500)):
        assert again.find(text) == index.find(text)
    assert again.sets == index.sets == ("riddles", "stories")
    one, other = io.BytesIO(), io.BytesIO()
    index.save(one)
    again.save(other)
    assert one.getvalue() == other.getvalue() == path.read_bytes()


def test_what_is_no_index_is_refused(tmp_path):
    for data in (b"", b"no index" * 20):
        (tmp_path / "index").write_bytes(data)
        with pytest.raises(ShardError, match="is not an evaluation index"):
            load_index(tmp_path / "index")
    with pytest.raises(ShardError, match="is not an evaluation index"):
        load_index(tmp_path / "missing")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("missing.jsonl", None, "cannot be read .No such file"),
        ("set.txt", b"text", "has an unknown suffix"),
        ("set.jsonl", b"", "holds no items"),
        ("set.jsonl", b"{}\n{", "line 2: not valid JSON"),
        ("set.jsonl", b"[1]", "line 1: a JSON list"),
        ("set.jsonl", b'{"a": "few words"}', "no item of .* has 13 words: lower"),
        ("set.jsonl.zst", gzip.compress(b"{}", mtime=0), "holds gzip data: name it "),
    ],
)
def test_a_set_that_cannot_be_read_is_one_clear_error(name, data, message, tmp_path):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message):
        build_index(DecontaminateConfig(evaluation_sets=(str(tmp_path / name),)))


@pytest.mark.needs_shared
def test_the_corpus_holds_none_of_the_evaluation_sets():
    """The corpus's makers removed text that shares 13 words, which is an independent check."""
    folder = shared_folder()
    sets = ("arc_easy", "lambada", "piqa", "wsc273", "openbookqa", "siqa")
    paths = tuple(str(folder / f"data/eval/{name}.jsonl.zst") for name in sets)
    index = build_index(DecontaminateConfig(evaluation_sets=paths))
    with zstandard.open(folder / "data/corpus/train-00.jsonl.zst", "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in islice(file, 500)]
    assert not any(map(index.find, texts))
    with zstandard.open(paths[1], "rt", encoding="utf-8") as file:
        passage = json.loads(next(file))["text"]
    assert index.find(f"{texts[0]}\n{passage}\n{texts[1]}") == "lambada"
