"""Tests data preparation as Ray tasks: failures of workers are reported, and the bytes stay the same."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import wait_for

from moebius.cluster.ray_tasks import RayPool, tasks_for
from moebius.data_pipeline.errors import InputError
from moebius.data_pipeline.make.pools import LocalPool, WorkerDiedError
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]


def _outcomes(pool: RayPool, function: Any, items: list[Any]) -> list[tuple[int, Any]]:
    """Returns the outcome of each item, in order of completion."""
    numbers = {pool.submit(function, item): index for index, item in enumerate(items)}
    outcomes = [pool.wait() for _ in items]
    return [(numbers[number], outcome) for number, outcome in outcomes]


def test_results_come_as_they_are_done(tmp_path):
    def first_is_last(item: int) -> int:
        """Item 0 ends half a second after the others."""
        while item == 0 and len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        time.sleep(0.5 if item == 0 else 0.0)
        (tmp_path / str(item)).touch()
        return item * 10

    with RayPool() as pool:
        results = _outcomes(pool, first_is_last, [0, 1, 2])
    assert sorted(results) == [(0, 0), (1, 10), (2, 20)]
    assert results[-1][0] == 0, "completion order, not item order"


def test_the_capacity_follows_the_cluster():
    import ray

    with RayPool() as pool, RayPool(capacity=3) as limited:
        assert pool.capacity == tasks_for(int(ray.cluster_resources()["CPU"]))
        assert limited.capacity == 3
    assert [tasks_for(cpus) for cpus in (0, 1, 2, 15, 16, 1000)] == [1, 1, 2, 15, 17, 1062]


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
        wait_for(num_beats, what="a beat")
    seen = -1
    while seen < num_beats():
        seen = num_beats()
        time.sleep(1.5)
    assert seen < 600


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
    texts, ids = _texts(tmp_path), Path(__file__).parents[1] / "recorded/tokens/megatron.bin"
    config = PrepareConfig(
        input=(f"{texts}/*.txt", "python:moebius.tests.small_corpus:pages", f"tokens:{ids}"),
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


def _serial(folder: Path, *, split_bytes: int) -> tuple[PrepareConfig, dict[str, bytes]]:
    """Returns what to prepare, and the files that one process makes of it."""
    config = PrepareConfig(
        input=(str(_texts(folder) / "*.txt"),),
        vocab_size=300,
        validation_fraction=0.3,
        segment_tokens=1000,
        split_bytes=split_bytes,
    )
    prepare(config, folder / "serial")
    return config, _files(folder / "serial")


# ---- F18: whatever is killed, the bytes are the same

_DRIVER = """
import sys
from moebius.cluster.ray_tasks import RayPool
from moebius.cluster.places.ray_session import connected
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.make.prepare import prepare

def tell(progress):
    print(progress.stage, flush=True)

config = PrepareConfig.model_validate_json(sys.argv[1])
with connected(sys.argv[3]), RayPool(capacity=4) as pool:
    prepare(config, sys.argv[2], pool=pool, on_progress=tell)
"""


class KillingOnce(RayPool):
    """Makes the tasks of two units kill their processes, once each."""

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder

    def submit(self, function, item, /):
        folder, name = self._folder, function.__name__

        def dying(item):
            number = getattr(getattr(item, "unit", None), "number", "")
            mark = folder / f"{name}-{number}"
            if number in (1, 4) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return function(item)

        return super().submit(dying, item)


@pytest.mark.fault("F18")
def test_killed_tasks_and_a_killed_driver_change_no_byte(tmp_path, cluster):
    """Tasks die once; then a preparation dies with its driver, and another one continues."""
    config, files = _serial(tmp_path, split_bytes=4000)
    (tmp_path / "marks").mkdir()
    with KillingOnce(tmp_path / "marks") as pool:
        prepare(config, tmp_path / "tasks", pool=pool)
    marks = {path.name for path in (tmp_path / "marks").iterdir()}
    assert marks >= {"scan_unit-1", "scan_unit-4", "tokenise_unit-1", "tokenise_unit-4"}
    assert _files(tmp_path / "tasks") == files

    arguments = [config.model_dump_json(), str(tmp_path / "driver"), cluster.address]
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER, *arguments], stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        for _ in range(9):
            assert driver.stdout.readline(), "it has ended by itself"
        driver.kill()
    with RayPool() as pool:
        prepare(config, tmp_path / "driver", pool=pool)
    assert _files(tmp_path / "driver") == files


_NODES = """
import os, signal, sys, time
from pathlib import Path
from moebius.cluster.ray_tasks import RayPool
from moebius.cluster.places.simulated import simulated_cluster
from moebius.data_pipeline.prepare_config import PrepareConfig
from moebius.data_pipeline.make.prepare import prepare

class KillingANode(RayPool):
    def submit(self, function, item, /):
        mark, name = Path(sys.argv[3]), function.__name__

        def ending(item):
            import ray
            if ray.util.get_node_ip_address() != "127.0.0.2" and name == "tokenise_unit":
                if not mark.exists():
                    mark.touch()
                    os.kill(os.getppid(), signal.SIGKILL)  # the raylet: the node
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(item)

        return super().submit(ending, item)

config = PrepareConfig.model_validate_json(sys.argv[1])
with simulated_cluster(2, cpus_per_node=2), KillingANode() as pool:
    import ray
    prepare(config, sys.argv[2], pool=pool)
    deadline = time.monotonic() + 100
    while all(node["Alive"] for node in ray.nodes()):
        assert time.monotonic() < deadline, "both nodes are there"
        time.sleep(0.2)
"""


@pytest.mark.fault("F18")
def test_a_killed_node_changes_no_byte(tmp_path):
    """One of two nodes dies at its first shard; the other one takes over its work."""
    config, files = _serial(tmp_path, split_bytes=1000)
    arguments = [config.model_dump_json(), str(tmp_path / "nodes"), str(tmp_path / "killed")]
    found = subprocess.run(
        [sys.executable, "-c", _NODES, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "killed").exists()
    assert _files(tmp_path / "nodes") == files


# ---- F19: what crashes is left out, as by local processes


@pytest.mark.fault("F19")
@pytest.mark.parametrize("poison", ["PANIC", "EXIT"])
def test_poison_is_quarantined_and_the_rest_has_the_same_bytes(tmp_path, poison):
    texts = _texts(tmp_path)
    (texts / "2.txt").write_text(f"a POISON {poison} text")
    config = PrepareConfig(
        input=(str(texts / "*.txt"),),
        tokenizer="bytes",
        segment_tokens=2000,
        filters=("moebius.tests.poison:keep_what_does_no_harm",),
    )
    with LocalPool(2) as local:
        manifest = prepare(config, tmp_path / "local", pool=local)
    with RayPool() as pool:
        found = prepare(config, tmp_path / "ray", pool=pool)
    quarantined = [one.completion.quarantined for one in (manifest, found) if one.completion]
    assert [[split.input for split in of_one] for of_one in quarantined] == [
        [f"{texts}/2.txt[0:{(texts / '2.txt').stat().st_size}]"]
    ] * 2
    assert _files(tmp_path / "ray") == _files(tmp_path / "local")
