"""Data preparation as Ray tasks: whatever happens to the workers, it is told, and the bytes are the
same.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from moebius.cluster.prepare import RayPool
from moebius.data_pipeline.config import DataConfig
from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.making.pools import WorkerDiedError
from moebius.data_pipeline.making.prepare import prepare

pytestmark = pytest.mark.usefixtures("cluster")


def _outcomes(pool: RayPool, function: Any, items: list[Any]) -> list[tuple[int, Any]]:
    """What becomes of each item, in the order in which they are done."""
    numbers = {pool.submit(function, item): index for index, item in enumerate(items)}
    outcomes = [pool.wait() for _ in items]
    return [(numbers[number], outcome) for number, outcome in outcomes]


def test_results_come_as_they_are_done():
    def slow_first(seconds: float) -> float:
        time.sleep(seconds)
        return seconds * 10

    with RayPool() as pool:
        results = _outcomes(pool, slow_first, [2.0, 0.0, 0.1])
    assert sorted(results) == [(0, 20.0), (1, 0.0), (2, 1.0)]
    assert results[-1][0] == 0, "completion order, not item order"


def test_the_capacity_follows_the_cluster():
    import ray

    with RayPool() as pool, RayPool(capacity=3) as limited:
        assert pool.capacity == 2 * ray.cluster_resources()["CPU"]
        assert limited.capacity == 3


def test_a_worker_that_is_killed_is_told_from_a_task_that_fails(tmp_path):
    def ends(how: str) -> str:
        with open(tmp_path / how, "a") as file:
            file.write("x")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "fails":
            raise InputError("file bad: not UTF-8")
        return how

    with RayPool() as pool:
        outcomes = dict(_outcomes(pool, ends, ["well", "killed", "fails"]))
    assert outcomes[0] == "well"
    assert isinstance(outcomes[1], WorkerDiedError)
    assert isinstance(outcomes[2], InputError)
    assert str(outcomes[2]) == "file bad: not UTF-8"
    tries = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert tries == {"well": "x", "killed": "x", "fails": "x"}, "who waits decides about more"


def test_a_caller_that_stops_listening_leaves_no_task_running(tmp_path):
    def beats(item: int) -> int:
        for beat in range(item):
            (tmp_path / f"beat{beat}").touch()
            time.sleep(0.1)
        return item

    def num_beats():
        return len(list(tmp_path.iterdir()))

    with RayPool() as pool:
        for item in [600, 600]:  # a minute of beats
            pool.submit(beats, item)
        await_true(lambda: num_beats() > 0)
    seen = -1
    while seen < num_beats():
        seen = num_beats()
        time.sleep(1.5)
    assert seen < 600


def await_true(condition, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


def _texts(folder: Path) -> Path:
    texts = folder / "texts"
    texts.mkdir()
    for number in range(6):
        words = " ".join(f"word{(number * 7 + index * index) % 91}" for index in range(400))
        (texts / f"{number}.txt").write_text(words)
    return texts


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("shuffle", [False, True])
def test_shards_have_the_same_bytes_as_without_ray(tmp_path, shuffle):
    config = DataConfig(
        input=(str(_texts(tmp_path) / "*.txt"), "python:moebius.tests.small_corpus:pages"),
        tokenizer="bytes",
        validation_fraction=0.3,
        shuffle_documents=shuffle,
        split_bytes=4000,
    )
    prepare(config, tmp_path / "serial")
    with RayPool() as pool:
        prepare(config, tmp_path / "ray", pool=pool)
    files = _files(tmp_path / "serial")
    assert _files(tmp_path / "ray") == files
    assert any(name.endswith(".arrow") for name in files)
