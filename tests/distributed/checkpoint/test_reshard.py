"""Resharding: the same state, bit for bit, in the files that ranks of the other layout write; or an
error, and nothing stays.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from world import run_ranks

from moebius.distributed.checkpoint import format as checkpoint_files
from moebius.distributed.checkpoint import reshard as module
from moebius.distributed.checkpoint import writing as checkpoint_writing
from moebius.distributed.checkpoint.checkpointer import Checkpointer
from moebius.distributed.checkpoint.format import (
    CheckpointError,
    Chunk,
    CorruptCheckpointError,
    StoredTensor,
    find_checkpoint,
    open_checkpoint,
    verify,
)
from moebius.distributed.checkpoint.loading import load
from moebius.distributed.checkpoint.reading import read_tensor
from moebius.distributed.checkpoint.reshard import reshard
from moebius.distributed.dispatch.expert_map import ExpertMap
from moebius.distributed.layout import MeshConfig, plan_layout
from moebius.distributed.mesh import build_mesh
from moebius.distributed.parallelize import build_model
from moebius.distributed.placement.balance_load import packed
from moebius.distributed.placement.move import expert_maps_of, move_experts
from moebius.distributed.process.process import start_process
from moebius.model.config.model_config import ModelConfig
from moebius.model.routers.cosine import CosineConfig
from moebius.model.routers.deepseek import DeepSeekConfig
from moebius.train.optim import OptimConfig, make_optimizer
from moebius.train.state import allocate_moments, state_tensors

SIZES = {
    "vocab_size": 67,
    "d_model": 20,
    "num_layers": 2,
    "layers_per_group": 1,
    "attention.num_heads": 2,
    "attention.d_head": 10,
    "attention.num_experts": 4,
    "attention.top_k": 2,
    "feed_forward.num_experts": 11,
    "feed_forward.d_expert": 9,
}  # experts and rows that no number of ranks divides
MODELS = {
    "buffers": ModelConfig.from_dotted(
        SIZES
        | {
            "feed_forward.router": DeepSeekConfig(top_k=3),
            "feed_forward.num_shared_experts": 1,
            "attention.positions.kind": "learned",
        }
    ),
    "embedding": ModelConfig.from_dotted(
        SIZES | {"feed_forward.router": CosineConfig(top_k=2), "feed_forward.activation": "swiglu"}
    ),
    "few": ModelConfig.from_dotted(
        SIZES
        | {
            "feed_forward.num_experts": 2,
            "feed_forward.router": DeepSeekConfig(top_k=1, renormalise=False),
        }
    ),
}
LAYOUTS = {  # name: ranks, model, mesh
    "alone": (1, "buffers", {}),
    "alone, embedding": (1, "embedding", {}),
    "alone, few": (1, "few", {}),
    "replicas": (4, "buffers", {}),
    "ep2": (4, "buffers", {"ep": 2, "dp_shard": 4}),
    "ep4": (4, "buffers", {"ep": 4}),
    "fsdp": (4, "buffers", {"dp_shard": 4, "sharding": "fsdp"}),
    "fsdp, embedding": (4, "embedding", {"dp_shard": 4, "ep": 2, "sharding": "fsdp"}),
    "fsdp through experts": (4, "few", {"dp_shard": 4, "sharding": "fsdp"}),
    "fsdp3": (3, "buffers", {"dp_shard": 3, "ep": 3, "sharding": "fsdp"}),
    "hsdp": (4, "buffers", {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "sharding": "fsdp"}),
}
MOVED = "ep4, moved"
META = {"progress": {"step": 7}}


def expert_map(num_experts: int) -> ExpertMap:
    """Uneven, in another order, with copies of the hottest."""
    load = [float(expert % 5 * 10 + expert) for expert in range(num_experts)]
    return packed(load, [-(-num_experts // 4) + 1] * 4)


def save_states(folder: Path, names: list[str]) -> None:
    """The same state, saved by every layout of so many ranks; the moments are the weights' halves
    and thirds.
    """
    with start_process("cpu", timeout_s=30) as process:
        for name in names:
            _, model_name, mesh_config = LAYOUTS["ep4" if name == MOVED else name]
            config = MeshConfig(**mesh_config)
            mesh = build_mesh(plan_layout(config, process.world_size), process)
            model = build_model(
                MODELS[model_name],
                mesh,
                dispatcher="auto",
                backend="auto",
                seed=3,
                device=process.device,
                sharding=config.sharding,
            )
            optimizer = make_optimizer(OptimConfig(), model.parameters())
            allocate_moments(model, optimizer)
            for parameter in model.parameters():
                for moment, part in {"exp_avg": 2, "exp_avg_sq": 3}.items():
                    optimizer.state[parameter][moment].copy_(parameter.detach() / part)
            if name == MOVED:
                move_experts(
                    model,
                    optimizer,
                    mesh,
                    {
                        bank: expert_map(own.num_experts)
                        for bank, own in expert_maps_of(model).items()
                    },
                )
            saver = Checkpointer(
                folder / name,
                mesh=mesh,
                process=process,
                keep_last=1,
                generation=0,
                generation_file=None,
            )
            saver.save(7, *state_tensors(model, optimizer), META)
            saver.wait()


def load_states(names: list[str], paths: dict[str, Path]) -> list[tuple[str, str]]:
    """Loads every checkpoint into every layout; where the second differs from the first."""
    wrong = []
    with start_process("cpu", timeout_s=30) as process:
        for name in names:
            _, model_name, mesh_config = LAYOUTS[name]
            config = MeshConfig(**mesh_config)
            mesh = build_mesh(plan_layout(config, process.world_size), process)
            model = build_model(
                MODELS[model_name],
                mesh,
                dispatcher="auto",
                backend="auto",
                seed=0,
                device=process.device,
                sharding=config.sharding,
            )
            optimizer = make_optimizer(OptimConfig(), model.parameters())
            allocate_moments(model, optimizer)
            tensors, held = state_tensors(model, optimizer)
            found = []
            for path in paths.values():
                for tensor in tensors.values():
                    tensor.fill_(77)
                assert load(path, tensors, held, mesh=mesh) == META
                found.append({key: tensor.clone() for key, tensor in tensors.items()})
            wrong += [
                (name, key)
                for one in found[1:]
                for key in one
                if not torch.equal(found[0][key], one[key])
            ]
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same state, saved by the ranks of every layout."""
    folder = tmp_path_factory.mktemp("saved")
    for world in (1, 3, 4):
        names = [name for name, (ranks, *_) in LAYOUTS.items() if ranks == world]
        run_ranks(save_states, world, folder, names + [MOVED] * (world == 4))
    return {name: find_checkpoint(folder / name / "step_00000007") for name in (*LAYOUTS, MOVED)}


def files_of(path: Path) -> tuple[set[str], set[tuple]]:
    """The names of the files, and which boxes of which tensors are in which of them."""
    slices = {
        (name, tensor.dtype, tensor.shape, chunk.offsets, chunk.sizes, chunk.file)
        for name, tensor in open_checkpoint(path).index.tensors.items()
        for chunk in tensor.chunks
    }
    return {file.name for file in path.iterdir()}, slices


def resharded(source: Path, out: Path, name: str, **options) -> Path:
    ranks, _, mesh = LAYOUTS[name]
    config = MeshConfig(**mesh)
    reshard(source, out, plan_layout(config, ranks), sharding=config.sharding, **options)
    return out


SOURCE = {"buffers": "alone", "embedding": "alone, embedding", "few": "fsdp through experts"}


@pytest.mark.parametrize(
    ("source", "name"), [*((SOURCE[LAYOUTS[name][1]], name) for name in LAYOUTS), ("hsdp", "fsdp3")]
)
def test_the_files_are_those_that_its_ranks_would_have_written(
    source: str, name: str, saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FILES_AT_ONCE", 3)  # of four
    out = resharded(saved[source], tmp_path / "out", name)
    assert files_of(out) == files_of(saved[name])
    assert os.listdir(tmp_path) == ["out"]
    expected = open_checkpoint(saved[name])
    assert verify(out) == expected.meta
    for key in expected.index.tensors:
        assert torch.equal(read_tensor(open_checkpoint(out), key), read_tensor(expected, key)), key


def test_of_a_routers_weights_fsdp_cuts_none(saved: dict[str, Path]) -> None:
    """They must be float32 in every precision, an embedding of experts too; the model's own
    embedding is cut.
    """
    tensors = open_checkpoint(saved["fsdp, embedding"]).index.tensors
    assert len(tensors["model.group.0.feed_forward.router.expert_embedding"].chunks) == 1
    assert len(tensors["model.embedding"].chunks) == 4


@pytest.mark.parametrize("name", ["fsdp", "hsdp", "ep2"])
def test_a_rank_reads_nothing_that_it_does_not_keep(
    name: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    """A chunk is read whole: of the copy all that meet what a rank holds lie in it, of the original
    they do not.
    """
    ranks, _, mesh = LAYOUTS[name]
    config = MeshConfig(**mesh)
    layout, experts = plan_layout(config, ranks), open_checkpoint(saved["alone"]).meta.num_experts

    def wasted(path: Path) -> int:
        total = 0
        for key, tensor in open_checkpoint(path).index.tensors.items():
            for rank in range(ranks):
                shard = module.shard_of_rank(
                    rank, key, tensor.shape, key in experts, layout, config.sharding, {}
                )
                kept = sum(torch.Size(slice_.sizes).numel() for slice_ in shard.slices)
                read = [
                    chunk
                    for chunk in tensor.chunks
                    if any(meet(chunk, slice_) for slice_ in shard.slices)
                ]
                total += sum(torch.Size(chunk.sizes).numel() for chunk in read) - kept
        return total

    assert wasted(resharded(saved["alone"], tmp_path / "out", name)) == 0
    assert wasted(saved["alone"]) > 0


def test_an_uneven_bank_that_fsdp_cuts_in_two_ways_is_whole() -> None:
    """5 experts on 2 EP ranks, each over 3 ranks: three experts are dealt whole, the other two are
    cut through.
    """
    shape, layout, name = (
        (5, 24, 16),
        plan_layout(MeshConfig(ep=2, dp_shard=6), 6),
        "model.group.0.sparse.experts.w_up",
    )
    chunks = [
        Chunk(offsets=slice_.offsets, sizes=slice_.sizes, file=f"{rank}", start=0, length=0)
        for rank in range(6)
        for slice_ in module.shard_of_rank(rank, name, shape, True, layout, "fsdp", {}).slices
    ]
    assert {chunk.sizes for chunk in chunks} == {(1, 24, 16), (2, 8, 16)}

    def gaps(chunks: list[Chunk]) -> list[str]:
        return checkpoint_files._gaps(
            StoredTensor(dtype="float32", shape=shape, chunks=chunks), "experts"
        )

    assert gaps(chunks) == []
    whole, through = chunks[0], chunks[1]
    assert gaps([chunk for chunk in chunks if chunk is not whole]) == ["experts 0 of 5 are missing"]
    assert gaps([*chunks, whole]) == ["experts 0 of 5 are stored more than once"]
    partly = "experts 3-4 of 5 have {} of 384 elements each, some missing or more than once"
    assert gaps([chunk for chunk in chunks if chunk is not through]) == [partly.format(256)]
    wide = through.model_copy(update={"sizes": (2, 16, 16)})
    assert gaps([wide if chunk is through else chunk for chunk in chunks]) == [partly.format(512)]
    outside = whole.model_copy(update={"offsets": (5, 0, 0)})
    assert gaps([*chunks, outside]) == ["experts 5 of 5 lie outside of the tensor"]
    after = whole.model_copy(update={"offsets": (1, 0, 0)})  # two bands, one sentence
    assert gaps([*chunks, whole, after]) == ["experts 0-1 of 5 are stored more than once"]
    beyond = [outside, outside.model_copy(update={"offsets": (6, 0, 0)})]
    assert gaps([*chunks, *beyond]) == ["experts 5-6 of 5 lie outside of the tensor"]


def test_a_tensor_goes_by_its_own_name_where_no_run_has_named_it() -> None:
    """Whoever saves a bare model has no `model.` before its names; FSDP's rule is the same."""
    layout = plan_layout(MeshConfig(dp_shard=2), 2)
    for name, sizes in (("head.weight", (3, 4)), ("final_norm.weight", (6, 4))):
        for prefix in ("", "model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."):
            shard = module.shard_of_rank(1, prefix + name, (6, 4), False, layout, "fsdp", {})
            assert [slice_.sizes for slice_ in shard.slices] == [sizes], prefix


@pytest.mark.parametrize(
    ("world_size", "mesh", "moved"),
    [
        (3, {}, False),
        (8, {"ep": 4}, False),
        (8, {"ep": 4}, True),
        (12, {"ep": 3, "dp_shard": 6, "sharding": "fsdp"}, False),
        (10, {"dp_shard": 5, "sharding": "fsdp"}, False),
    ],
)
def test_every_copy_is_cut_as_the_first(
    world_size: int, mesh: dict, moved: bool, saved: dict[str, Path]
) -> None:
    """The plan asks what the ranks of the first copy hold, and gives it to those of the copy that
    is written.
    """
    stored, config = open_checkpoint(saved["alone"]), MeshConfig(**mesh)
    layout, counts = plan_layout(config, world_size), stored.meta.num_experts
    banks = {
        key.removeprefix("model.").rpartition(".experts.")[0]: expert_map(counts[key])
        for key in counts
        if moved
    }
    for key, writes in module.plan_writes(stored, layout, config.sharding, banks).items():
        shape = stored.index.tensors[key].shape
        for rank, slice_ in writes:
            assert (
                slice_
                in module.shard_of_rank(
                    rank, key, shape, key in counts, layout, config.sharding, banks
                ).slices
            )
        assert (
            sum(torch.Size(slice_.sizes).numel() for _, slice_ in writes)
            == torch.Size(shape).numel()
        )


def test_layers_that_are_cut_alike_are_cut_once(
    saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cut of each rank costs the same for every layer: it is paid per shape, not per tensor."""
    asked, fsdp_shard = [], module.fsdp_shard
    monkeypatch.setattr(
        module,
        "fsdp_shard",
        lambda shard, *rest: asked.append(shard.global_shape) or fsdp_shard(shard, *rest),
    )
    stored = open_checkpoint(saved["alone"])
    module.plan_writes(stored, plan_layout(MeshConfig(dp_shard=64), 64), "fsdp", {})
    shapes = {tensor.shape for tensor in stored.index.tensors.values()}
    assert len(stored.index.tensors) > 3 * len(shapes)
    assert len(asked) <= 64 * len(shapes)


def meet(one, other) -> bool:
    return all(
        a < b + size_b and b < a + size_a
        for a, size_a, b, size_b in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, strict=True
        )
    )


def test_experts_stay_where_a_run_has_placed_them(saved: dict[str, Path], tmp_path: Path) -> None:
    counts = {
        name.removeprefix("model.").rpartition(".experts.")[0]: count
        for name, count in open_checkpoint(saved["alone"]).meta.num_experts.items()
    }
    out = resharded(
        saved["alone"],
        tmp_path / "out",
        "ep4",
        expert_maps={bank: expert_map(count) for bank, count in counts.items()},
    )
    assert files_of(out) == files_of(saved[MOVED])
    assert files_of(out) != files_of(saved["ep4"])


def test_it_loads_as_the_original_does(saved: dict[str, Path], tmp_path: Path) -> None:
    paths = {"original": saved["alone"]}
    for name in ("ep4", "hsdp", "fsdp3"):
        paths[name] = resharded(saved["alone"], tmp_path / name, name)
    assert run_ranks(load_states, 4, ["ep2", "fsdp"], paths) == [[]] * 4


def test_a_damaged_checkpoint_is_not_copied(saved: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "step_00000007"
    shutil.copytree(saved["ep4"], source)
    for rank in (1, 2):
        file = source / f"__{rank}_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(
        CorruptCheckpointError, match=r"(?s)__1_0.distcp does not fit.*__2_0.distcp does not fit"
    ):
        resharded(source, tmp_path / "out", "alone")
    assert os.listdir(tmp_path) == ["step_00000007"]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("exists", "exists already and is not overwritten"),
        ("too few experts", r"ep 16 is more than the experts: .* has 8; .*at most 8"),
        ("no room", r"needs \d MiB, but its disk has 0 MiB left; nothing was written"),
        ("full on the way", r"could not be written: No space left on device"),
        ("full at the end", r"could not be written: No space left on device"),
        ("wrong", r"out does not read as it was written; .*\n  .* is not what was read"),
        (
            "flipped",
            r"out does not read as it was written; .*\n  __1_0.distcp does not fit its checksum",
        ),
    ],
)
def test_what_goes_wrong_leaves_nothing(
    failure: str,
    message: str,
    saved: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout, out = plan_layout(MeshConfig(ep=2), 2), tmp_path / "deep" / "out"
    if failure == "exists":
        out.mkdir(parents=True)
    elif failure == "too few experts":
        layout = plan_layout(MeshConfig(ep=16), 16)
    elif failure == "no room":
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr(checkpoint_writing.shutil, "disk_usage", lambda path: usage)
    elif failure == "full on the way":
        full_after(monkeypatch, "_SummedFile", 100_000)
    elif failure == "full at the end":
        monkeypatch.setattr(checkpoint_writing, "write_synced", no_space)
    elif failure == "flipped":
        write_small = checkpoint_writing.write_synced
        monkeypatch.setattr(
            checkpoint_writing, "write_synced", lambda *args: flip_of(*args) or write_small(*args)
        )
    else:  # a fault of our own: what was read is not what is written
        original = module._append
        monkeypatch.setattr(
            module,
            "_append",
            lambda tensor, *rest: original(tensor + 1 if tensor.numel() == 20 else tensor, *rest),
        )
    passes: list[str] = []
    with pytest.raises(CheckpointError, match=message):
        reshard(
            saved["alone"],
            out,
            layout,
            start_progress=lambda what, size: passes.append(what) or (lambda more: None),
        )
    assert bool(passes) == (
        failure not in ("exists", "too few experts")
    )  # hours of verifying come after what can be told at once
    assert not out.exists() or not any(out.iterdir())
    assert not out.parent.exists() or os.listdir(out.parent) == ["out"] * (failure == "exists")


@pytest.mark.parametrize("how", ["gone", "unreadable"])
def test_a_source_that_cannot_be_read_any_more_is_blamed_itself(
    how: str, saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it was verified."""
    source = Path(shutil.copytree(saved["alone"], tmp_path / "source"))
    opened = module.open_verified

    def then_lost(*arguments):
        stored = opened(*arguments)
        (source / "__0_0.distcp").unlink()
        if how == "unreadable":  # a directory opens for nobody
            (source / "__0_0.distcp").mkdir()
        return stored

    monkeypatch.setattr(module, "open_verified", then_lost)
    with pytest.raises(
        CorruptCheckpointError, match=r"source/__0_0.distcp cannot be read: (No such|Is a dir)"
    ) as told:
        reshard(source, tmp_path / "out", plan_layout(MeshConfig(), 1))
    assert "out" not in str(told.value)
    assert os.listdir(tmp_path) == ["source"]


def flip_of(path: Path, *_: object) -> None:
    """The disk loses a byte of what was written before."""
    if path.name == "index.json":
        content = bytearray((path.parent / "__1_0.distcp").read_bytes())
        content[len(content) // 2] ^= 1
        (path.parent / "__1_0.distcp").write_bytes(content)


def no_space(path: Path, *_: object) -> None:
    raise OSError(28, "No space left on device", str(path))


def full_after(monkeypatch: pytest.MonkeyPatch, owner: str, num_bytes: int) -> None:
    """The disk takes so many bytes per file."""
    kind = getattr(checkpoint_writing, owner)
    original = kind.write

    def write(self, data):
        if self._num_bytes + len(data) > num_bytes:
            self.failure = OSError(28, "No space left on device", str(self.name))
            raise self.failure
        return original(self, data)

    monkeypatch.setattr(kind, "write", write)
