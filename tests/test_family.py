"""The whole family under expert parallelism and through a training run.

For every recipe: loss and every gradient on 4 ranks against one process, with EP 1, 2 and 4 in
float32 and with EP 2 in bfloat16 (EP 1 and 4 are slow); a resumed run against an uninterrupted one,
bit for bit; a checkpoint of two ranks continued on one.
"""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from family import (
    MAGNIFIES,
    NAMES,
    make_uneven,
    micro_batch_of,
    some_tokens,
    tiny_config,
    tiny_model,
)
from meshes import model_on
from pairwise import slow_but
from parts import make_config
from small_corpus import shards_of_words
from torch import Tensor
from trained import by_step, column, different, newest_state, run_training
from world import run_ranks

from moebius.distributed.gradients import GradientReducer, parameters_to_reduce
from moebius.distributed.layout import MeshConfig, local_experts, plan_layout
from moebius.distributed.mesh import Mesh, build_mesh
from moebius.distributed.parallelize import expert_names
from moebius.distributed.process.process import start_process
from moebius.model.execution.precision import forward_in
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import Config
from moebius.train.loss import micro_batch_loss
from moebius.train.recipes.hub import HUB_SMALL

DENSE_MESH = {"dp_shard": 2, "dp_replicate": 2, "sharding": "fsdp"}
RANKS, MICRO_BATCH, POSITIONS = 4, 8, 10
MIDWAY = "checkpoints/step_00000002"
# Drawn per rank or summed in another order of micro-batches: no two layouts would agree.
WITHOUT_CHANCE: dict[str, dict[str, Any]] = {
    "sigma_moe_original": {
        "feed_forward.router": {"kind": "sigmoid", "top_k": 4, "balance_scope": "global_batch"}
    },
    "qwen3_moe_small": {},
}


def rows_of(rank: int) -> Tensor:
    return some_tokens(MICRO_BATCH, POSITIONS + 1, seed=rank)


SWITCHED = "transition, switched"  # what a transition is once it has become a Switch


def at(name: str) -> tuple[str, int, dict[str, Any]]:
    """Returns the recipe of that name, the optimizer steps to test it at, and what is changed."""
    return (
        ("transition", 10**9, {}) if name == SWITCHED else (name, 0, WITHOUT_CHANCE.get(name, {}))
    )


def loss_of(model: Transformer, rows: Tensor, dtype: torch.dtype, *, rank: int) -> Tensor:
    """Returns one micro-batch's share of the loss, with random draws seeded by rank."""
    torch.manual_seed(rank)
    forward = partial(forward_in, model, dtype)
    return micro_batch_loss(
        forward, micro_batch_of(rows), global_sequences=RANKS * MICRO_BATCH
    ).loss


def one_process(name: str, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """Returns loss and gradients of all ranks' rows, one micro-batch per rank.

    A loss over the global batch sees them as one.
    """
    recipe, step, changes = at(name)
    model = make_uneven(tiny_model(recipe, changes))
    model = model.double() if dtype is torch.float64 else model
    model.before_step(step)
    batches = [rows_of(rank) for rank in range(RANKS)]
    if name in WITHOUT_CHANCE:
        batches = [torch.cat(batches)]
    total = 0.0
    for rank, rows in enumerate(batches):
        loss = loss_of(model, rows, dtype, rank=rank)
        loss.backward()
        total += loss.item()
    return total, {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()
    }


def difference(folder: Path, name: str, mesh: Mesh, dtype: torch.dtype) -> float:
    """Returns the largest relative difference of the loss or of a gradient on this rank."""
    recipe, step, changes = at(name)
    expected_loss, expected, start = torch.load(folder / f"{name}.pt")
    # In bfloat16 a sum in another order flips choices, as any rounding would; alltoall adds in the
    # same order.
    rounds = dtype is torch.bfloat16 or (dtype is torch.float32 and name in MAGNIFIES)
    in_order = rounds and mesh.layout.ep > 1
    model = model_on(
        mesh,
        tiny_config(recipe, changes),
        dispatcher="alltoall" if in_order else "auto",
        stored=torch.float64 if dtype is torch.float64 else torch.float32,
    )
    sharded = expert_names(model)

    def own(key: str, whole: Tensor) -> Tensor:
        """Returns this rank's block of an expert tensor, or any other tensor unchanged."""
        block = local_experts(mesh.layout, mesh.rank, len(whole)) if key in sharded else None
        return whole if block is None else whole[block.start : block.stop]

    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(own(key, start[key]))
    model.before_step(step)
    loss = loss_of(model, rows_of(mesh.rank), dtype, rank=mesh.rank)
    loss.backward()
    GradientReducer(*parameters_to_reduce(model), mesh).reduce()
    total = loss.detach().double()
    torch.distributed.all_reduce(total)
    errors = [abs(total.item() - expected_loss) / abs(expected_loss)]
    whole_norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        theirs = own(key, expected[key])
        # Relative to the whole tensor, since a block of experts that nobody chose has no size of
        # its own; what is a millionth of the whole gradient is rounding of the rest.
        size = expected[key].norm() + 1e-6 * whole_norm
        errors.append(((parameter.grad - theirs).norm() / size).item())
    return max(errors)


def differences_on_ranks(
    folder: Path, names: tuple[str, ...], degrees: tuple[int, ...], dtype: torch.dtype
) -> dict[tuple[str, int], float]:
    """Returns this rank's largest difference for every recipe and EP degree."""
    with start_process("cpu", timeout_s=60) as process:
        meshes = {ep: build_mesh(plan_layout(MeshConfig(ep=ep), RANKS), process) for ep in degrees}
        return {
            (name, ep): difference(folder, name, mesh, dtype)
            for name in names
            for ep, mesh in meshes.items()
        }


@pytest.mark.parametrize(
    ("dtype", "degrees", "tolerance"),
    [
        pytest.param(torch.float32, (2,), 1e-5, id="fp32"),
        pytest.param(torch.float64, (2, 4), 1e-10, id="fp64", marks=pytest.mark.slow),
        pytest.param(torch.float32, (1, 4), 1e-5, id="fp32-1-and-4", marks=pytest.mark.slow),
        # 2: both kinds of sums, over ep and over replicas
        pytest.param(torch.bfloat16, (2,), 3e-2, id="bf16", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, (1, 4), 3e-2, id="bf16-1-and-4", marks=pytest.mark.slow),
    ],
)
def test_expert_parallelism_changes_no_loss_and_no_gradient(
    dtype: torch.dtype, degrees: tuple[int, ...], tolerance: float, tmp_path: Path
) -> None:
    names = MAGNIFIES if dtype is torch.float64 else (*NAMES, SWITCHED)
    for name in names:
        recipe, _, changes = at(name)
        start = make_uneven(tiny_model(recipe, changes)).state_dict()
        torch.save((*one_process(name, dtype), start), tmp_path / f"{name}.pt")
    words = (tmp_path, names, degrees, dtype)
    for found in run_ranks(differences_on_ranks, RANKS, *words, timeout_s=240):
        assert found.keys() == {(name, ep) for name in names for ep in degrees}
        assert {key: worst for key, worst in found.items() if worst > tolerance} == {}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards_of_words(tmp_path_factory.mktemp("data"), 90)


def run_config(
    name: str, data: Path, *, steps: int = 4, precision: str = "float32", **changes: Any
) -> Config:
    model = tiny_config(name, {"vocab_size": 257})
    if name == "transition":
        changes["model__feed_forward__router__switch_step"] = 3
    sizes = {"steps": steps, "global_batch": 16, "micro_batch": 8, "eval_rows": 16}
    return make_config(
        data,
        model=model,
        optim={"clip_norm": 1.0},
        train=sizes | {"precision": precision},
        checkpoint__every=2,
        **changes,
    )


def logged(config: Config, run_dir: Path) -> dict[int, dict]:
    """Trains, and returns the steps' logged figures about the model."""
    assert run_training(config, run_dir) == "finished"
    kept = ("loss", "regularisation", "grad_norm", "auxiliary_losses", "expert_load")
    return {step: {key: line.get(key) for key in kept} for step, line in by_step(run_dir).items()}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", slow_but(NAMES, "moeut", "switch", "expert_choice"))
def test_a_run_that_is_resumed_equals_one_that_is_not(
    name: str, data: Path, tmp_path: Path
) -> None:
    precision = "bfloat16" if NAMES.index(name) % 2 else "float32"
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    config = run_config(name, data, precision=precision)
    expected = logged(config, whole)
    shutil.copytree(whole / MIDWAY, parted / MIDWAY)
    assert list(expected) == [1, 2, 3, 4]
    assert logged(config, parted) == {step: expected[step] for step in (3, 4)}


@pytest.mark.slow
def test_a_depth_that_changes_is_resumed_and_equals_runs_of_fixed_depths(
    data: Path, tmp_path: Path
) -> None:
    """Four loops for two steps, then two: resumed in between, or with another R from there on."""
    whole, resumed, parted = (tmp_path / name for name in ("whole", "resumed", "parted"))

    def go(run_dir: Path, num_layers: int, *, steps: int = 4, **depth: Any) -> dict[int, dict]:
        model = {"num_layers": num_layers, "initialisation.kind": "scaled", "loops.depth": depth}
        config = run_config("moeut_sandwich", data, steps=steps)
        return logged(config.model_copy(update={"model": config.model.changed(model)}), run_dir)

    growing = {"kind": "growing", "values": (4, 4, 2), "stage_steps": 1}
    expected = go(whole, 6, **growing)
    loops = [line["auxiliary_losses"]["loops"] for line in expected.values()]
    assert loops == [4, 4, 2, 2]
    shutil.copytree(whole / MIDWAY, resumed / MIDWAY)
    assert go(resumed, 6, **growing) == {step: expected[step] for step in (3, 4)}
    go(parted, 10, steps=2)
    for step, line in go(parted, 6).items():
        for name in ("loss", "regularisation", "grad_norm"):
            assert line[name] == expected[step][name]


# A selection bias, mean logits of a transition, halting, groups of sequences, a random second
# expert, dropout: what a router remembers or draws.
MINDFUL = ["deepseek", "transition", "sut", "expert_choice", "gshard", "sigma_moe_original"]


def without_rounding(name: str, data: Path, *, steps: int, ep: int) -> Config:
    """Returns a run that does not depend on how floats round, which differs between layouts.

    Its capacity refuses nothing, and no loss is over the global batch.
    """
    router = run_config(name, data).model.feed_forward.model_dump()["router"]
    for key in router.keys() & {"capacity_factor", "evaluation_capacity_factor"}:
        router[key] = None
    if router.get("balance_scope") == "global_batch":
        router["balance_scope"] = "micro_batch"
    return run_config(name, data, steps=steps, mesh__ep=ep, model__feed_forward__router=router)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(MINDFUL, "transition"))
def test_saved_on_two_ranks_with_ep_2_and_taken_up_on_one(
    name: str, data: Path, tmp_path: Path
) -> None:
    def losses(run_dir: Path, ranks: int, steps: int) -> list[float]:
        config = without_rounding(name, data, steps=steps, ep=ranks)
        run_ranks(run_training, ranks, config, run_dir)
        return column(run_dir)

    one = losses(tmp_path / "one", 1, 4)
    losses(tmp_path / "two", 2, 2)
    two = losses(tmp_path / "two", 1, 4)
    assert len(one) == 4
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", HUB_SMALL)
def test_other_peoples_models_learn_under_ep_2_and_resume_with_the_same_bits(
    name: str, data: Path, tmp_path: Path
) -> None:
    model = HUB_SMALL[name][1]().model.changed({"vocab_size": 257, "d_model": 64})
    sizes = {"steps": 16, "global_batch": 16, "micro_batch": 4, "eval_rows": 16}
    config = make_config(
        data,
        model=model,
        optim={"learning_rate": 1e-2, "clip_norm": 1.0},
        train=sizes,
        checkpoint__every=8,
        mesh={"ep": 2, "dp_replicate": 2} if model.experts else DENSE_MESH,
    )
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    run_ranks(run_training, RANKS, config, whole, timeout_s=240)
    shutil.copytree(whole / "checkpoints/step_00000008", parted / "checkpoints/step_00000008")
    run_ranks(run_training, RANKS, config, parted, timeout_s=240)
    losses = column(whole)
    assert losses[-1] < losses[0] - 0.5
    assert column(parted) == losses[8:]
    assert different(newest_state(parted), newest_state(whole)) == []
