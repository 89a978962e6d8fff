"""Small documents of a few kB, deterministic by seed, with more than ASCII."""

import importlib
import io
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.manifest import DatasetManifest
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.sources.documents import Document
from moebius.data_pipeline.sources.formats import plan_splits, read_documents

WORDS = [
    "router",
    "expert",
    "token",
    "gate",
    "naïve",
    "Zürich",
    "日本語",
    "😀",
    "depth",
    "step",
    "17",
    "2048",
    "the",
]


def sentences(seed: int, count: int) -> list[str]:
    """Returns documents of a few to a few hundred words, deterministic by seed."""
    rng = random.Random(seed)
    return [
        " ".join(rng.choices(WORDS, k=rng.choice([3, 20, 60, 200]))) + f" ({seed}-{n})."
        for n in range(count)
    ]


def count_of(manifest: DatasetManifest, field: str, split: str = "") -> int:
    """Sums a number over all shards, or over one split's."""
    shards = [shard for shard in manifest.shards if split in ("", shard.split)]
    return sum(getattr(shard, field) for shard in shards)


def dropped(manifest: DatasetManifest) -> dict[str, int]:
    """Counts the dropped documents of all sources, by reason."""
    assert manifest.completion is not None
    by_source = map(Counter, manifest.completion.dropped.values())
    return dict(sum(by_source, Counter()))


def planned(*inputs: object, **options: Any) -> list[Callable[[], list[Document]]]:
    """Plans the only source of a `PrepareConfig`; returns a function for each split, which reads it."""
    config = PrepareConfig(input=tuple(map(str, inputs)), **options)
    (source,), faults = config.all_sources, cast("Any", config.encoding_faults)
    return [
        lambda split=split: list(read_documents(split, source, encoding_faults=faults))
        for split in plan_splits(config)
    ]


def documents_by_split(*inputs: object, **options: Any) -> list[list[Document]]:
    """Plans and reads the only source of a `PrepareConfig`, split by split."""
    return [read() for read in planned(*inputs, **options)]


def read_texts(*inputs: object, **options: Any) -> list[str]:
    """Returns the texts of all documents."""
    return [one.text for split in documents_by_split(*inputs, **options) for one in split]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text(
        "".join(json.dumps({"text": text, "source": path.stem}) + "\n" for text in texts)
    )
    return path


def pages(split_index: int, num_splits: int) -> Iterator[str]:
    """Returns two splits of texts, as `python:moebius.tests.small_corpus:pages` provides them."""
    for number in range(split_index, 8, num_splits):
        yield " ".join(sentences(number, 3))


pages.num_splits = 2  # pyright: ignore[reportFunctionMemberAccess]


def shards_of_words(folder: Path, num_documents: int) -> Path:
    """Writes token shards: documents of thirty of seven words, as bytes; a fifth for validation."""
    words = ["one", "two", "three", "many", "band", "expert", "route"]
    documents = np.random.default_rng(0).choice(words, size=(num_documents, 30))
    text = folder / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"text": " ".join(line)}) + "\n" for line in documents), encoding="utf-8"
    )
    shards = folder / "shards"
    prepare(sections_of_words(shards)["prepare"], shards)
    return shards


def sections_of_words(shards: Path, **settings: Any) -> dict[str, Any]:
    """Returns the sections `data` and `prepare` of a run on `shards_of_words`."""
    prepare = PrepareConfig(
        input=(str(shards.parent / "text.jsonl"),), tokenizer="bytes", validation_fraction=0.2
    )
    return {"data": DataConfig(directory=str(shards), **settings), "prepare": prepare}


def sentencepiece_model(texts: list[str], **options: Any) -> bytes:
    """Trains a small SentencePiece model, and returns its file."""
    sentencepiece: Any = importlib.import_module("sentencepiece")
    model = io.BytesIO()
    defaults = {"model_type": "bpe", "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(
        **defaults | options, sentence_iterator=iter(texts), model_writer=model
    )
    return model.getvalue()
