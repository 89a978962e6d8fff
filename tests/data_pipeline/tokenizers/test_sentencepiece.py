"""SentencePiece models encode as their library does, and end documents with a control symbol."""

import random
import sys

import numpy as np
import pytest
from small_corpus import sentencepiece_model

from moebius.data_pipeline.errors import InputError, ShardError
from moebius.data_pipeline.tokenizers.hub import open_tokenizer
from moebius.data_pipeline.tokenizers.interface import CONFIG_FILE, MODEL_FILE
from moebius.data_pipeline.tokenizers.sentencepiece import SentencePieceTokenizer
from moebius.data_pipeline.tokenizers.tokenizer import load_tokenizer, save_tokenizer

pytest.importorskip("sentencepiece", reason="the extra `sentencepiece`")

TEXTS = ["the router chose expert 12", "the expert chose the token", "the the routed tokens"] * 20


def _model(**options) -> bytes:
    return sentencepiece_model(TEXTS, **{"vocab_size": 300, "byte_fallback": True, **options})


MODEL = _model(control_symbols=["<doc>"], user_defined_symbols=["<mine>"])


def test_text_comes_back_and_never_ends_a_document():
    tokenizer = SentencePieceTokenizer(MODEL)
    texts = ["the expert chose", "</s> <doc> the", "日本 😀", ""]
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert all(ids.dtype == np.uint16 for ids in encoded)
    assert tokenizer.end_of_document == "</s>"
    assert tokenizer.end_of_document_id not in np.concatenate(encoded)
    assert np.concatenate(encoded).max() < tokenizer.vocab_size
    assert tokenizer.decode([*encoded[0], tokenizer.end_of_document_id]) == texts[0]


def test_a_folder_keeps_model_and_end_of_document(tmp_path):
    for name, files in (("", [MODEL_FILE]), ("<doc>", [MODEL_FILE, CONFIG_FILE])):
        tokenizer = SentencePieceTokenizer(MODEL, end_of_document=name)
        folder = tmp_path / (name.strip("<>") or "own")
        folder.mkdir()
        save_tokenizer(folder, tokenizer)
        loaded = load_tokenizer(folder, sha256=tokenizer.sha256)
        assert {path.name for path in folder.iterdir()} == set(files)
        assert loaded.end_of_document == (name or "</s>")
        assert loaded.end_of_document_id == tokenizer.end_of_document_id
    with pytest.raises(ShardError, match=r"tokenizer.model has sha256"):
        load_tokenizer(tmp_path / "doc", sha256=load_tokenizer(tmp_path / "own").sha256)


@pytest.mark.parametrize("name", ["spiece.bin", "folder/spiece.model", "folder"])
def test_a_model_is_known_by_its_content(tmp_path, name):
    (tmp_path / "folder").mkdir()
    for file in ("spiece.bin", "folder/spiece.model"):
        (tmp_path / file).write_bytes(MODEL)
    assert open_tokenizer(str(tmp_path / name)).sha256 == SentencePieceTokenizer(MODEL).sha256


@pytest.mark.parametrize("name", ["<mine>", "<unk>", "the", "nothing"])
def test_only_a_control_symbol_ends_documents(name):
    with pytest.raises(ValueError, match=rf"no control symbol '{name}'.*'</s>', '<doc>'"):
        SentencePieceTokenizer(MODEL, end_of_document=name)


def test_a_model_without_an_end_of_sentence_needs_a_name():
    model = _model(eos_id=-1, control_symbols=["<doc>"])
    with pytest.raises(ValueError, match=r"no end of sentence to end a document with.*'<doc>'"):
        SentencePieceTokenizer(model)
    assert SentencePieceTokenizer(model, end_of_document="<doc>").end_of_document == "<doc>"


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a SentencePiece model"):
        SentencePieceTokenizer(b"no model")
    (tmp_path / MODEL_FILE).write_bytes(b"no model")
    with pytest.raises(ShardError, match=r"tokenizer.model is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_without_the_library_its_name_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / MODEL_FILE).write_bytes(MODEL)
    with pytest.raises(InputError, match=r"pip install 'moebius\[sentencepiece\]'"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["a" * 10**6, " " * 10**6, "random"], ids=lambda text: text[:6])
def test_a_million_characters_without_a_boundary_are_encoded(text):
    text = "".join(random.Random(0).choices("thexrouc", k=10**6)) if text == "random" else text
    tokenizer = SentencePieceTokenizer(_model(normalization_rule_name="identity"))
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text.strip()
