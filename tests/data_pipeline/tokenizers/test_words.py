"""A word tokenizer has exactly the function's words, in order."""

import pytest

from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.tokenizers.hub import open_tokenizer
from moebius.data_pipeline.tokenizers.tokenizer import load_tokenizer, save_tokenizer
from moebius.plugins import PluginError

MODULE = "words_of_a_test"
FUNCTIONS = """
def words(count=3):
    return [*"abcdefgh"[:count], "none"]
def twice():
    return ["a", "a"]
def blanks():
    return ["a b"]
def text():
    return "abc"
def nothing():
    return []
def fails():
    raise KeyError("lost")
def ends():
    return ["<|end_of_document|>"]
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / f"{MODULE}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_ids_are_the_places_of_the_words_and_the_end_is_last(tmp_path):
    tokenizer = open_tokenizer(f"python:{MODULE}:words?count=4")
    assert [ids.tolist() for ids in tokenizer.encode_batch(["d a  none", "b"])] == [[3, 0, 4], [1]]
    assert (tokenizer.vocab_size, tokenizer.end_of_document_id) == (6, 5)
    assert tokenizer.decode([3, 4, 5]) == "d none"
    save_tokenizer(tmp_path, tokenizer)
    again = load_tokenizer(tmp_path, sha256=tokenizer.sha256)
    assert again.encode_batch(["c"])[0].tolist() == [2]


def test_a_word_that_is_not_there_is_an_error():
    tokenizer = open_tokenizer(f"python:{MODULE}:words")
    for text in ("a x", "<|end_of_document|>"):
        with pytest.raises(InputError, match="check that the tokenizer's words"):
            tokenizer.encode_batch([text])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("twice", "'a' is not a word or is repeated"),
        ("blanks", "'a b' is not a word"),
        ("text", "returned 'abc': it must return a list of words"),
        ("nothing", "returned 0 words: give at least one"),
        ("ends", "give at least one, and not '<|end_of_document|>'"),
        ("fails", "the function raised KeyError: 'lost'"),
        ("words?number=4", "the function raised TypeError"),
        ("not_there", "has no 'not_there'"),
    ],
)
def test_what_gives_no_words_is_one_clear_error(name, message):
    with pytest.raises((InputError, PluginError), match=message):
        open_tokenizer(f"python:{MODULE}:{name}")
