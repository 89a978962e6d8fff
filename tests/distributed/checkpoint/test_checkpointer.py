"""Failing saves, stale generations and damage do no harm; what was saved comes back bit for bit."""

import errno
import json
import os
import pickle
import resource
import shutil
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from damage import flip, reseal
from meshes import meshed, saver_in
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as plain_dcp_load
from world import RankFailed, run_ranks

from moebius.distributed.checkpoint import checkpointer as checkpoint
from moebius.distributed.checkpoint import format as checkpoint_files
from moebius.distributed.checkpoint import loading as checkpoint_loading
from moebius.distributed.checkpoint.checkpoint_folder import CheckpointConfig, CheckpointFolder
from moebius.distributed.checkpoint.checkpointer import Checkpointer
from moebius.distributed.checkpoint.format import (
    CheckpointError,
    CheckpointManifest,
    CheckpointMeta,
    CorruptCheckpointError,
    FileSum,
    StaleGenerationError,
    digest_of_sums,
    latest,
    list_checkpoints,
    open_verified,
)
from moebius.distributed.checkpoint.loading import load
from moebius.distributed.checkpoint.recovery import newest_whole
from moebius.distributed.layout import Layout, MeshConfig, plan_layout
from moebius.distributed.local_shard import block_shard
from moebius.distributed.mesh import Mesh, build_mesh
from moebius.distributed.process.process import Process, start_process

SHARDED = ["experts.w_up", "optimizer.exp_avg.experts.w_up"]
META = {"step": 50, "cursor": {"samples": 1234}, "history": [1.5, None, "ä"]}


def whole_state(seed=0):
    """The state of one process that holds everything: many dtypes, a number, an empty tensor, 8
    experts.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(11, 4, generator=generator),
        "norm.scale": torch.randn(5, generator=generator).bfloat16(),
        "optimizer.step": torch.tensor(50 + seed),
        "rng": torch.randint(0, 255, (16,), generator=generator, dtype=torch.uint8),
        "double": torch.randn(2, 3, 2, generator=generator, dtype=torch.float64).transpose(
            0, 1
        ),  # not contiguous
        "empty": torch.zeros(0, 3),
        "experts.w_up": torch.randn(8, 3, 2, generator=generator),
        "optimizer.exp_avg.experts.w_up": torch.randn(8, 3, 2, generator=generator).half(),
    }


def local_part(state, mesh):
    """A rank's part of a state."""
    block = 8 // mesh.layout.ep
    first = mesh.coordinates.ep * block
    return {
        name: tensor[first : first + block].clone() if name in SHARDED else tensor
        for name, tensor in state.items()
    }


def held(mesh):
    """A rank's shards of the tensors with experts."""
    experts = 8 // mesh.layout.ep
    return {
        name: block_shard(
            (8, 3, 2),
            0,
            mesh.coordinates.ep * experts,
            experts,
            ranks_per_copy=mesh.layout.ep,
            has_experts=True,
        )
        for name in SHARDED
    }


def blank(state):
    return {name: torch.full_like(tensor, 77) for name, tensor in state.items()}


def equal(left, right):
    return all(
        torch.equal(left[name], right[name]) and left[name].dtype == right[name].dtype
        for name in right
    )


@dataclass(frozen=True)
class Rank:
    """A rank with a mesh and a checkpointer."""

    process: Process
    mesh: Mesh
    checkpointer: Checkpointer

    def save(self, step, seed=0):
        self.checkpointer.save(
            step, local_part(whole_state(seed), self.mesh), held(self.mesh), META
        )


@contextmanager
def rank_in(directory, ep=1, **options):
    with meshed(ep=ep) as (process, mesh):
        saver = saver_in(directory, process, mesh, **({"generation": 3} | options))
        yield Rank(process, mesh, saver)


def save_steps(directory, ep, steps, options=None):
    with rank_in(directory, ep, **(options or {})) as rank:
        for step in steps:
            rank.save(step, seed=step)
        rank.checkpointer.wait()
        return rank.checkpointer.poll()


def error_of_load(path, ep, change=None):
    """The error on this rank, and whether what was there before is untouched."""
    with rank_in(path.parent.parent / "other", ep) as rank:
        part = blank(local_part(whole_state(), rank.mesh))
        if change is not None:
            change(part)
        before = {name: tensor.clone() for name, tensor in part.items()}
        try:
            load(path, part, held(rank.mesh), mesh=rank.mesh)
        except CheckpointError as error:
            assert equal(part, before)
            return type(error).__name__, str(error)
    return None


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    run_ranks(save_steps, 2, directory, 2, [50])
    return directory


@pytest.fixture
def saved(saved_once, tmp_path):
    """A checkpoint of step 50 that two ranks with ep 2 wrote; each test has its own copy."""
    shutil.copytree(saved_once, tmp_path / "checkpoints")
    return tmp_path / "checkpoints" / "step_00000050"


# What is written ---------------------------------------------------------------------------------------------------


def load_by_dcp(path, part):
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    plain_dcp_load(part, checkpoint_id=path, planner=planner, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("read", [load, load_by_dcp])
def test_one_process_reads_all_of_it_and_so_does_dcp(saved, read):
    part = blank(whole_state())
    assert read(saved, part) in (META, None)
    assert equal(part, whole_state(50))


@pytest.mark.parametrize(("world_size", "ep"), [(1, 1), (4, 2)])
def test_a_save_commits_reports_and_divides_the_work(tmp_path, world_size, ep):
    """Every rank writes something, and nothing is written twice."""
    records = run_ranks(save_steps, world_size, tmp_path, ep, [50])
    path = tmp_path / "step_00000050"
    assert latest(tmp_path) == path
    assert list(tmp_path.iterdir()) == [path]
    stored = open_verified(path)
    meta, tensors = stored.meta, stored.index.tensors
    assert (meta.step, meta.generation, meta.meta) == (50, 3, META)
    assert (meta.layout.dp_replicate, meta.layout.ep) == (world_size // ep, ep)
    assert meta.num_experts == dict.fromkeys(SHARDED, 8)
    files = {chunk.file for tensor in tensors.values() for chunk in tensor.chunks}
    assert files == {f"__{rank}_0.distcp" for rank in range(world_size)}
    assert {name: len(tensor.chunks) for name, tensor in tensors.items()} == {
        name: ep if name in SHARDED else 1 for name in whole_state()
    }
    assert len(records) == world_size
    for [record] in records:
        assert (record.step, record.path, record.error) == (50, path, None)
        assert 0 < record.blocked_s <= record.seconds
        assert record.num_bytes == sum(
            file.stat().st_size for file in path.iterdir() if file.name != "manifest.json"
        )


@pytest.mark.parametrize("seed", range(5))
def test_the_owners_are_those_of_the_slow_loop(seed):
    """For every tensor, look at all copies, and take the first of those whose ranks have the least
    to write.
    """
    random = Random(seed)
    ep = random.choice([1, 2, 3, 4])
    shard = ep * random.choice([1, 2, 3])
    world_size = shard * random.choice([1, 2, 5])
    signature = {
        f"tensor{index}": (
            (random.randint(1, 20) * 24,),
            "float32",
            random.choice([1, ep, shard]),
            False,
        )
        for index in range(60)
    }
    load, expected = [0.0] * world_size, {}
    for name in sorted(
        signature, key=lambda name: (-signature[name][2], -signature[name][0][0], name)
    ):
        (size,), _, ranks, _ = signature[name]
        first = min(range(0, world_size, ranks), key=lambda rank: max(load[rank : rank + ranks]))
        expected[name] = first // ranks
        for rank in range(first, first + ranks):
            load[rank] += size / ranks
    assert checkpoint.owners_of(signature, world_size) == expected
    assert checkpoint.owners_of(dict(reversed(signature.items())), world_size) == expected


# In the background -------------------------------------------------------------------------------------------------


def newest(directory) -> Path:
    found = latest(directory)
    assert found is not None
    return found


def save_and_mutate(directory, ep):
    """The write is held back until the tensors have been overwritten."""
    may_write, write_tensors = threading.Event(), checkpoint.write_tensors

    def held_back(*args):
        assert may_write.wait(10)
        return write_tensors(*args)

    checkpoint.write_tensors = held_back
    with rank_in(directory, ep) as rank:
        part = local_part(whole_state(), rank.mesh)
        rank.checkpointer.save(50, part, held(rank.mesh), META)
        assert rank.checkpointer.poll() == []
        for tensor in part.values():
            tensor.fill_(13)
        pending = latest(directory) is None
        may_write.set()
        rank.checkpointer.wait()
        return pending, [record.step for record in rank.checkpointer.poll()]


def test_tensors_may_change_while_they_are_written(tmp_path):
    assert run_ranks(save_and_mutate, 2, tmp_path, 2) == [(True, [50])] * 2
    part = blank(whole_state())
    load(newest(tmp_path), part)
    assert equal(part, whole_state())


def save_twice_quickly(directory):
    write_tensors, running = checkpoint.write_tensors, []

    def slow(*args):
        running.append("start")
        time.sleep(0.1)
        running.append("end")
        return write_tensors(*args)

    checkpoint.write_tensors = slow
    with rank_in(directory) as rank:
        rank.save(1, seed=1)
        buffers = {name: tensor.data_ptr() for name, tensor in rank.checkpointer._buffers.items()}
        rank.save(2, seed=2)
        assert {
            name: tensor.data_ptr() for name, tensor in rank.checkpointer._buffers.items()
        } == buffers
        rank.checkpointer.wait()
        records = rank.checkpointer.poll()
    return (
        running,
        [record.step for record in records],
        [record.blocked_s > 0.09 for record in records],
    )


def test_a_second_save_waits_for_the_first_and_uses_its_buffers(tmp_path):
    for running, steps, waited in run_ranks(save_twice_quickly, 2, tmp_path):
        assert running == ["start", "end"] * 2
        assert steps == [1, 2]
        assert waited == [False, True]
    for step in (1, 2):
        part = blank(whole_state())
        load(tmp_path / f"step_{step:08d}", part)
        assert equal(part, whole_state(step))


def test_the_last_n_are_kept(tmp_path):
    run_ranks(save_steps, 2, tmp_path, 1, [10, 20, 30, 40], {"keep_last": 2})
    assert [found.step for found in list_checkpoints(tmp_path)] == [30, 40]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000030", "step_00000040"]
    run_ranks(
        save_steps, 2, tmp_path, 1, [35], {"keep_last": 1}
    )  # someone fell back behind 40: it is not his to delete
    assert [found.step for found in list_checkpoints(tmp_path)] == [35, 40]


def test_the_same_step_is_replaced(tmp_path):
    run_ranks(save_steps, 1, tmp_path, 1, [10])
    before = (tmp_path / "step_00000010" / "meta.json").read_text()
    run_ranks(save_steps, 2, tmp_path, 2, [10], {"generation": 4})
    assert (tmp_path / "step_00000010" / "meta.json").read_text() != before
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000010"]
    assert open_verified(tmp_path / "step_00000010").meta.generation == 4


def save_and_load_on_gpu(directory):
    with start_process("cuda", timeout_s=60) as process:
        mesh = build_mesh(plan_layout(MeshConfig(), 1), process)
        saver = saver_in(directory, process, mesh)
        state = {name: tensor.to(process.device) for name, tensor in whole_state().items()}
        saver.save(50, state, held(mesh), META)
        for tensor in state.values():
            tensor.fill_(13)
        saver.wait()
        assert load(newest(directory), state, held(mesh), mesh=mesh) == META
        return equal({name: tensor.cpu() for name, tensor in state.items()}, whole_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_are_staged(tmp_path):
    assert run_ranks(save_and_load_on_gpu, 1, tmp_path) == [True]


# What goes wrong while saving --------------------------------------------------------------------------------------


def die_while_saving(directory, where, victim):
    def die(*args, **kwargs):
        os._exit(9)

    with rank_in(directory, 2) as rank:
        if rank.process.rank == victim:
            setattr(checkpoint, where, die)
        rank.save(60, seed=60)
        try:
            rank.checkpointer.wait()
        except CheckpointError:
            if victim == 1:
                assert [path.name for path in directory.iterdir()] == [
                    "step_00000050"
                ]  # rank 0 could still clean up
            raise


@pytest.mark.fault("F15")
@pytest.mark.parametrize(
    ("where", "victim"), [("write_tensors", 0), ("write_tensors", 1), ("publish", 0)]
)
def test_a_crash_leaves_the_last_good_one(saved, where, victim):
    with pytest.raises(
        RankFailed,
        match=f"rank {victim} of 2 failed:\nthe process died without a word .exit code 9",
    ):
        run_ranks(die_while_saving, 2, saved.parent, where, victim, timeout_s=20)
    assert latest(saved.parent) == saved
    open_verified(saved)
    if victim == 0:
        assert (saved.parent / "step_00000060.g3.tmp").is_dir()
    run_ranks(save_steps, 2, saved.parent, 2, [], {"generation": 4})  # the next start cleans up
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.fault("F15")
def test_leftovers_are_cleaned_but_not_those_of_a_later_generation(saved):
    directory = saved.parent
    for name in (
        "step_00000060.g2.tmp",
        "step_00000060.g9.tmp",
        "step_00000010.deleted.tmp",
        "step_00000050.old.tmp",
    ):
        (directory / name).mkdir()
    (directory / "notes.tmp").write_text("somebody's own")
    run_ranks(save_steps, 1, directory, 1, [])
    assert sorted(path.name for path in directory.iterdir()) == [
        "notes.tmp",
        "step_00000050",
        "step_00000060.g9.tmp",
    ]


@pytest.mark.fault("F15")
def test_a_crash_between_the_two_renames_of_a_replacement_is_undone(saved):
    saved.rename(saved.with_name("step_00000050.old.tmp"))
    assert latest(saved.parent) is None
    run_ranks(save_steps, 2, saved.parent, 2, [])
    assert latest(saved.parent) == saved
    open_verified(saved)


def test_a_replacement_that_fails_puts_the_old_one_back(saved):
    with pytest.raises(FileNotFoundError):
        checkpoint.publish(saved.with_name("step_00000050.g3.tmp"), saved)
    open_verified(saved)


def run_out_of_disk(directory):
    """Rank 1 cannot write; the error comes at the next save, on both ranks, and a later save works
    again.
    """
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with rank_in(directory, 2) as rank:
        if rank.process.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, unlimited[1]))
        rank.save(60, seed=60)
        rank.checkpointer._join()
        assert rank.checkpointer.must_stop
        with pytest.raises(CheckpointError) as caught:
            rank.save(70, seed=70)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        names = sorted(path.name for path in directory.iterdir())
        rank.save(80, seed=80)
        rank.checkpointer.wait()
        records = [(record.step, record.error is None) for record in rank.checkpointer.poll()]
        return str(caught.value), names, records


@pytest.mark.fault("F22")
def test_a_full_disk_spares_the_previous_one_and_all_ranks_hear(saved):
    results = run_ranks(run_out_of_disk, 2, saved.parent, timeout_s=30)
    assert results[0][1] == ["step_00000050"]  # rank 0 had removed the rest before it raised
    for message, _, records in results:
        assert "the checkpoint of step 60 was not saved: rank 1: " in message
        assert "File too large" in message
        assert "__1_0.distcp" in message
        assert "step_00000050 is still there and untouched" in message
        assert records == [(60, False), (80, True)]
    open_verified(saved)
    open_verified(saved.with_name("step_00000080"))


def save_when_replaced(directory, generation_file, when):
    with rank_in(directory, 2, generation=3, generation_file=generation_file) as rank:
        rank.save(60)
        rank.checkpointer.wait()
        if when == "before":
            generation_file.write_text("4\n")
        else:
            seal = checkpoint.seal

            def overtaken(*args):
                """The next generation starts while we write."""
                generation_file.write_text("4")
                return seal(*args)

            checkpoint.seal = overtaken
        rank.save(70)
        try:
            rank.checkpointer.wait()
        except StaleGenerationError as error:
            return str(error)


@pytest.mark.fault("F14")
@pytest.mark.parametrize("when", ["before", "during"])
def test_a_stale_generation_may_not_commit(tmp_path, when):
    fence = tmp_path / "generation"
    fence.write_text("3\n")
    for message in run_ranks(save_when_replaced, 2, tmp_path / "checkpoints", fence, when):
        assert "generation 3 may not commit" in message
        assert "says 4" in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000060"]


@pytest.mark.fault("F14")
def test_a_stale_generation_cleans_nothing_up(tmp_path):
    """The current one may be between its two renames."""
    fence, aside = tmp_path / "generation", tmp_path / "checkpoints" / "step_00000060.old.tmp"
    fence.write_text("4")
    aside.mkdir(parents=True)
    with pytest.raises(RankFailed, match=r"StaleGenerationError: generation 3 may not commit"):
        run_ranks(save_steps, 2, tmp_path / "checkpoints", 1, [], {"generation_file": fence})
    assert aside.is_dir()


def wrong_call(directory, which):
    with rank_in(directory, 2) as rank:
        part, meta = local_part(whole_state(), rank.mesh), dict(META)
        if rank.process.rank == 1:
            if which == "meta":
                meta["weights"] = torch.zeros(1)
            elif which == "shape":
                part["embed.weight"] = torch.zeros(11, 5)
            else:
                del part["embed.weight"]
        with pytest.raises(CheckpointError) as caught:
            rank.checkpointer.save(1, part, held(rank.mesh), meta)
        rank.save(2)
        rank.checkpointer.wait()
        return str(caught.value)


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("meta", "Object of type Tensor is not JSON serializable"),
        (
            "shape",
            "'embed.weight' is [[11, 4], 'float32', 1, False] on rank 0 and [[11, 5], 'float32', "
            "1, False] on rank 1",
        ),
        ("name", "'embed.weight' is [[11, 4], 'float32', 1, False] on rank 0 and absent on rank 1"),
    ],
)
def test_wrong_calls_are_told_on_all_ranks_before_anything_is_written(tmp_path, which, words):
    messages = run_ranks(wrong_call, 2, tmp_path, which)
    assert len(set(messages)) == 1
    assert words in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    told = r"cannot write checkpoints into .*/file/checkpoints: Not a directory; choose"
    with pytest.raises(RankFailed, match=told):
        run_ranks(save_steps, 2, tmp_path / "file" / "checkpoints", 1, [])


# What is wrong with what was saved ---------------------------------------------------------------------------------

FILES = ["__0_0.distcp", "__1_0.distcp", ".metadata", "index.json", "meta.json", "manifest.json"]


def truncate(file):
    os.truncate(file, file.stat().st_size - 1)


def make_a_folder_of(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink, make_a_folder_of])
def test_a_damaged_file_is_found(saved, name, damage):
    damage(saved / name)
    with pytest.raises(CorruptCheckpointError, match=name):
        open_verified(saved)
    with pytest.raises(CorruptCheckpointError, match=name):
        load(saved, blank(whole_state()))


def test_every_rank_hears_which_experts_are_missing_or_damaged_and_what_to_do(saved):
    away = (saved / "__1_0.distcp").rename(saved.parent / "away")
    for kind, message in run_ranks(error_of_load, 2, saved, 2):
        assert kind == "CorruptCheckpointError"
        assert "__1_0.distcp is missing (it holds" in message
        assert "experts 4-7 of experts.w_up" in message
        assert "resume from the checkpoint before it" in message
    away.rename(saved / "__1_0.distcp")
    edit(saved, "index.json", lambda index: chunks_of(index, "experts.w_up").pop(1))
    for _, message in run_ranks(error_of_load, 2, saved, 2):
        assert "experts.w_up: experts 4-7 of 8 are missing" in message


def edit(path, name, change):
    """Changes one of the small files, and makes the manifest fit it: all bytes fit their sums."""
    content = json.loads((path / name).read_text())
    change(content)
    (path / name).write_text(json.dumps(content))
    reseal(path)


def chunks_of(index, name):
    return index["tensors"][name]["chunks"]


def first_chunk(changes, name="experts.w_up"):
    """A change of the first chunk of a tensor."""
    return lambda index: chunks_of(index, name)[0].update(changes)


def repeat(index):
    chunks_of(index, "experts.w_up").append(chunks_of(index, "experts.w_up")[0])


NO_BLOCKS = r"experts.w_up has shape \[8, 3, 2\], and parts that are not blocks"


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("index.json", first_chunk({"offsets": [0]}), NO_BLOCKS),
        ("index.json", first_chunk({"sizes": [4, 3, -2]}), NO_BLOCKS),
        (
            "meta.json",
            lambda meta: meta["num_experts"].update({"experts.w_up": 6}),
            r"experts.w_up has shape \[8, 3, 2\], but 6 experts",
        ),
        (
            "index.json",
            first_chunk({"file": "__9_0.distcp"}, "embed.weight"),
            r"names \['__9_0.distcp'\], which manifest.json does not list",
        ),
        ("index.json", repeat, "experts 0-3 of 8 are stored more than once"),
        (
            "index.json",
            lambda index: index["tensors"].pop("experts.w_up"),
            r"experts.w_up: all 8 experts are missing",
        ),
    ],
)
def test_an_index_that_does_not_fit_is_refused(saved, name, change, told):
    edit(saved, name, change)
    with pytest.raises(CorruptCheckpointError, match=told):
        open_verified(saved)


def other_names(part):
    part["head.weight"] = part.pop("embed.weight")
    part["rng"] = torch.zeros(16, dtype=torch.int64)
    if os.environ["RANK"] == "1":
        part["norm.scale"] = part["norm.scale"][:3]


def test_what_does_not_fit_is_listed_on_all_ranks_before_anything_is_overwritten(saved):
    for kind, message in run_ranks(error_of_load, 2, saved, 2, other_names):
        assert kind == "CheckpointError"
        assert "missing in the checkpoint: head.weight" in message
        assert "in the checkpoint but not requested: embed.weight" in message
        assert "rng: uint8 in the checkpoint, int64 here" in message
        assert "norm.scale: shape [5] in the checkpoint, [3] here" in message


def test_a_part_can_be_asked_for(saved):
    part = {"embed.weight": torch.zeros(11, 4)}
    with pytest.raises(CheckpointError, match=r"not requested: experts\.w_up"):
        load(saved, part)
    load(saved, part, allow_unexpected=True)
    assert torch.equal(part["embed.weight"], whole_state(50)["embed.weight"])


def in_place_of_a_tensor(path, index):
    """Another thing stands where the tensor should be."""
    torch.save({"no": "tensor"}, path / "__0_0.distcp")
    length = (path / "__0_0.distcp").stat().st_size
    first_chunk({"file": "__0_0.distcp", "start": 0, "length": length}, "embed.weight")(index)


def as_dtype(name):
    return lambda path, index: index["tensors"]["embed.weight"].update({"dtype": name})


@pytest.mark.parametrize(
    ("forge", "dtype", "told"),
    [
        (in_place_of_a_tensor, torch.float32, "not the tensor that index.json lists"),
        # copied into what is asked for, it would be cast without a word
        (as_dtype("int32"), torch.int32, "not the tensor that index.json lists"),
        (as_dtype("float31"), torch.float32, "embed.weight: float31 in the checkpoint"),
    ],
)
def test_a_tensor_that_is_not_the_promised_one_is_refused(saved, forge, dtype, told):
    edit(saved, "index.json", lambda index: forge(saved, index))
    with pytest.raises(CheckpointError, match=told):
        load(saved, {"embed.weight": torch.zeros(11, 4, dtype=dtype)}, allow_unexpected=True)


def test_bytes_that_are_no_tensor_are_told(saved):
    """Flipped bits, truncation and noise can raise nearly any error."""
    stored = checkpoint_files.open_checkpoint(saved)
    [chunk] = stored.index.tensors["embed.weight"].chunks
    random, content = Random(0), (saved / chunk.file).read_bytes()
    refused = 0
    for start in range(0, chunk.length, 3):
        damaged = bytearray(content)
        damaged[chunk.start + start] ^= 1 << random.randrange(8)
        if start % 2:
            damaged[chunk.start : chunk.start + chunk.length] = random.randbytes(chunk.length)
        (saved / chunk.file).write_bytes(damaged)
        try:
            checkpoint_loading.read_tensor(stored, "embed.weight")
        except CorruptCheckpointError:
            refused += 1
    assert refused > 100


def test_lack_of_memory_is_not_called_damage(saved, monkeypatch):
    stored = checkpoint_files.open_checkpoint(saved)
    monkeypatch.setattr(torch, "load", lambda *_, **__: torch.empty(2**45))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        checkpoint_loading.read_tensor(stored, "embed.weight")


def test_numbers_that_json_has_not_come_back():
    """A loss may be NaN."""
    meta = {"nan": float("nan"), "numbers": [float("inf"), -float("inf"), 0.1]}
    written = CheckpointMeta(
        step=1, generation=0, layout=Layout(1, 1), num_experts={}, versions={}, meta=meta
    )
    assert repr(CheckpointMeta.model_validate_json(written.model_dump_json()).meta) == repr(meta)


def test_what_is_no_checkpoint_is_told(tmp_path):
    (tmp_path / "step_00000001").mkdir()
    with pytest.raises(
        CorruptCheckpointError,
        match=r"not a complete checkpoint: cannot read manifest.json: No such file",
    ):
        load(tmp_path / "step_00000001", {})
    assert latest(tmp_path / "absent") is None
    assert list_checkpoints(tmp_path / "absent") == []


def search(directory):
    with rank_in(directory.parent / "other") as rank:
        if rank.mesh.rank == 1:  # as a network file system may show it: this rank sees nothing yet
            directory = directory.parent / "absent"
        found = newest_whole(directory, rank.mesh.world_group)
        return found and found.path


def test_all_ranks_take_the_checkpoint_that_rank_0_sees(tmp_path):
    directory = tmp_path / "checkpoints"
    assert run_ranks(search, 2, directory) == [None, None]
    run_ranks(save_steps, 1, directory, 1, [10, 20])
    assert run_ranks(search, 2, directory) == [directory / "step_00000020"] * 2


# Nothing is executed -----------------------------------------------------------------------------------------------


class Payload:
    """Unpickling it leaves a mark."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize(
    "name", [".metadata", "__0_0.distcp", "__1_0.distcp", "index.json", "meta.json"]
)
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_forged_file_executes_nothing(saved, tmp_path, name, how):
    mark = tmp_path / "executed"
    if how == "pickle":
        (saved / name).write_bytes(pickle.dumps(Payload(mark), protocol=2))
    else:
        with open(saved / name, "wb") as file:
            torch.save({"tensor": Payload(mark)}, file)
    if name.endswith("distcp"):
        whole = {"file": name, "start": 0, "length": (saved / name).stat().st_size}
        for tensor in whole_state():
            edit(saved, "index.json", first_chunk(whole, tensor))
    reseal(saved)
    part = blank(whole_state())
    if name == ".metadata":
        load(saved, part)  # it is not read at all
        assert equal(part, whole_state(50))
    else:
        with pytest.raises(CheckpointError):
            load(saved, part)
    assert not mark.exists()
    with open(saved / name, "rb") as file:  # the payload is a real one
        pickle.load(file) if how == "pickle" else torch.load(file, weights_only=False)
    assert mark.exists()


def test_a_manifest_reaches_no_file_outside(saved):
    shutil.copy(saved / "__0_0.distcp", saved.parent / "outside")
    index = (saved / "index.json").read_text().replace("__0_0.distcp", "../outside")
    (saved / "index.json").write_text(index)
    reseal(saved)
    with pytest.raises(CorruptCheckpointError, match=r"which manifest.json does not list"):
        load(saved, blank(whole_state()))
    manifest = CheckpointManifest.model_validate_json((saved / "manifest.json").read_text())
    sums = manifest.files | {"../outside": manifest.files["__0_0.distcp"]}
    forged = CheckpointManifest(format=1, files=sums, digest=digest_of_sums(sums))
    (saved / "manifest.json").write_text(forged.model_dump_json())
    with pytest.raises(CorruptCheckpointError, match="names files outside of it"):
        load(saved, blank(whole_state()))


def test_an_old_one_that_cannot_be_deleted_keeps_no_other_from_it(tmp_path, monkeypatch, caplog):
    for step in (10, 20, 30):
        (tmp_path / checkpoint_files.step_name(step)).mkdir()
    rename = Path.rename

    def busy(path, target):
        if path.name == "step_00000010":
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", busy)
    CheckpointFolder(tmp_path, CheckpointConfig(keep_last=1), 0, None).delete_old(30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000030"]
    assert "step_00000010 could not be deleted: [Errno 16] Device or resource busy" in caplog.text


def test_a_file_that_cannot_be_read_is_told(saved, monkeypatch):
    def broken(*given):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checkpoint_files, "_blake2b_of", broken)
    with pytest.raises(CorruptCheckpointError, match=r"distcp cannot be read: Input/output error"):
        open_verified(saved)
    monkeypatch.setattr(Path, "stat", broken)
    found = checkpoint_files._misfit(saved / "index.json", FileSum(num_bytes=1, blake2b=""))
    assert found == "cannot be read: Input/output error"


def test_a_folder_that_is_gone_does_not_hide_why_a_save_failed(tmp_path):
    gone = tmp_path / "gone"
    assert CheckpointFolder(gone, CheckpointConfig(), 0, None).what_remains() == (
        f"{gone} cannot be read any more: No such file or directory"
    )


def test_a_chunk_that_ends_early_is_told_in_bytes(saved, monkeypatch):
    """Before anything tries to make a tensor of it."""
    stored = checkpoint_files.open_checkpoint(saved)
    [chunk] = stored.index.tensors["embed.weight"].chunks
    os.truncate(saved / chunk.file, chunk.start + chunk.length - 7)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was decoded"))
    with pytest.raises(
        CorruptCheckpointError, match=f"has {chunk.length - 7} of the {chunk.length} bytes"
    ):
        checkpoint_loading.read_tensor(stored, "embed.weight")
