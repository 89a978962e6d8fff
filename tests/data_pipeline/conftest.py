"""A small corpus that every test of this room can afford, and one prepared folder of it."""

import json
import random
from pathlib import Path

import pytest
from moebius.data_pipeline.config import DataConfig
from moebius.data_pipeline.prepare import prepare

WORDS = ["router", "expert", "token", "gate", "naïve", "Zürich", "日本語", "😀", "depth", "step", "17", "2048", "the"]


def sentences(seed: int, count: int) -> list[str]:
    """Documents of a few to a few hundred words, the same for the same seed."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.choice([3, 20, 60, 200]))) + f" ({seed}-{n})." for n in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text, "source": path.stem}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> tuple[Path, ...]:
    """Three .jsonl files of 40 documents; the last one repeats a document of the first and has an empty one."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [sentences(seed, 40) for seed in range(3)]
    texts[2][5] = texts[0][7]
    texts[2][6] = " \n "
    return tuple(write_jsonl(folder / f"part-{n}.jsonl", texts[n]) for n in range(3))


@pytest.fixture(scope="session")
def config(corpus) -> DataConfig:
    """Small record batches, so that a few kB of text make many; one split per file."""
    return DataConfig(
        input=tuple(map(str, corpus)), vocab_size=400, batch_tokens=500, validation_fraction=0.2, seq_len=16
    )


@pytest.fixture(scope="session")
def prepared(config, tmp_path_factory) -> Path:
    """The corpus above, prepared. Read only: tests that damage files copy it."""
    folder = tmp_path_factory.mktemp("prepared") / "data"
    prepare(config, folder)
    return folder
