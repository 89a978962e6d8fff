"""A small corpus for the data tests, and a prepared folder of it."""

from pathlib import Path

import pytest
from small_corpus import sentences, write_jsonl

from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> tuple[Path, ...]:
    """Three .jsonl files of 40 documents; the last one repeats one of the first and has an empty one."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [sentences(seed, 40) for seed in range(3)]
    texts[2][5] = texts[0][7]
    texts[2][6] = " \n "
    return tuple(write_jsonl(folder / f"part-{n}.jsonl", texts[n]) for n in range(3))


@pytest.fixture(scope="session")
def config(corpus) -> PrepareConfig:
    """Small record batches, and one split per file."""
    return PrepareConfig(
        input=tuple(map(str, corpus)),
        vocab_size=400,
        batch_tokens=500,
        validation_fraction=0.2,
    )


@pytest.fixture(scope="session")
def prepared(config, tmp_path_factory) -> Path:
    """The prepared corpus, read-only: tests that damage files copy it."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare(config, folder)
    return folder
