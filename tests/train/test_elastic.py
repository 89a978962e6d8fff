"""Every layout loads every other's checkpoint bit for bit, over EP, FSDP and replicas."""

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from pairwise import slow_but
from torch import Tensor
from world import run_ranks

from moebius.distributed.checkpoint.checkpointer import Checkpointer
from moebius.distributed.checkpoint.format import audit, open_checkpoint, open_verified, read_meta
from moebius.distributed.checkpoint.loading import load
from moebius.distributed.layout import plan_layout
from moebius.distributed.mesh import build_mesh
from moebius.distributed.parallelize import build_model
from moebius.distributed.process.process import start_process
from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.config.feed_forward_config import ExpertsConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.routers.deepseek import DeepSeekConfig
from moebius.train.config.run_config import MeshConfig
from moebius.train.optim import OptimConfig, make_optimizer
from moebius.train.state import allocate_moments, state_tensors

# odd sizes: rows and experts that no number of ranks divides; a router with a buffer
MODEL = ModelConfig(
    vocab_size=67,
    d_model=20,
    num_layers=4,
    layers_per_group=2,
    attention=SwitchHeadConfig(num_heads=2, d_head=10, num_experts=4, top_k=2),
    feed_forward=ExpertsConfig(
        num_experts=12, router=DeepSeekConfig(top_k=3), d_expert=9, num_shared_experts=1
    ),
)
FEW = MODEL.changed(
    {
        "feed_forward.num_experts": 2,
        "feed_forward.router": DeepSeekConfig(top_k=1, renormalise=False),
    }
)  # FSDP must cut through the experts
CUT = "model.group.0.feed_forward.sparse.experts.w_up"
LAYOUTS = {  # name: ranks, mesh
    "alone": (1, {}),
    "replicas": (2, {}),
    "ep2": (2, {"ep": 2}),
    "ep2 twice": (4, {"ep": 2, "dp_shard": 4}),
    "ep4": (4, {"ep": 4}),
    "fsdp3": (3, {"dp_shard": 3, "sharding": "fsdp"}),
    "fsdp4": (4, {"dp_shard": 4, "sharding": "fsdp"}),
    "fsdp4 ep2": (4, {"dp_shard": 4, "ep": 2, "sharding": "fsdp"}),
    "fsdp4 ep4": (4, {"dp_shard": 4, "ep": 4, "sharding": "fsdp"}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "sharding": "fsdp"}),
}


def state(process, mesh_config: dict, model_config: ModelConfig):
    """Returns this rank's state, with values that depend on each element's name and place."""
    config = MeshConfig(**mesh_config)
    mesh = build_mesh(plan_layout(config, process.world_size), process)
    model = build_model(
        model_config,
        mesh,
        dispatcher="auto",
        backend="auto",
        seed=0,
        device=process.device,
        sharding=config.sharding,
    )
    optimizer = make_optimizer(OptimConfig(), model.parameters())
    allocate_moments(model, optimizer)
    tensors, shards = state_tensors(model, optimizer)
    for index, (name, tensor) in enumerate(sorted(tensors.items())):
        if name in shards:
            for slice_ in shards[name].slices:
                slice_.view(tensor).copy_(slice_.copy_from(value(index, shards[name].global_shape)))
        else:
            tensor.copy_(value(index, tensor.shape))
    return mesh, tensors, shards


def value(index: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(index))


def save_state(directory: Path, mesh_config: dict, model: ModelConfig = MODEL) -> None:
    with start_process("cpu", timeout_s=30) as process:
        mesh, tensors, shards = state(process, mesh_config, model)
        saver = Checkpointer(
            directory, mesh=mesh, process=process, keep_last=1, generation=0, generation_file=None
        )
        saver.save(7, tensors, shards, {"layout": mesh_config})
        saver.wait()


def load_states(
    folders: dict[str, Path], meshes: list[dict], model: ModelConfig = MODEL
) -> list[tuple[str, dict, str]]:
    """Loads every checkpoint into every mesh, and returns the differences."""
    wrong = []
    with start_process("cpu", timeout_s=30) as process:
        for mesh_config in meshes:
            mesh, tensors, shards = state(process, mesh_config, model)
            expected = {name: tensor.clone() for name, tensor in tensors.items()}
            for origin, folder in folders.items():
                for tensor in tensors.values():
                    tensor.fill_(77)
                load(folder / "step_00000007", tensors, shards, mesh=mesh)
                wrong += [
                    (origin, mesh_config, name)
                    for name in expected
                    if not torch.equal(expected[name], tensors[name])
                ]
    return wrong


Saved = Callable[[str], Path]

# In `make test` checkpoints of one rank, of experts in blocks, of cut tensors, and of both.
ORIGINS = [
    pytest.param(("alone", "ep2 twice", "fsdp3", "fsdp4 ep4"), id="four"),
    pytest.param(tuple(LAYOUTS), id="all", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Returns the same state, saved by a layout on first use."""

    @cache
    def save(name: str) -> Path:
        world, mesh = LAYOUTS[name]
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        run_ranks(save_state, world, folder, mesh)
        return folder

    return save


@pytest.mark.parametrize("world", slow_but([1, 2, 3, 4], 2))
@pytest.mark.parametrize("origins", ORIGINS)
def test_every_layout_loads_every_other_bit_for_bit(
    origins: tuple[str, ...], world: int, saved: Saved
) -> None:
    meshes = [mesh for ranks, mesh in LAYOUTS.values() if ranks == world]
    folders = {name: saved(name) for name in origins}
    assert run_ranks(load_states, world, folders, meshes) == [[]] * world


@pytest.mark.slow
def test_experts_that_are_cut_through_are_joined_again(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("alone", "fsdp4", "fsdp4 ep2")}
    for name, folder in folders.items():
        run_ranks(save_state, LAYOUTS[name][0], folder, LAYOUTS[name][1], FEW)
    stored = open_checkpoint(folders["fsdp4"] / "step_00000007")
    chunks = stored.index.tensors[CUT].chunks
    assert {chunk.sizes for chunk in chunks} == {(2, 5, 9)}
    assert run_ranks(load_states, 1, folders, [{}], FEW) == [[]]
    meshes = [LAYOUTS[name][1] for name in ("fsdp4", "fsdp4 ep2")]
    assert run_ranks(load_states, 4, folders, meshes, FEW) == [[]] * 4
    assert audit(stored.index, stored.meta.num_experts) == []
    taken = chunks.pop()
    assert audit(stored.index, stored.meta.num_experts) == [
        f"{CUT}: experts 0-1 of 2 have 135 of 180 elements each, some missing or more than once"
    ]
    chunks += [taken, taken]
    assert audit(stored.index, stored.meta.num_experts) == [
        f"{CUT}: experts 0-1 of 2 are stored more than once"
    ]


@pytest.mark.parametrize("origins", ORIGINS)
def test_checkpoints_of_all_layouts_have_the_same_tensors_and_every_expert_once(
    origins: tuple[str, ...], saved: Saved
) -> None:
    shapes = []
    for name in origins:
        path = saved(name) / "step_00000007"
        assert set(open_verified(path).meta.num_experts.values()) == {12, 8}
        tensors = json.loads((path / "index.json").read_text())["tensors"]
        shapes.append({key: (stored["dtype"], stored["shape"]) for key, stored in tensors.items()})
        assert read_meta(path).num_experts.keys() < tensors.keys()
    assert all(other == shapes[0] for other in shapes)


@pytest.mark.parametrize("name", slow_but(["fsdp4", "fsdp4 ep4", "hsdp"], "fsdp4 ep4"))
def test_every_rank_of_a_sharded_run_writes_its_share(name: str, saved: Saved) -> None:
    elements: Counter[str] = Counter()
    for tensor in open_checkpoint(saved(name) / "step_00000007").index.tensors.values():
        for chunk in tensor.chunks:
            elements[chunk.file] += math.prod(chunk.sizes)
    assert len(elements) == 4
    assert max(elements.values()) < 1.1 * elements.total() / 4


@pytest.mark.parametrize("damage", ["missing", "twice"])
def test_a_part_of_a_sharded_tensor_that_is_missing_or_twice_is_found(
    damage: str, saved: Saved, tmp_path: Path
) -> None:
    stored = open_checkpoint(saved("fsdp4 ep4") / "step_00000007")
    assert audit(stored.index, stored.meta.num_experts) == []
    chunks = stored.index.tensors[CUT].chunks
    if damage == "missing":
        chunks.pop()
    else:
        chunks.append(chunks[0])
    [problem] = audit(stored.index, stored.meta.num_experts)
    assert problem.startswith(CUT)
    assert ("missing" if damage == "missing" else "more than once") in problem
