"""Every layout loads every other layout's checkpoint bit for bit: replicas, expert parallelism, FSDP,
moved experts, and models whose sizes the ranks do not divide.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from meshes import model_on, saver_in
from pairwise import slow_but
from world import run_ranks

from moebius.distributed.checkpoint import format as checkpoint_files
from moebius.distributed.checkpoint.format import (
    Chunk,
    StoredTensor,
    open_checkpoint,
)
from moebius.distributed.checkpoint.loading import load
from moebius.distributed.dispatch.expert_map import ExpertMap
from moebius.distributed.layout import MeshConfig, local_experts, plan_layout
from moebius.distributed.local_shard import block_shard
from moebius.distributed.mesh import Mesh, build_mesh
from moebius.distributed.placement.balance_load import packed
from moebius.distributed.placement.move import expert_maps_of, move_experts
from moebius.distributed.process.process import Process, start_process
from moebius.distributed.sharding import fsdp_shard
from moebius.model.config.model_config import ModelConfig
from moebius.model.routers.cosine import CosineConfig
from moebius.model.routers.deepseek import DeepSeekConfig
from moebius.model.transformer import Transformer
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
BASE = ModelConfig.from_dotted(SIZES)
MODELS = {
    "buffers": BASE.changed(
        {
            "feed_forward.router": DeepSeekConfig(top_k=3),
            "feed_forward.num_shared_experts": 1,
            "attention.positions.kind": "learned",
        }
    ),
    "embedding": BASE.changed(
        {"feed_forward.router": CosineConfig(top_k=2), "feed_forward.activation": "swiglu"}
    ),
    "few": BASE.changed(
        {
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
    "ep2 on 2": (2, "buffers", {"ep": 2}),
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


def built(name: str, process: Process, seed: int) -> tuple[Mesh, Transformer, Any]:
    """A layout's mesh, and the model and the optimizer with moments on it."""
    _, model_name, mesh_config = LAYOUTS["ep4" if name == MOVED else name]
    config = MeshConfig(**mesh_config)
    mesh = build_mesh(plan_layout(config, process.world_size), process)
    model = model_on(mesh, MODELS[model_name], seed=seed, sharding=config.sharding)
    optimizer = make_optimizer(OptimConfig(), model.named_parameters())
    allocate_moments(model, optimizer, 0)
    return mesh, model, optimizer


def save_states(folder: Path, names: list[str]) -> None:
    """The same state, saved by every layout of so many ranks; the moments are the weights' halves
    and thirds.
    """
    with start_process("cpu", timeout_s=30) as process:
        for name in names:
            mesh, model, optimizer = built(name, process, 3)
            for parameter in model.parameters():
                for moment, part in {"exp_avg": 2, "exp_avg_sq": 3}.items():
                    optimizer.state[parameter][moment].copy_(parameter.detach() / part)
            if name == MOVED:
                maps = expert_maps_of(model)
                moved = {bank: expert_map(own.num_experts) for bank, own in maps.items()}
                move_experts(model, optimizer, mesh, moved)
            saver = saver_in(folder / name, process, mesh)
            saver.save(7, *state_tensors(model, optimizer), META)
            saver.wait()


def load_states(names: list[str], paths: dict[str, Path]) -> list[tuple[str, str, str]]:
    """Loads every checkpoint of a layout's model into it; (layout, checkpoint, tensor) of those that
    differ from what one process alone has saved.
    """
    wrong = []
    with start_process("cpu", timeout_s=30) as process:
        for name in names:
            mesh, model, optimizer = built(name, process, 0)
            tensors, held = state_tensors(model, optimizer)
            expected: dict[str, torch.Tensor] = {}
            for source, path in paths.items():
                if model_of(source) != LAYOUTS[name][1]:
                    continue
                for tensor in tensors.values():
                    tensor.fill_(77)
                assert load(path, tensors, held, mesh=mesh) == META
                expected = expected or {key: tensor.clone() for key, tensor in tensors.items()}
                wrong += [
                    (name, source, key)
                    for key, tensor in tensors.items()
                    if not torch.equal(expected[key], tensor)
                ]
    return wrong


def model_of(name: str) -> str:
    return LAYOUTS["ep4" if name == MOVED else name][1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same state, saved by the ranks of every layout; one process's first."""
    folder = tmp_path_factory.mktemp("saved")
    for world in (1, 2, 3, 4):
        names = [name for name, (ranks, *_) in LAYOUTS.items() if ranks == world]
        run_ranks(save_states, world, folder, names + [MOVED] * (world == 4))
    return {name: folder / name / "step_00000007" for name in (*LAYOUTS, MOVED)}


@pytest.mark.slow
@pytest.mark.parametrize("world", slow_but([1, 2, 3, 4], 4))
def test_every_layout_loads_every_other(world: int, saved: dict[str, Path]) -> None:
    names = [name for name, (ranks, *_) in LAYOUTS.items() if ranks == world]
    assert run_ranks(load_states, world, names, saved) == [[]] * world


@pytest.mark.parametrize("name", ["fsdp", "hsdp"])
def test_every_rank_of_a_sharded_run_writes_its_share(name: str, saved: dict[str, Path]) -> None:
    elements: Counter[str] = Counter()
    for tensor in open_checkpoint(saved[name]).index.tensors.values():
        for chunk in tensor.chunks:
            elements[chunk.file] += math.prod(chunk.sizes)
    assert len(elements) == 4
    assert max(elements.values()) < 1.1 * elements.total() / 4


def test_of_a_routers_weights_fsdp_cuts_none(saved: dict[str, Path]) -> None:
    """They must be float32 in every precision, an embedding of experts too; the model's own
    embedding is cut.
    """
    tensors = open_checkpoint(saved["fsdp, embedding"]).index.tensors
    assert len(tensors["model.group.0.feed_forward.router.expert_embedding"].chunks) == 1
    assert len(tensors["model.embedding"].chunks) == 4


def test_an_uneven_bank_that_fsdp_cuts_in_two_ways_is_whole() -> None:
    """5 experts on 2 EP ranks, each over 3 ranks: three experts are dealt whole, the other two are
    cut through.
    """
    shape, layout = (5, 24, 16), plan_layout(MeshConfig(ep=2, dp_shard=6), 6)
    chunks = []
    for rank in range(6):
        own = local_experts(layout, rank, 5)
        block = block_shard(shape, 0, own.start, len(own), ranks_per_copy=2, has_experts=True)
        chunks += [
            Chunk(offsets=slice_.offsets, sizes=slice_.sizes, file=f"{rank}", start=0, length=0)
            for slice_ in fsdp_shard(block, (len(own), 24, 16), layout, rank).slices
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
