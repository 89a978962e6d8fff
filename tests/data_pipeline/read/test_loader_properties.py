"""A step's content does not depend on ranks, micro-batches, prefetching or restarts, and its digest
covers its content.
"""

import json
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_folder import MadeFolder, documents

from moebius.data_pipeline.data_config import DataConfig, Stage
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.read.loader import Loader

S = 16
STEPS = 12
BATCH = 48
MIXED = {"weights": {"b": 0.3}, "stages": (Stage(at_tokens=200 * S, weights={"a": 1.0, "b": 3.0}),)}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> MadeFolder:
    """Two sources, and more steps than an epoch of either."""
    folder = MadeFolder(tmp_path_factory.mktemp("made"), ("a", "b"), frozenset({"b"}))
    folder.seal("a", documents(0, 60), shards=2).seal("a", documents(1, 30))
    return folder.seal("b", documents(2, 80, prompts=True)).complete()


def read(data: DataConfig, steps: int, **options: Any) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Returns tokens [steps, rank's rows, S+1], loss masks and digests of a rank's steps."""
    with Loader(data, global_batch=BATCH, **options) as loader:
        batches = [next(loader) for _ in range(steps)]
    tokens = np.stack([batch.tokens.reshape(-1, S + 1) for batch in batches])
    masks = np.stack([np.asarray(batch.loss_mask).reshape(-1, S) for batch in batches])
    return tokens, masks, [batch.digest for batch in batches]


@pytest.fixture(scope="module")
def whole(made) -> dict[str, tuple[np.ndarray, np.ndarray, list[int]]]:
    packings: tuple[Literal["concat", "best_fit"], ...] = ("concat", "best_fit")
    return {
        packing: read(made.config(packing=packing, **MIXED), STEPS, micro_batch=BATCH)
        for packing in packings
    }


CUTS = {
    "layout": st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
    "cut": st.integers(0, 5),
    "prefetch": st.integers(1, 20),
    "start": st.integers(0, STEPS - 1),
    "packing": st.sampled_from(["concat", "best_fit"]),
}


@settings(max_examples=5, deadline=None)
@given(**CUTS)
def test_any_layout_reads_its_slice_of_every_step(made, whole, **cuts):
    _check_layout(made, whole, **cuts)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(**CUTS)
def test_every_layout_reads_its_slice_of_every_step(made, whole, **cuts):
    _check_layout(made, whole, **cuts)


def _check_layout(
    made: MadeFolder, whole: dict, *, layout: int, cut: int, prefetch: int, start: int, packing: Any
) -> None:
    tokens, masks, digests = whole[packing]
    local = BATCH // layout
    divisors = [size for size in range(1, local + 1) if local % size == 0]
    steps = min(2, STEPS - start)
    total = np.zeros(steps, dtype=np.int64)
    for rank in range(layout):
        found = read(
            made.config(packing=packing, **MIXED),
            steps,
            micro_batch=divisors[cut % len(divisors)],
            rank=rank,
            num_ranks=layout,
            start_sample=start * BATCH,
            prefetch=prefetch,
        )
        mine = slice(rank * local, rank * local + local)
        assert np.array_equal(found[0], tokens[start : start + steps, mine])
        assert np.array_equal(found[1], masks[start : start + steps, mine])
        total += found[2]
    assert (total % 2**31).tolist() == digests[start : start + steps]


# ---- what a digest sees


def _first_steps(folder: Path) -> list[tuple[list, int]]:
    """Returns tokens and digest of each step."""
    data = DataConfig(directory=str(folder), seq_len=S)
    with Loader(data, global_batch=4, micro_batch=4) as loader:
        return [(batch.tokens.tolist(), batch.digest) for batch in islice(loader, 5)]


def _text(path: Path, words: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": word * 20}) + "\n" for word in words))
    return path


def test_a_digest_tells_other_tokens_under_the_same_row_numbers(tmp_path):
    """Changes one letter far from the first rows: the whole segment's content counts."""
    words = [f"word {n:04d}" for n in range(60)]
    found = []
    for number, last in enumerate(["word 0059", "ward 0059"]):
        path = _text(tmp_path / f"{number}.jsonl", [*words[:-1], last])
        config = PrepareConfig(
            input=(str(path),),
            tokenizer="bytes",
            vocab_size=257,
            validation_fraction=0.0,
        )
        prepare(config, tmp_path / str(number))
        found.append(_first_steps(tmp_path / str(number)))
    assert all(one[1] != other[1] for one, other in zip(*found, strict=True))
    same_tokens = [one[0] == other[0] for one, other in zip(*found, strict=True)]
    assert any(same_tokens), "a step of which every row is the same has another digest"


def test_a_digest_tells_the_tokenizer_though_the_ids_are_the_same(tmp_path):
    """A vocabulary with an additional unused entry gives the same tokens."""
    path = _text(tmp_path / "a.jsonl", [f"word {n:04d}" for n in range(60)])
    base = PrepareConfig(input=(str(path),), vocab_size=300, validation_fraction=0.0)
    prepare(base, tmp_path / "trained")
    description = json.loads((tmp_path / "trained" / "tokenizer.json").read_text())
    (end,) = description["added_tokens"]
    unused = end | {"id": end["id"] + 1, "content": "<|unused|>"}
    found = []
    for name, added in (("same", [end]), ("larger", [end, unused])):
        text = json.dumps(description | {"added_tokens": added})
        (tmp_path / f"{name}.json").write_text(text)
        changes = {
            "tokenizer": str(tmp_path / f"{name}.json"),
            "end_of_document": end["content"],
            "vocab_size": 400,
        }
        config = base.model_copy(update=changes)
        prepare(config, tmp_path / name)
        found.append(_first_steps(tmp_path / name))
    same, larger = found
    assert [tokens for tokens, _ in same] == [tokens for tokens, _ in larger]
    assert all(one[1] != other[1] for one, other in zip(same, larger, strict=True))
