"""Tokenizer files that a stranger wrote, damaged in one place each: one error that names it, at once."""

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.files import MAX_BYTES
from moebius.data_pipeline.tokenizers.hub import find_template, open_tokenizer
from moebius.data_pipeline.tokenizers.huggingface import MAX_ID, train_bpe
from moebius.distributed.checkpoint.format import CheckpointError
from moebius.distributed.checkpoint.pieces import PublishedFolder

DEEP = "[" * 100_000
DIGITS = "9" * 5000
END = "<|end_of_document|>"


@cache
def whole() -> str:
    return (
        train_bpe(["the cat sat on the mat "] * 20, vocab_size=280).files["tokenizer.json"].decode()
    )


def with_(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Returns a change of one place of a tokenizer.json, named by its keys."""

    def change(described: Any) -> None:
        *keys, last = path.split("/")
        for key in keys:
            described = described[int(key) if key.isdigit() else key]
        described[last] = value

    return change


def added(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Returns a change that adds a token."""

    def change(described: Any) -> None:
        described["added_tokens"].append(described["added_tokens"][0] | {"content": "<x>"} | values)

    return change


IDS = "ids are whole numbers from 0 to"
TABLE = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "an id of 2^31": (with_("model/vocab/zz", 2**31), f"'zz' the id 2147483648: {IDS}"),
    "the first id too many": (with_("model/vocab/zz", MAX_ID), IDS),
    "a negative id": (with_("model/vocab/zz", -1), "'zz' the id -1"),
    "an id in words": (with_("model/vocab/zz", "1"), IDS),
    "an id of true": (with_("model/vocab/zz", True), IDS),
    "an id of 1.5": (with_("model/vocab/zz", 1.5), IDS),
    "a vocabulary in a list": (with_("model/vocab", []), "tokenizers.*expected a map"),
    "an empty vocabulary": (with_("model/vocab", {}), "out of vocabulary"),
    "merges of unknown tokens": (with_("model/merges", [["qq", "ww"]]), "out of vocabulary"),
    "no model": (with_("model", None), "cannot load it"),
    "an unknown model": (with_("model/type", "Foo"), "cannot load it"),
    "words in a WordLevel": (with_("model", {"type": "WordLevel", "vocab": {"a": 2**31}}), IDS),
    "added_tokens of a number": (
        with_("added_tokens", 3),
        "added_tokens is 3, not a list of tokens",
    ),
    "added_tokens of words": (with_("added_tokens", ["a"]), "added_tokens is "),
    "no added_tokens": (with_("added_tokens", []), "is not a special token"),
    "an added id of 2^31": (added(id=2**31), f"'<x>' the id 2147483648: {IDS}"),
    "an added id in a list": (added(id=[1]), IDS),
    "an added token without an id": (added(id=None), IDS),
    "an added token of a number": (added(id=1, content=3), "expected a string"),
    "normalisers of a number": (
        with_("normalizer", {"type": "Sequence", "normalizers": 3}),
        "cannot",
    ),
    "a table that lies": (
        with_("normalizer", TABLE),
        "the precompiled_charsmap of normalizer is damaged",
    ),
    "a table in a sequence": (
        with_("normalizer", {"type": "Sequence", "normalizers": [TABLE]}),
        "precompiled_charsmap",
    ),
    "a panic": (
        with_("normalizer", TABLE | {"precompiled_charsmap": "AAAAAA=="}),
        "cannot encode a text .*index out of bounds",
    ),
    "a broken expression": (with_("pre_tokenizer", SPLIT | {"pattern": {"Regex": "(("}}), "cannot"),
}


def written(folder: Path, **files: str) -> str:
    for name, text in {"tokenizer.json": whole(), **files}.items():
        (folder / name.replace("__", ".")).write_text(text)
    return str(folder)


@pytest.mark.parametrize("name", CHANGES)
def test_a_damaged_tokenizer_json_is_one_error(name: str, tmp_path: Path) -> None:
    change, message = CHANGES[name]
    change(described := json.loads(whole()))
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(InputError, match=message):
        open_tokenizer(str(tmp_path)).encode_batch(["the cat"])


TEXTS = {
    "tokenizer.json": {
        DEEP: "tokenizer.json: is not JSON: it is nested too deeply",
        '{"a":' * 100_000: "nested too deeply",
        DIGITS: "a number has more than 4,300 digits",
        "[]": "tokenizer.json: is a list, not a JSON object",
        "null": "is a NoneType, not",
        '{"model": ': "tokenizer.json: is not JSON",
        "{}": "Model missing",
    },
    "tokenizer_config.json": {
        DEEP: "tokenizer_config.json: is not JSON: it is nested too deeply",
        "[]": "tokenizer_config.json: is a list",
        '{"eos_token": 3}': "tokenizer_config.json: eos_token is 3, not a token",
        '{"eos_token": {"content": [1]}}': r"eos_token is \[1\], not a token",
        '{"eos_token": ["a"]}': "eos_token is ",
    },
}


@pytest.mark.parametrize(
    ("file", "text"),
    [(file, text) for file, texts in TEXTS.items() for text in texts],
    ids=lambda text: text[:20],
)
def test_a_damaged_text_is_one_error(file: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=TEXTS[file][text]):
        open_tokenizer(written(tmp_path, **{file: text}))


@pytest.mark.parametrize(
    "text", [DEEP, "3", '{"eos_token_id": [[]]}', '{"eos_token_id": {"a": 1}}']
)
def test_a_damaged_config_json_names_no_end(text: str, tmp_path: Path) -> None:
    """It is read for its end id alone, and reported where it matters."""
    found = open_tokenizer(written(tmp_path, config__json=text, generation_config__json=text))
    assert found.end_of_document == END


TEMPLATES = {
    '{"chat_template": 3}': "chat_template is 3, not a template",
    '{"chat_template": [{"name": "default", "template": [1]}]}': r"chat_template is \[1\]",
    '{"chat_template": "a", "bos_token": 3}': "bos_token is 3, not a token",
    DEEP: "nested too deeply",
}


@pytest.mark.parametrize("config", TEMPLATES, ids=lambda text: text[:20])
def test_a_damaged_chat_template_is_one_error(config: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(InputError, match=TEMPLATES[config]):
        find_template(str(tmp_path))


def in_place_of(path: Path, kind: str) -> None:
    """Puts something in the place of a file that no reader survives unless it looks first."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 20 * 2**30)


KINDS = ("fifo", "device", "folder", "20 GB")
READ = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat.json")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", READ)
def test_what_is_no_file_of_its_size_is_refused_at_once(
    file: str, kind: str, tmp_path: Path
) -> None:
    folder = written(tmp_path)
    in_place_of(tmp_path / file, kind)
    message = f"{file} cannot be read|{file}: has more than {MAX_BYTES >> 20} MiB"
    with pytest.raises(InputError, match=message):
        _ = find_template(folder) or open_tokenizer(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_a_folder_of_weights_is_refused_at_once(file: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    in_place_of(tmp_path / file, kind)
    with pytest.raises(CheckpointError, match=file):
        PublishedFolder(tmp_path)
