"""The document shuffle is a bijection that depends only on the documents, and mixes well."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from small_corpus import sentences, write_jsonl
from token_stream import documents_of

from moebius.data_pipeline.make import shuffle
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.make.shuffle import _shuffle_key, shuffled_buckets
from moebius.data_pipeline.make.units import Unit
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.sources.documents import InputSplit
from moebius.data_pipeline.tokenizers.tokenizer import load_tokenizer


def test_buckets_are_about_as_large_as_splits_and_sources_take_turns(monkeypatch):
    monkeypatch.setattr(shuffle, "MAX_BUCKETS", 4)
    config = PrepareConfig(input=("x",), split_bytes=100, shuffle_documents=True)

    def unit(source: str, number: int, num_bytes: int) -> Unit:
        split = InputSplit(source, "/a", ".txt", 0, 9, 9, "both", num_bytes)
        return Unit(source, number, (split,))

    units = [unit("a", 0, 120), unit("a", 1, 30), unit("b", 0, 0), unit("c", 0, 99_999)]
    found = [(bucket.source, bucket.number) for bucket in shuffled_buckets(units, config)]
    assert Counter(source for source, _ in found) == {"a": 2, "b": 1, "c": 4}
    for source in "abc":
        assert [number for name, number in found if name == source] == sorted(
            number for name, number in found if name == source
        )


def test_keys_are_spread_evenly_and_do_not_follow_validation():
    rng = np.random.default_rng(0)
    ids = [rng.bytes(16) for _ in range(8000)]
    buckets = Counter(_shuffle_key(one) * 8 >> 64 for one in ids)
    assert set(buckets) == set(range(8))
    assert max(buckets.values()) - min(buckets.values()) < 200
    # ids with equal beginnings, as held-out ones have, and consecutive ends
    alike = [bytes(8) + number.to_bytes(8, "big") for number in range(8000)]
    spread = Counter(_shuffle_key(one) * 8 >> 64 for one in alike)
    assert max(spread.values()) - min(spread.values()) < 200
    assert len({_shuffle_key(one) for one in alike}) == len(alike)


def _config(paths: list[Path]) -> PrepareConfig:
    return PrepareConfig(
        input=tuple(map(str, paths)),
        tokenizer="bytes",
        split_bytes=3000,
        batch_tokens=400,
        validation_fraction=0.2,
        shuffle_documents=True,
    )


def _documents(folder: Path, split: str) -> list[str]:
    tokenizer = load_tokenizer(folder)
    return [tokenizer.decode(row["tokens"]) for row in documents_of(folder, split)]


@pytest.mark.parametrize("piece_tokens", [500, pytest.param(2**24, marks=pytest.mark.slow)])
def test_every_document_comes_once_wherever_its_file_was(tmp_path, monkeypatch, piece_tokens):
    """A document's place does not depend on the files or on how much is sorted at a time."""
    monkeypatch.setattr(shuffle, "_PIECE_TOKENS", piece_tokens)
    texts = [text for seed in range(3) for text in sentences(seed, 20)]
    forth = [write_jsonl(tmp_path / f"{n}.jsonl", texts[20 * n : 20 * n + 20]) for n in range(3)]
    back = [write_jsonl(tmp_path / "all.jsonl", [texts[0], "", *texts[::-1]])]
    found = []
    for name, paths in (("forth", forth), ("back", back)):
        config = _config(paths).model_copy(
            update={"validation_fraction": 0.0, "split_bytes": 12_000}
        )
        assert len(prepare(config, tmp_path / name).of("train")) == 4
        found.append(_documents(tmp_path / name, "train"))
    assert found[0] == found[1]
    assert sorted(found[0]) == sorted(texts)
    places = [texts.index(text) for text in found[0]]
    assert abs(np.corrcoef(places, range(len(places)))[0, 1]) < 0.35, "of 1 it would be in order"
