"""A function's records are input like any other, by split and in any process; every mistake is one clear
error.
"""

import pytest
from meddling import files_of
from small_corpus import documents_by_split

from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.make.pools import LocalPool
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.plugins import PluginError

FUNCTIONS = """
import random

def texts():
    yield from ("one", "two")

def records():
    return [{"text": "a", "source": "mail", "id": 1}, {"text": "b", "id": 2}]

def pages(split_index, num_splits):
    for number in range(split_index, 10, num_splits):
        yield f"page {number} of split {split_index}"
pages.num_splits = 3

class Archive:
    num_splits = 2
    def __call__(self, split_index, num_splits):
        return [str(split_index)]
archive = Archive()

def some(first, language="en", share=1.0):
    return [f"{first + 1} {language} {share / 2}"]

def shares(split_index, num_splits, *, text):
    return [f"{text} {split_index}"]
shares.num_splits = 2

def breaks():
    yield "fine"
    raise KeyError("lost")

def surrogates():
    return ["half \\ud83d"]

def numbers():
    yield "fine"
    yield 7

def one_text():
    return "not a list"

def nothing():
    pass

def needs_splits(split_index, num_splits):
    return []

def takes_nothing():
    return []
takes_nothing.num_splits = 2

def too_many(split_index, num_splits):
    return []
too_many.num_splits = 0

def changes():
    return [str(random.random())]

not_a_function = 3
"""
MODULE = "texts_of_a_test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the module above, from which workers can also import."""
    path = tmp_path_factory.mktemp("module")
    (path / f"{MODULE}.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path))
        yield path


def _config(name, **options):
    values = {"tokenizer": "bytes", "validation_fraction": 0.0}
    return PrepareConfig(input=(f"python:{MODULE}:{name}",), **values | options)


def _read(name, **options):
    found = documents_by_split(f"python:{MODULE}:{name}", **options)
    return [[(one.text, one.source, one.record_id) for one in split] for split in found]


@pytest.mark.usefixtures("folder")
def test_texts_and_dicts_are_records():
    name = f"{MODULE}:texts"
    assert _read("texts") == [[("one", name, ""), ("two", name, "")]]
    found = _read("records", id_field="id")
    assert found == [[("a", "mail", "1"), ("b", f"{MODULE}:records", "2")]]


@pytest.mark.usefixtures("folder")
def test_a_function_that_declares_splits_is_called_for_each():
    pages = _read("pages")
    assert [len(split) for split in pages] == [4, 3, 3]
    assert [text for text, *_ in pages[1]] == [f"page {n} of split 1" for n in (1, 4, 7)]
    assert [[text for text, *_ in split] for split in _read("archive")] == [["0"], ["1"]]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("breaks", r"breaks\[0:1\], record 1: the function raised KeyError: 'lost'"),
        (
            "numbers",
            r"numbers\[0:1\], record 1: an int \(7\): a record must be a string, or a dict",
        ),
        ("surrogates", r"record 0: not Unicode .half a surrogate pair"),
        ("one_text", r"one_text' returned a str, not an iterable of strings or dicts"),
        ("nothing", r"nothing' returned a NoneType, not an iterable"),
        ("needs_splits", r"is called with nothing, but .*needs_splits.num_splits = 64"),
        ("takes_nothing", r"is called with split_index and num_splits, but it takes \(\)"),
        ("too_many", r"declares num_splits=0: it must be a whole number from 1 to 100,000"),
        ("not_there", r"texts_of_a_test has no 'not_there'"),
        ("not_a_function", r"not_a_function is an int \(3\): it must be a function"),
        ("", r"write python:package.module:function"),
    ],
)
def test_a_function_that_cannot_be_used_is_one_clear_error(name, message):
    with pytest.raises((InputError, PluginError), match=message):
        _read(name)


@pytest.mark.usefixtures("folder")
def test_settings_that_follow_a_name_reach_the_function():
    [[(text, source, _)]] = _read("some?first=2&language=de&share=0.5")
    assert (text, source) == ("3 de 0.25", f"{MODULE}:some?first=2&language=de&share=0.5")
    assert [[text for text, *_ in split] for split in _read("shares?text=x")] == [["x 0"], ["x 1"]]
    hashes = {_config(name).spec_hash for name in ("some?first=2", "some?first=3")}
    assert len(hashes) == 2  # other settings mean other data


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("some?", r"what follows the question mark is '': write each setting once"),
        ("some?first", r"write each setting once, as function\?name=value&name=value"),
        ("some?first=1&first=2", "write each setting once"),
        ("some?2=1", "write each setting once"),
        (
            "some?second=2",
            r"is called with second \(of its name\) and nothing, but it takes \(first",
        ),
        ("shares?txt=2", r"is called with txt \(of its name\) and split_index and num_splits"),
    ],
)
def test_settings_that_a_function_does_not_take_are_one_clear_error(name, message):
    with pytest.raises((InputError, PluginError), match=message):
        _read(name)


@pytest.mark.usefixtures("folder")
def test_a_text_where_fields_are_asked_for():
    with pytest.raises(
        InputError, match="record 0: a string, but the source needs a dict with the fields 'q', 'a'"
    ):
        _read("texts", prompt_field="q", answer_field="a")


@pytest.mark.usefixtures("folder")
def test_a_function_that_gives_something_else_each_time(tmp_path):
    with pytest.raises(
        InputError, match=r"has changed.*functions that always give the same records"
    ):
        prepare(_config("changes"), tmp_path / "d")


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_processes_give_the_same_bytes(tmp_path):
    prepare(_config("pages"), tmp_path / "one")
    with LocalPool(2) as pool:
        prepare(_config("pages"), tmp_path / "two", pool=pool)
        with pytest.raises(InputError, match="record 1: the function raised KeyError: 'lost'"):
            prepare(_config("breaks"), tmp_path / "three", pool=pool)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
