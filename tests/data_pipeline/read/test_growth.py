"""F20, F13, F17 and F23 with the real preparation: training during tokenisation equals training
afterwards, whatever dies meanwhile.
"""

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_corpus import sentences, write_jsonl
from steps import seen, steps_of

from moebius.data_pipeline.data_config import DataConfig
from moebius.data_pipeline.make.pools import LocalPool, SerialPool, TaskPool
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.manifest import (
    UNFINISHED,
    give_up,
    given_up,
    go_on,
    is_prepared,
    read_manifest,
)
from moebius.data_pipeline.prepare_config import PrepareConfig, SourceConfig
from moebius.data_pipeline.read.loader import Loader

S = 16
BATCH = 12


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> PrepareConfig:
    """Two sources of four files each, in many segments, with different weights."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(8):
        write_jsonl(folder / f"{'ab'[number % 2]}-{number}.jsonl", sentences(number, 12))
    return PrepareConfig(
        sources=tuple(
            SourceConfig(name=name, input=(f"{folder}/{name}-*.jsonl",)) for name in "ab"
        ),
        tokenizer="bytes",
        vocab_size=257,
        batch_tokens=500,
        segment_tokens=4000,
        validation_fraction=0.1,
    )


PACKINGS = ("concat", "best_fit")
Steps = list[tuple[list, int, int]]


def _data(folder: Path, packing: str) -> DataConfig:
    values = {"directory": str(folder), "seq_len": S, "seed": 5, "weights": {"a": 2.0}}
    return DataConfig.model_validate(values | {"packing": packing})


@pytest.fixture(scope="module")
def after(config, tmp_path_factory) -> dict[str, Steps]:
    """Returns the steps after a full preparation, over more than one epoch, by packing."""
    folder = tmp_path_factory.mktemp("after") / "d"
    manifest = prepare(config, folder)
    assert all(len(manifest.segments(name)) >= 3 for name in "ab")
    rows = sum(segment.num_tokens("train") for segment in manifest.sealed) // S
    count = 3 * rows // 2 // BATCH
    return {
        packing: seen(steps_of(_data(folder, packing), count, global_batch=BATCH))
        for packing in PACKINGS
    }


@contextmanager
def _prepared_meanwhile(config: PrepareConfig, folder: Path, pool: TaskPool) -> Iterator[None]:
    """Prepares in a thread; returns once a segment can be read."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            prepare(config, folder, pool=pool)
        except BaseException as error:  # noqa: BLE001 (told below)
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while not is_prepared(folder):
            assert not failed
            time.sleep(0.002)
        yield
    finally:
        thread.join()
    assert not failed


class Gated(SerialPool):
    """Lets tokenising proceed only as fast as the loader reads."""

    def __init__(self, may_go_on: threading.Semaphore):
        super().__init__()
        self._may_go_on = may_go_on
        self._num_made = 0
        self.is_at_the_gate = threading.Event()

    def wait(self):
        if self._waiting[0][1].__name__ == "tokenise_unit":
            self._num_made += 1
            if self._num_made > 4:
                self.is_at_the_gate.set()
                assert self._may_go_on.acquire(timeout=30)
        return super().wait()


@pytest.mark.parametrize(
    ("packing", "num_ranks"),
    [*((packing, 1) for packing in PACKINGS), pytest.param("concat", 4, marks=pytest.mark.slow)],
)
def test_training_while_it_is_tokenised_is_training_after(
    config, after, tmp_path, packing, num_ranks
):
    """No segment exists before the loader waits for it."""
    may_go_on, seen_growing = threading.Semaphore(0), []
    expected = after[packing]
    pool = Gated(may_go_on)
    with _prepared_meanwhile(config, tmp_path / "d", pool):
        loaders = [
            Loader(
                _data(tmp_path / "d", packing),
                global_batch=BATCH,
                micro_batch=3,
                rank=rank,
                num_ranks=num_ranks,
                prefetch=2,
                poll_s=0.001,
            )
            for rank in range(num_ranks)
        ]
        try:
            found = []
            while len(found) < len(expected):
                if not all(loader.wait_until_ready(0.02) for loader in loaders):
                    # once for each wait: a busy machine takes longer than one look to tokenise
                    if pool.is_at_the_gate.is_set():
                        pool.is_at_the_gate.clear()
                        seen_growing.append(len(read_manifest(tmp_path / "d").sealed))
                        may_go_on.release()
                    continue
                found.append([next(loader) for loader in loaders])
        finally:
            for _ in range(20):
                may_go_on.release()
            for loader in loaders:
                loader.close()
    assert seen(found) == expected
    assert len(set(seen_growing)) >= 3, "it never had to wait"


@pytest.mark.fault("F20")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_training_while_workers_are_killed_is_training_after(config, after, tmp_path, seed):
    rng = random.Random(seed)
    with LocalPool(2) as pool:
        done = threading.Event()

        def kill_workers() -> None:
            for _ in range(2):  # fewer than the tries of a unit
                time.sleep(0.2 + rng.random())
                alive = [worker.process for worker in list(pool._busy.values())]
                if alive and not done.is_set():
                    process = rng.choice(alive)
                    if process.pid is not None and process.is_alive():
                        os.kill(process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill_workers)
        killer.start()
        with _prepared_meanwhile(config, tmp_path / "d", pool):
            data, expected = _data(tmp_path / "d", "concat"), after["concat"]
            options = {"global_batch": BATCH, "num_ranks": 2, "poll_s": 0.01}
            assert seen(steps_of(data, len(expected), **options)) == expected
        done.set()
        killer.join()
    assert read_manifest(tmp_path / "d").complete


def test_a_folder_is_given_up_until_it_is_prepared_again(tmp_path, monkeypatch):
    """A read that fails briefly does not count as giving up, which would end the run."""
    assert given_up(tmp_path) is None
    give_up(tmp_path, "the disk is full")
    assert given_up(tmp_path) == "the disk is full"
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", _stale)
        assert given_up(tmp_path) is None
    (tmp_path / UNFINISHED / "given-up.json").write_text("[]")
    assert given_up(tmp_path) == "the file with the reason is damaged"
    go_on(tmp_path)
    assert given_up(tmp_path) is None


def _stale(path: Path) -> bytes:
    raise OSError(errno.ESTALE, "Stale file handle")
