"""The prepared form of the shared corpus equals the corpus."""

import json
from pathlib import Path

import pytest
import zstandard
from shared import shared_folder
from token_stream import documents_of

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.make import vocabulary
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.make.tasks import normalised
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.read.loader import Loader
from moebius.data_pipeline.tokenizers.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def corpus_file() -> Path:
    folder = shared_folder()
    if folder is None or not (folder / "data/corpus/validation-00.jsonl.zst").exists():
        pytest.skip("no recorded corpus beside the project (set MOEBIUS_SHARED to its folder)")
    return folder / "data/corpus/validation-00.jsonl.zst"


@pytest.mark.needs_shared
def test_a_corpus_file_comes_back_document_by_document(corpus_file, tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "SAMPLE_BYTES", 10**6)  # which is faster
    config = PrepareConfig(input=(str(corpus_file),), vocab_size=2000)
    prepare(config, tmp_path / "d")
    with zstandard.open(corpus_file, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    tokenizer = load_tokenizer(tmp_path / "d")
    found = {
        row["source_row"]: (tokenizer.decode(row["tokens"]), row["source"], row["n_bytes"])
        for split in ("train", "validation")
        for row in documents_of(tmp_path / "d", split)
    }
    expected = {
        n: (text, record["source"], len(text.encode()))
        for n, record in enumerate(records)
        for text in [normalised(record["text"])]
    }
    assert found == expected
    data = DataConfig(directory=str(tmp_path / "d"))
    with Loader(data, global_batch=8, micro_batch=4) as loader:
        assert next(loader).tokens.max() < 2000
