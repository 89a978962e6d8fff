"""A damaged newest checkpoint costs the steps since the previous one, never the run; a checkpoint that
cannot be read back is never committed.
"""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from damage import flip
from meshes import meshed, saver_in
from world import run_ranks

from moebius.distributed.checkpoint import checkpointer as checkpointer_module
from moebius.distributed.checkpoint import loading
from moebius.distributed.checkpoint import writing as checkpoint_writing
from moebius.distributed.checkpoint.checkpoint_folder import (
    CheckpointConfig,
    CheckpointFolder,
    DamagedCheckpoint,
)
from moebius.distributed.checkpoint.format import (
    CheckpointError,
    CorruptCheckpointError,
    list_checkpoints,
    open_verified,
)
from moebius.distributed.checkpoint.recovery import newest_whole

STEPS = [10, 20, 30]
NEWEST = "step_00000030"


def state_of(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(16, 8, generator=generator) for name in ("a", "b", "c")}


def save_steps(directory, steps):
    with meshed() as (process, mesh):
        saver = saver_in(directory, process, mesh, keep_last=3)
        for step in steps:
            saver.save(step, state_of(step), {}, {"step": step})
        saver.wait()


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(save_steps, 2, directory, STEPS)
    return directory


@pytest.fixture
def saved(saved_once, tmp_path):
    """Checkpoints of three steps that two ranks wrote."""
    shutil.copytree(saved_once, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


DAMAGES = {"flip": flip, "truncate": truncate, "remove": Path.unlink}


def recover(directory):
    """What a rank resumes from: the step, the damaged checkpoints, and their new paths."""
    with meshed() as (process, mesh):
        saver = saver_in(directory, process, mesh, keep_last=3)
        try:
            found = saver.newest_whole()
        except CheckpointError as error:
            return str(error)
        assert found is not None
        renamed = saver.adopt(found)
        names = [each.path.name for each in renamed]
        return found.path.name, found.meta.meta["step"], list(found.damaged), names


@pytest.mark.slow
@pytest.mark.fault("F16")
@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("flip", "meta.json"),
        ("truncate", "__0_0.distcp"),
        ("truncate", "index.json"),
        ("remove", "__1_0.distcp"),
        ("remove", "manifest.json"),
    ],
)
def test_the_one_before_is_taken_by_all_ranks(saved, how, name):
    DAMAGES[how](saved / NEWEST / name)
    first, second = run_ranks(recover, 2, saved)
    assert first[:3] == second[:3]
    assert first[:2] == ("step_00000020", 20)
    assert [each.step for each in first[2]] == [30]
    assert name in first[2][0].why
    assert "delete the directory" not in first[2][0].why  # it was dealt with: nothing to do
    (aside,) = first[3]
    assert aside.startswith(f"{NEWEST}.damaged-2")
    assert sorted(path.name for path in saved.iterdir()) == [
        "step_00000010",
        "step_00000020",
        aside,
    ]
    assert run_ranks(recover, 1, saved)[0][:3] == ("step_00000020", 20, [])


@pytest.mark.fault("F16")
def test_several_damaged_ones_are_passed_over(saved):
    for step in ("step_00000020", NEWEST):
        flip(saved / step / "index.json")
    name, _, damaged, aside = run_ranks(recover, 1, saved)[0]
    assert name == "step_00000010"
    assert [each.step for each in damaged] == [30, 20]
    assert len(aside) == 2


@pytest.mark.fault("F16")
def test_with_none_left_nothing_is_moved_and_the_error_lists_all(saved):
    for number, checkpoint in enumerate(list_checkpoints(saved)):
        tuple(DAMAGES.values())[number](checkpoint.path / "__0_0.distcp")
    before = sorted(saved.rglob("*"))
    told = run_ranks(recover, 2, saved)
    assert told[0] == told[1]
    assert sorted(saved.rglob("*")) == before
    places = [told[0].index(f"step_000000{step}") for step in (30, 20, 10)]
    assert places == sorted(places)
    assert "no intact checkpoint left" in told[0]
    assert "does not silently restart from step 0" in told[0]


def test_a_run_whose_checkpoints_were_all_set_aside_does_not_start_anew(saved):
    for checkpoint in list_checkpoints(saved):
        checkpoint.path.rename(f"{checkpoint.path}.damaged-20260101-000000")
    assert "step_00000030.damaged-20260101-000000 was set aside" in run_ranks(recover, 1, saved)[0]


def test_what_is_read_wrongly_once_is_not_called_damage(saved):
    newest, damaged = run_ranks(read_wrongly_once, 2, saved)[0]
    assert (newest, damaged) == (NEWEST, 0)


def read_wrongly_once(directory):
    """Rank 1 reads nonsense of what it looks at first, and rank 0 reads the same file rightly."""
    original = loading.damaged_files
    with meshed() as (process, mesh):
        if process.rank == 1:
            share = sorted(path.name for path in (directory / NEWEST).iterdir())[1::2]
            loading.damaged_files = lambda stored, names, on_bytes=None: (
                ["nonsense"] if set(names) <= set(share) else original(stored, names, on_bytes)
            )
        found = newest_whole(directory, mesh.world_group)
        assert found is not None
        return found.path.name, len(found.damaged)


def test_what_is_not_about_damage_is_not_passed_over(saved, monkeypatch):
    assert "no memory" in run_ranks(without_memory, 2, saved)[0]
    assert [each.step for each in list_checkpoints(saved)] == STEPS


def without_memory(directory):
    def lack(*_, **__):
        raise MemoryError("no memory")

    with meshed() as (_, mesh):
        loading.open_checkpoint = lack
        with pytest.raises(CheckpointError) as caught:
            newest_whole(directory, mesh.world_group)
        assert not isinstance(caught.value, CorruptCheckpointError)
        return str(caught.value)


def test_a_stale_generation_sets_nothing_aside(saved):
    fence = saved.parent / "generation"
    fence.write_text("9")
    folder = CheckpointFolder(saved, CheckpointConfig(), 1, fence)
    with pytest.raises(CheckpointError, match="generation 1 may not"):
        folder.set_aside([DamagedCheckpoint(30, saved / NEWEST, "why")])
    assert (saved / NEWEST).is_dir()


# Reading back -----------------------------------------------------------------------------------


def save_on_a_bad_disk(directory):
    """The disk changes a byte of what rank 1 writes, after it was synced."""
    seal = checkpointer_module.seal

    def seal_and_damage(path, *arguments):
        num_bytes = seal(path, *arguments)
        flip(path / "__1_0.distcp")
        return num_bytes

    with meshed() as (process, mesh):
        saver = saver_in(directory, process, mesh, keep_last=1)
        checkpointer_module.seal = seal_and_damage
        saver.save(40, state_of(40), {}, {"step": 40})
        try:
            saver.wait()
        except CheckpointError as error:
            return str(error), saver.poll()[0].error
    return None


def test_what_does_not_read_back_is_never_committed(saved):
    for told, record in run_ranks(save_on_a_bad_disk, 2, saved):
        assert told == record
        assert "reads back differently from what was written; is the disk faulty?" in told
        assert "__1_0.distcp does not match its checksum" in told
        assert "step_00000030 is still there" in told
    assert [each.step for each in list_checkpoints(saved)] == STEPS
    assert not list(saved.glob("*.tmp"))
    open_verified(saved / NEWEST)


# A store that cannot be written ------------------------------------------------------------------


def save_on_a_full_disk(directory, on_failure, mended):
    """The first save finds no space; the second, if `mended`, does."""
    original = checkpoint_writing.write_synced

    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with meshed() as (process, mesh):
        saver = saver_in(directory, process, mesh, keep_last=3, on_failure=on_failure)
        checkpoint_writing.write_synced = full
        saver.save(40, state_of(40), {}, {"step": 40})
        saver._join()
        must_stop = saver.must_stop
        if mended:
            checkpoint_writing.write_synced = original
        said = []
        for act in (lambda: saver.save(50, state_of(50), {}, {"step": 50}), saver.wait):
            try:
                act()
            except CheckpointError as error:
                said.append(str(error))
        return must_stop, said, [(each.step, each.error is None) for each in saver.poll()]


# on_failure, whether the second save finds space, must_stop, saves, steps that are there, and the error
FULL_DISKS = {
    "a failed save": ("go_on", True, False, [(40, False), (50, True)], [20, 30, 50], []),
    "a failed last save": (
        *("go_on", False, False, [(40, False), (50, False)], STEPS),
        ["step 50 was not saved", "No space left on device: ", "index.json", "MiB free"],
    ),
    "told at once": ("stop", True, True, [(40, False)], STEPS, ["step 40 was not saved"]),
}


@pytest.mark.parametrize("name", FULL_DISKS)
def test_a_full_disk_ends_a_run_only_if_it_shall_or_the_last_save_fails(saved, name):
    on_failure, mended, stops, saves, steps, words = FULL_DISKS[name]
    for must_stop, said, records in run_ranks(save_on_a_full_disk, 2, saved, on_failure, mended):
        assert (must_stop, records, len(said)) == (stops, saves, bool(words))
        assert all(word in said[0] for word in words)
    assert [each.step for each in list_checkpoints(saved)] == steps


def test_one_that_cannot_be_renamed_keeps_its_name(saved, caplog):
    gone = DamagedCheckpoint(40, saved / "step_00000040", "why")
    assert CheckpointFolder(saved, CheckpointConfig(), 1, None).set_aside([gone]) == [gone]
    assert "could not be set aside: No such file" in caplog.text
