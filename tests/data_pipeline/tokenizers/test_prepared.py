"""Preparation with each kind of tokenizer and each engine."""

from pathlib import Path

import pyarrow as pa
import pytest
import tokenizers
from meddling import files_of
from small_corpus import sentences, write_jsonl
from token_stream import documents_of
from tokenizers import models, pre_tokenizers

from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.tokenizers import huggingface
from moebius.data_pipeline.tokenizers.fast import UnsuitableError
from moebius.data_pipeline.tokenizers.interface import CONFIG_FILE, TOKENIZER_FILE
from moebius.data_pipeline.tokenizers.tokenizer import prepared_tokenizer


@pytest.fixture
def words(tmp_path) -> str:
    """A folder with a word-level tokenizer whose documents end with "</s>"."""
    texts = [*" ".join(sentences(0, 5)).split(), *(f"unused{n}" for n in range(300))]
    library = tokenizers.Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(["[UNK]", *sorted({*texts})])}, "[UNK]")
    )
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["</s>", "<doc>"])
    folder = tmp_path / "words"
    folder.mkdir()
    library.save(str(folder / TOKENIZER_FILE))
    (folder / CONFIG_FILE).write_text('{"eos_token": "</s>"}')
    return str(folder)


def _config(tmp_path, **values) -> PrepareConfig:
    write_jsonl(tmp_path / "a.jsonl", sentences(0, 5))
    return PrepareConfig(input=(str(tmp_path / "a.jsonl"),), **values)


@pytest.mark.parametrize("end", ["", "<doc>"])
def test_a_tokenizer_that_exists_is_copied_and_used(tmp_path, words, end):
    config = _config(tmp_path, tokenizer=words, end_of_document=end)
    manifest = prepare(config, tmp_path / "d")
    tokenizer = prepared_tokenizer(tmp_path / "d")
    assert tokenizer.end_of_document == (end or "</s>")
    assert manifest.header.tokenizer.end_of_document_id == tokenizer.end_of_document_id
    assert manifest.header.tokenizer.sha256 == tokenizer.sha256
    with pa.ipc.open_file(str(tmp_path / "d" / manifest.shards[0].name)) as shard:
        # so that a digest of the file's content tells tokenizers with equal ids apart
        assert shard.schema.metadata[b"moebius.tokenizer_sha256"].decode() == tokenizer.sha256
    rows = [
        row["tokens"]
        for split in ("train", "validation")
        for row in documents_of(tmp_path / "d", split)
    ]
    assert all(row[-1] == tokenizer.end_of_document_id for row in rows)
    found = map(tokenizer.decode, rows)
    assert sorted(found) == sorted(" ".join(text.split()) for text in sentences(0, 5))


def test_a_vocabulary_that_has_no_room_is_said_before_tokens_are_made(tmp_path, words):
    with pytest.raises(
        InputError, match=r"has \d+ ids, more than prepare.vocab_size=257: set prepare"
    ):
        prepare(_config(tmp_path, tokenizer=words, vocab_size=257), tmp_path / "d")


def _is_fast(folder: Path) -> bool:
    tokenizer = prepared_tokenizer(folder)
    assert isinstance(tokenizer, huggingface.HuggingFaceTokenizer)
    return tokenizer._fast is not None


def test_both_engines_make_the_same_folder(tmp_path, monkeypatch):
    config = _config(tmp_path, vocab_size=300)
    prepare(config, tmp_path / "fast")
    assert _is_fast(tmp_path / "fast")

    def unsuitable(text_json):
        raise UnsuitableError("for this test")

    monkeypatch.setattr(huggingface, "fast_encoder", unsuitable)
    huggingface._proven_encoder.cache_clear()
    prepare(config, tmp_path / "slow")
    assert not _is_fast(tmp_path / "slow")
    huggingface._proven_encoder.cache_clear()
    assert files_of(tmp_path / "fast") == files_of(tmp_path / "slow")
