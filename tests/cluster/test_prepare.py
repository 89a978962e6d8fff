"""Data preparation as Ray tasks: every item once, whatever happens to the workers."""

import os
import signal
import time
from typing import Any

import pytest

from moebius.cluster.prepare import ATTEMPTS, ray_runner
from moebius.data_pipeline.config import DataConfig
from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.making.prepare import prepare

pytestmark = pytest.mark.usefixtures("cluster")


def test_every_item_once_as_they_are_done():
    def slow_first(seconds: float) -> float:
        time.sleep(seconds)
        return seconds * 10

    items = [2.0, 0.0, 0.1]
    results = list(ray_runner()(slow_first, items))
    assert sorted(results) == [(0, 20.0), (1, 0.0), (2, 1.0)]
    assert results[-1][0] == 0, "completion order, not item order"


def test_no_item_no_task():
    assert list(ray_runner()(len, [])) == []


def test_no_more_tasks_are_out_than_allowed(tmp_path):
    def count_company(index: int) -> int:
        (tmp_path / f"{index}").touch()
        time.sleep(0.2)
        company = len(list(tmp_path.iterdir()))
        (tmp_path / f"{index}").unlink()
        return company

    company = [result for _, result in ray_runner(in_flight=2)(count_company, list(range(6)))]
    assert max(company) == 2


def test_a_worker_that_is_killed_is_replaced(tmp_path):
    def dies_twice(item: int) -> int:
        with open(tmp_path / f"tries{item}", "a") as file:
            file.write("x")
        if item == 1 and (tmp_path / "tries1").stat().st_size < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return item * item

    assert sorted(ray_runner()(dies_twice, [0, 1, 2])) == [(0, 0), (1, 1), (2, 4)]
    assert (tmp_path / "tries1").read_text() == "xxx"


def test_a_poison_item_ends_with_its_own_error_after_three_tries(tmp_path):
    def poisoned(item: str) -> str:
        with open(tmp_path / item, "a") as file:
            file.write("x")
        if item == "bad":
            raise InputError("file bad: not UTF-8")
        return item

    with pytest.raises(InputError, match="file bad: not UTF-8") as caught:
        list(ray_runner()(poisoned, ["good", "bad"]))
    assert caught.value.__notes__ == ["item 2 of 2, tried 3 times: 'bad'"]
    assert (tmp_path / "bad").read_text() == "x" * ATTEMPTS


def test_a_caller_that_stops_listening_leaves_no_task_running(tmp_path):
    def beats(item: int) -> int:
        for beat in range(item):
            (tmp_path / f"beat{beat}").touch()
            time.sleep(0.1)
        return item

    def num_beats():
        return len(list(tmp_path.iterdir()))

    runner: Any = ray_runner()(beats, [0, 600, 600])  # a minute of beats
    assert next(runner)[0] == 0
    await_true(lambda: num_beats() > 0)
    runner.close()
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


def test_shards_have_the_same_bytes_as_without_ray(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(6):
        words = " ".join(f"word{(number * 7 + index * index) % 91}" for index in range(400))
        (texts / f"{number}.txt").write_text(words)
    config = DataConfig(
        input=(str(texts / "*.txt"),), tokenizer="bytes", vocab_size=257, validation_fraction=0.3
    )
    prepare(config, tmp_path / "serial")
    prepare(config, tmp_path / "ray", run=ray_runner())
    files = {
        path.name: path.read_bytes() for path in (tmp_path / "serial").iterdir() if path.is_file()
    }
    assert {
        path.name: path.read_bytes() for path in (tmp_path / "ray").iterdir() if path.is_file()
    } == files
    assert any(name.endswith(".arrow") for name in files)
