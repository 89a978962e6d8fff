"""The whole family under expert parallelism and through a training run: no architecture is a guest.

Every recipe: loss and every gradient on 4 ranks against one process, with EP 1, 2 and 4 in float32
and with EP 2 in bfloat16 (EP 1 and 4 are marked slow); a run that goes on from a checkpoint against
one that never stopped, bit for bit.
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from family import NAMES, VOCABULARY, make_uneven, tiny_config, tiny_model
from pairwise import slow_but
from small_corpus import shards_of_words
from torch import Tensor
from world import run_ranks

from moebius.data_pipeline.data_config import DataConfig
from moebius.distributed.gradients import GradientReducer, parameters_to_reduce
from moebius.distributed.layout import MeshConfig, local_experts, plan_layout
from moebius.distributed.mesh import build_mesh
from moebius.distributed.parallelize import build_model, expert_names
from moebius.distributed.process.process import start_process
from moebius.model.execution.precision import forward_in
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import CheckpointConfig, Config, TrainConfig
from moebius.train.loop import train
from moebius.train.loss import micro_batch_loss
from moebius.train.optim import OptimConfig
from moebius.train.recipes.family import FAMILY

RANKS, MICRO_BATCH, POSITIONS = 4, 8, 10
# Drawn per rank or summed in another order of micro-batches: no two layouts would agree.
WITHOUT_CHANCE: dict[str, dict[str, Any]] = {
    "sigma_moe_original": {
        "feed_forward.router": {"kind": "sigmoid", "top_k": 4, "balance_scope": "global_batch"}
    }
}


def rows_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(VOCABULARY, (MICRO_BATCH, POSITIONS + 1), generator=generator)


SWITCHED = "transition, switched"  # what a transition is once it has become a Switch


def at(name: str) -> tuple[str, int]:
    """The recipe of that name, and the number of optimizer steps that it is asked after."""
    return ("transition", 10**9) if name == SWITCHED else (name, 0)


def one_process(name: str, dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of all ranks' rows, one micro-batch per rank; a loss over the global batch
    sees them as one.
    """
    recipe, step = at(name)
    model = make_uneven(tiny_model(recipe, WITHOUT_CHANCE.get(name, {})))
    model.before_step(step)
    batches = [rows_of(rank) for rank in range(RANKS)]
    if name in WITHOUT_CHANCE:
        batches = [torch.cat(batches)]
    total = 0.0
    for rank, rows in enumerate(batches):
        torch.manual_seed(rank)
        result = micro_batch_loss(
            partial(forward_in, model, dtype), rows, global_sequences=RANKS * MICRO_BATCH
        )
        result.loss.backward()
        total += result.loss.item()
    return total, {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()
    }


def difference_on_ranks(
    folder: Path, names: tuple[str, ...], degrees: tuple[int, ...], dtype: torch.dtype
) -> dict[tuple[str, int], float]:
    """For every recipe and EP degree the largest relative difference of the loss or of a gradient
    on this rank.
    """
    found = {}
    with start_process("cpu", timeout_s=60) as process:
        meshes = {ep: build_mesh(plan_layout(MeshConfig(ep=ep), RANKS), process) for ep in degrees}
        for name in names:
            recipe, step = at(name)
            expected_loss, expected, start = torch.load(folder / f"{name}.pt")
            whole_norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
            for ep, mesh in meshes.items():
                config = tiny_config(recipe, WITHOUT_CHANCE.get(name, {}))
                # In bfloat16 a sum in another order flips choices, as any rounding would; alltoall
                # adds in the same order.
                dispatcher = "auto" if dtype is torch.float32 or ep == 1 else "alltoall"
                model = build_model(
                    config,
                    mesh,
                    dispatcher=dispatcher,
                    backend="auto",
                    seed=0,
                    device=process.device,
                )
                sharded = expert_names(model)

                def own(whole: Tensor, name: str, mesh=mesh, sharded=sharded) -> Tensor:
                    if name not in sharded:
                        return whole
                    block = local_experts(mesh.layout, mesh.rank, whole.shape[0])
                    return whole[block.start : block.stop]

                with torch.no_grad():
                    for parameter_name, parameter in model.named_parameters():
                        parameter.copy_(own(start[parameter_name], parameter_name))
                model.before_step(step)
                torch.manual_seed(process.rank)
                result = micro_batch_loss(
                    partial(forward_in, model, dtype),
                    rows_of(process.rank),
                    global_sequences=RANKS * MICRO_BATCH,
                )
                result.loss.backward()
                GradientReducer(*parameters_to_reduce(model), mesh).reduce()
                loss = result.loss.detach().double()
                torch.distributed.all_reduce(loss)
                worst = abs(loss.item() - expected_loss) / abs(expected_loss)
                for parameter_name, parameter in model.named_parameters():
                    assert parameter.grad is not None
                    theirs = own(expected[parameter_name], parameter_name)
                    # Relative to the whole tensor, since a block of experts that nobody chose has
                    # no size of its own; what is a millionth of the whole gradient is rounding of
                    # the rest.
                    size = expected[parameter_name].norm() + 1e-6 * whole_norm
                    worst = max(worst, ((parameter.grad - theirs).norm() / size).item())
                found[name, ep] = worst
    return found


@pytest.mark.parametrize(
    ("dtype", "degrees", "tolerance"),
    [
        pytest.param(torch.float32, (2,), 1e-5, id="fp32"),
        pytest.param(torch.float32, (1, 4), 1e-5, id="fp32-1-and-4", marks=pytest.mark.slow),
        # 2: both kinds of sums, over ep and over replicas
        pytest.param(torch.bfloat16, (2,), 3e-2, id="bf16", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, (1, 4), 3e-2, id="bf16-1-and-4", marks=pytest.mark.slow),
    ],
)
def test_expert_parallelism_changes_no_loss_and_no_gradient(
    dtype: torch.dtype, degrees: tuple[int, ...], tolerance: float, tmp_path: Path
) -> None:
    names = (*NAMES, SWITCHED)
    for name in names:
        start = make_uneven(tiny_model(at(name)[0], WITHOUT_CHANCE.get(name, {}))).state_dict()
        torch.save((*one_process(name, dtype), start), tmp_path / f"{name}.pt")
    for found in run_ranks(
        difference_on_ranks, RANKS, tmp_path, names, degrees, dtype, timeout_s=240
    ):
        assert found.keys() == {(name, ep) for name in names for ep in degrees}
        assert {key: worst for key, worst in found.items() if worst > tolerance} == {}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards_of_words(tmp_path_factory.mktemp("data"), 90)


def run_config(
    name: str, data: Path, *, steps: int, precision: Literal["float32", "bfloat16"]
) -> Config:
    model = tiny_config(name, {"vocab_size": 257})
    if name == "transition":
        assert model.experts is not None
        model = tiny_config(
            name,
            {
                "vocab_size": 257,
                "feed_forward.router": model.experts.router.model_dump() | {"switch_step": 3},
            },
        )
    return Config(
        model=model,
        data=DataConfig(
            tokenizer="bytes",
            vocab_size=257,
            seq_len=16,
            validation_fraction=0.2,
            directory=str(data),
        ),
        optim=OptimConfig(learning_rate=3e-3, decay_steps=20, clip_norm=1.0),
        train=TrainConfig(
            steps=steps, global_batch=16, micro_batch=8, eval_rows=16, precision=precision
        ),
        checkpoint=CheckpointConfig(every=2),
    )


def logged(run_dir: Path) -> dict[int, tuple]:
    """What a step's line says of the model."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = ("loss", "regularisation", "grad_norm", "auxiliary_losses", "expert_load")
    return {
        line["step"]: tuple(str(line.get(key)) for key in kept)
        for line in lines
        if line["kind"] == "train"
    }


@pytest.mark.parametrize("name", slow_but(NAMES, "moeut", "switch", "expert_choice"))
def test_a_run_that_is_resumed_equals_one_that_is_not(
    name: str, data: Path, tmp_path: Path
) -> None:
    precision = "bfloat16" if NAMES.index(name) % 2 else "float32"
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    config, midway = (
        run_config(name, data, steps=4, precision=precision),
        "checkpoints/step_00000002",
    )
    whole.mkdir()
    assert train(config, whole) == "finished"
    shutil.copytree(whole / midway, parted / midway)
    assert train(config, parted) == "finished"
    expected, found = logged(whole), logged(parted)
    assert list(expected) == [1, 2, 3, 4]
    assert found == {step: expected[step] for step in (3, 4)}


def test_every_recipe_of_the_family_can_be_placed_on_four_ranks() -> None:
    for name, (_, recipe) in FAMILY.items():
        for ep in (1, 2, 4):
            values = recipe().model_dump() | {"mesh": {"ep": ep}}
            config = Config.model_validate(values)
            config.check_world(4)
            with torch.device("meta"):
                model = Transformer(config.model)
            assert all(
                model.get_parameter(tensor).shape[0] % ep == 0 for tensor in expert_names(model)
            ), name
