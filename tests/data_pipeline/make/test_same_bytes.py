"""F18: manifests, shards, indices and tokenizer have the same bytes for any number of processes, and
after kill -9 of workers or of the whole preparation at any time.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from meddling import NothingToRun, StoppedError, check_nothing_is_half_there, files_of
from small_corpus import sentences, write_jsonl

from moebius.data_pipeline.make.pools import LocalPool
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.make.tasks import UNFINISHED
from moebius.data_pipeline.make.units import PrepareProgress
from moebius.data_pipeline.manifest import Completion, DatasetManifest, is_prepared, read_manifest
from moebius.data_pipeline.prepare_config import PrepareConfig, SourceConfig


@pytest.fixture(autouse=True, scope="module")
def _no_fsync():
    """Skips fsync: a killed process loses nothing that it wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


_SHUFFLES = {False: "in order", True: "shuffled"}


@dataclass(frozen=True)
class Undisturbed:
    """Returns the files of an undisturbed preparation."""

    config: PrepareConfig
    files: dict[str, bytes]
    num_events: int  # calls of on_progress
    manifest: DatasetManifest

    @property
    def end(self) -> Completion:
        """Returns the last manifest."""
        assert self.manifest.completion is not None
        return self.manifest.completion


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[bool, Undisturbed]:
    """Two sources of six files, prepared with and without shuffling."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(6):
        name = f"{'ab'[number % 2]}-{number}.jsonl"
        write_jsonl(folder / name, sentences(number, 8) + sentences(99, 1))
    found = {}
    for shuffle, name in _SHUFFLES.items():
        config = PrepareConfig(
            sources=tuple(
                SourceConfig(name=name, input=(f"{folder}/{name}-*.jsonl",)) for name in "ab"
            ),
            vocab_size=300,
            batch_tokens=200,
            segment_tokens=1500,
            split_bytes=2500,
            validation_fraction=0.2,
            shuffle_documents=shuffle,
        )
        events: list[PrepareProgress] = []
        manifest = prepare(config, folder / name, on_progress=events.append)
        assert len(manifest.sealed) >= 4
        found[shuffle] = Undisturbed(config, files_of(folder / name), len(events), manifest)
    totals = [(one.end.num_documents, one.end.num_tokens) for one in found.values()]
    assert totals[0] == totals[1], "a shuffle loses or repeats nothing"
    return found


# ---- any number of processes


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 3])
def test_any_number_of_processes_writes_the_same_bytes(undisturbed, tmp_path, num_workers):
    with LocalPool(num_workers) as pool:
        for shuffle, expected in undisturbed.items():
            prepare(expected.config, tmp_path / _SHUFFLES[shuffle], pool=pool)
            assert files_of(tmp_path / _SHUFFLES[shuffle]) == expected.files


# ---- interruptions


@pytest.mark.parametrize(
    ("shuffle", "every"),
    [
        *((False, 11), (True, 29)),
        *(pytest.param(shuffle, 3, marks=pytest.mark.nightly) for shuffle in (False, True)),
    ],
)
def test_stopping_the_coordinator_at_many_moments_changes_nothing(
    undisturbed, tmp_path, shuffle, every
):
    """The last part of each source has only repeats, so its unit writes no document."""
    expected, left = undisturbed[shuffle], 0

    def tell(progress: PrepareProgress) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise StoppedError

    for event in range(1, expected.num_events, every):
        left, folder = event, tmp_path / str(event)
        with pytest.raises(StoppedError):
            prepare(expected.config, folder, on_progress=tell)
        check_nothing_is_half_there(folder, expected.files)
        prepare(expected.config, folder)
        assert files_of(folder) == expected.files


@pytest.mark.parametrize("shuffle", [False, True])
def test_work_that_is_damaged_before_it_goes_on_is_done_again(undisturbed, tmp_path, shuffle):
    """Damages every record so far, by one bit or its last byte."""
    expected = undisturbed[shuffle]
    num_events = 0

    def stop(progress: PrepareProgress) -> None:
        nonlocal num_events
        num_events += 1
        if num_events == expected.num_events - 8:
            raise StoppedError

    with pytest.raises(StoppedError):
        prepare(expected.config, tmp_path / "d", on_progress=stop)
    kinds = ["scan.npz", "fates.npy", "sample.jsonl", "spill.json" if shuffle else "shards.json"]
    for kind in kinds:
        paths = sorted((tmp_path / "d" / UNFINISHED).glob(f"*.{kind}"))
        assert len(paths) > 3
        for number, path in enumerate(paths):
            data = bytearray(path.read_bytes() or b"?")
            data[len(data) // 2] ^= 2
            path.write_bytes(data if number % 2 else data[:-1])
    prepare(expected.config, tmp_path / "d")
    assert files_of(tmp_path / "d") == expected.files


# ---- kill -9


_PROGRAM = """
import sys
from moebius.data_pipeline.make.pools import LocalPool, SerialPool
from moebius.data_pipeline.make.prepare import prepare
from moebius.data_pipeline.prepare_config import PrepareConfig

def tell(progress):
    print(progress.stage, flush=True)

config = PrepareConfig.model_validate_json(sys.argv[1])
with LocalPool(2) as pool:
    for folder in sys.argv[2:]:
        prepare(config, folder, pool=pool, on_progress=tell)
"""


@contextmanager
def _preparing(config: PrepareConfig, *folders: Path) -> Iterator[subprocess.Popen[str]]:
    """Runs a preparation and two workers in their own process group."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, config.model_dump_json(), *map(str, folders)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            yield program
        finally:
            _kill_group(program)


def _kill_group(program: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError):  # all processes have ended
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


def _await_event(program: "subprocess.Popen[str]", number: int) -> None:
    assert program.stdout is not None
    for _ in range(number):
        if not program.stdout.readline():
            return


@pytest.mark.fault("F18")
@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 10), marks=pytest.mark.nightly)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_killing_the_whole_preparation_at_any_moment_changes_nothing(
    undisturbed, tmp_path, shuffle, seeds
):
    """Seeds choose when to kill, once or twice; a new process then finishes."""
    expected = undisturbed[shuffle]
    folders = [tmp_path / str(seed) for seed in seeds]
    num_unfinished = 0
    for seed, folder in zip(seeds, folders, strict=True):
        rng = random.Random(f"{seed} {shuffle}")
        for _ in range(1 + seed % 2):
            with _preparing(expected.config, folder) as program:
                _await_event(program, rng.randrange(1, expected.num_events - 1))
                time.sleep(rng.choice([0, rng.random() / 100]))  # also between two events
                _kill_group(program)
            check_nothing_is_half_there(folder, expected.files)
            num_unfinished += (folder / UNFINISHED / "plan.json").exists()
    assert num_unfinished >= len(seeds), "they came too late"
    with _preparing(expected.config, *folders) as program:
        assert program.stdout is not None
        program.stdout.read()
        assert program.wait() == 0
    for folder in folders:
        assert files_of(folder) == expected.files
        assert not (folder / UNFINISHED).exists()


@pytest.mark.fault("F18")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killing_workers_at_any_moment_changes_nothing(undisturbed, tmp_path, seed):
    rng = random.Random(seed)
    expected = undisturbed[seed % 2 == 0]
    with _preparing(expected.config, tmp_path / "d") as program:
        _await_event(program, 1 + rng.randrange(expected.num_events // 2))
        num_killed = 0
        for pause in (0.0, 0.3):
            time.sleep(pause + rng.random() / 50)
            for worker in rng.sample(workers := _workers_of(program.pid), min(1, len(workers))):
                os.kill(worker, signal.SIGKILL)
                num_killed += 1
        assert program.stdout is not None
        program.stdout.read()
        assert program.wait() == 0
    assert num_killed
    assert files_of(tmp_path / "d") == expected.files


def _workers_of(process: int) -> list[int]:
    """Returns a pool's processes: spawned children, without Python's resource tracker."""
    children = Path(f"/proc/{process}/task/{process}/children")
    found = []
    for child in children.read_text().split() if children.exists() else ():
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
            found.append(int(child))
    return found


# ---- two at once


def test_a_second_preparation_of_a_folder_waits_and_gets_what_the_first_has_made(
    undisturbed, tmp_path
):
    expected = undisturbed[False]
    first_may_go_on, told = threading.Event(), []

    def hold(progress: PrepareProgress) -> None:
        if progress.stage == "tokenising":
            assert first_may_go_on.wait(30)

    def second(progress: PrepareProgress) -> None:
        told.append(progress.stage)
        first_may_go_on.set()

    with ThreadPoolExecutor(1) as thread:
        began = thread.submit(prepare, expected.config, tmp_path / "d", on_progress=hold)
        while not (tmp_path / "d" / UNFINISHED / "plan.json").exists():
            assert not began.done()
            time.sleep(0.005)
        found = prepare(expected.config, tmp_path / "d", pool=NothingToRun(), on_progress=second)
        assert began.result() == found == expected.manifest
    assert told == ["waiting for another process"]
    assert files_of(tmp_path / "d") == expected.files
    assert not (tmp_path / "d" / UNFINISHED).exists()


@pytest.mark.slow
def test_processes_that_wait_take_over_from_one_that_is_killed(undisturbed, tmp_path):
    expected = undisturbed[False]
    with _preparing(expected.config, tmp_path / "d") as first:
        _await_event(first, expected.num_events // 2)
        os.killpg(first.pid, signal.SIGSTOP)  # holds the lock, and does nothing
        with (
            _preparing(expected.config, tmp_path / "d") as second,
            _preparing(expected.config, tmp_path / "d") as third,
        ):
            for waiting in (second, third):
                assert waiting.stdout is not None
                assert waiting.stdout.readline() == "waiting for another process\n"
            assert not _is_complete(tmp_path / "d")
            _kill_group(first)
            said = [waiting.stdout.read() for waiting in (second, third) if waiting.stdout]
            assert [second.wait(), third.wait()] == [0, 0]
    assert sorted(map(bool, said)) == [False, True], "one of them did the work, and one only"
    assert files_of(tmp_path / "d") == expected.files


def _is_complete(folder: Path) -> bool:
    return is_prepared(folder) and read_manifest(folder).complete
