"""FSDP: sharded weights make the same steps, are gathered once per pass, and fit every layout's
checkpoints.
"""

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from family import OTHERS, tiny_config
from pairwise import slow_but
from parts import make_config
from small_model import MODEL
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from trained import assembled, column, run_training
from world import run_ranks

from moebius.distributed.local_shard import LocalShard, local_shard_of, local_tensor
from moebius.model.execution.precision import enters_a_product
from moebius.model.routers.sigmoid import SigmoidConfig
from moebius.train import run as parts_of_a_run
from moebius.train.config.run_config import Config
from moebius.train.evaluate import evaluate
from moebius.train.loop import step
from moebius.train.rank_data import open_loader
from moebius.train.state import state_tensors

PER_SEQUENCE = {"feed_forward.router.balance_scope": "sequence"}
MODELS = {
    "repeated": MODEL,
    "not_repeated": MODEL.changed({"layers_per_group": 4}),
    "dense": tiny_config("dense", {"vocab_size": 257}),
    "halting": tiny_config("sut", {"vocab_size": 257, "num_layers": 3}),
    "few_experts": MODEL.changed(
        {
            "feed_forward.num_experts": 2,
            "attention.num_experts": 2,
            "feed_forward.router": SigmoidConfig(top_k=1),
        }
    ),
} | {
    name: tiny_config(
        f"{name}_small", {"vocab_size": 257} | (PER_SEQUENCE if name != "olmo2" else {})
    )
    for name in OTHERS
}
# world, mesh: experts over efsdp 2 and 1; with and without replicas. (Over 4: the models below.)
SHARDED = [
    (4, {"ep": 2, "dp_shard": 4}),
    (4, {"ep": 2, "dp_replicate": 2}),
    (4, {"ep": 4}),
    (2, {"dp_shard": 2}),
]


def config_of(data: Path, model: str = "repeated", **changes: Any) -> Config:
    settings = {"steps": 6, "eval_every": 3, "eval_rows": 10}
    defaults = {"optim__clip_norm": 1.0, "train": settings, "checkpoint__every": 3}
    return make_config(data, model=MODELS[model], **(defaults | changes))


Parts = dict[str, tuple[LocalShard, Tensor]]


def sgd_steps(config: Config, run_dir: Path) -> tuple[list[float], float, Parts, Parts]:
    """Returns losses, validation loss, first gradients and weights of two steps of SGD with rate 1.

    SGD shows a wrong scale.
    """
    with assembled(config, run_dir) as run:
        optimizer = torch.optim.SGD(
            run.model.parameters(), lr=config.optim.learning_rate, foreach=False
        )
        run = replace(run, optimizer=optimizer)
        losses, gradients = [], {}
        with open_loader(run, None) as loader:
            for _ in range(2):
                result = step(run, next(loader), 1.0)
                losses += [result.meter.reduce()["loss"].item(), result.grad_norm]
                gradients = gradients or parts(run.model, gradient=True)
        validation = evaluate(run.model, config, run.process).loss
        return losses, validation, gradients, parts(run.model)


def parts(model: torch.nn.Module, *, gradient: bool = False) -> Parts:
    return {
        name: (local_shard_of(p), local_tensor(p.grad if gradient else p.detach()).clone())  # type: ignore[arg-type]
        for name, p in model.named_parameters()
    }


def joined(ranks: list[Parts]) -> dict[str, Tensor]:
    """Joins whole tensors from the ranks' parts; checks that copies agree and nothing is
    missing.
    """
    out = {}
    for name, (first, _) in ranks[0].items():
        whole, counts = torch.full(first.global_shape, torch.nan), torch.zeros(first.global_shape)
        for shard, memory in (parts[name] for parts in ranks):
            assert memory.numel() == sum(np.prod(slice_.sizes) for slice_ in shard.slices)
            for slice_ in shard.slices:
                at = tuple(
                    slice(start, start + size)
                    for start, size in zip(slice_.offsets, slice_.sizes, strict=True)
                )
                view = slice_.view(memory)
                assert torch.equal(torch.where(counts[at] > 0, whole[at], view), view), name
                whole[at] = view
                counts[at] += 1
        assert (counts == len(ranks) // first.ranks_per_copy).all(), name
        out[name] = whole
    return out


OneRank = Callable[..., tuple]


@pytest.fixture(scope="module")
def on_one_rank(data: Path, tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    """Returns one rank's results, for any model and precision."""

    @cache
    def results(model: str, precision: str = "float32") -> tuple:
        config = config_of(data, model, train__micro_batch=8, train__precision=precision)
        return run_ranks(sgd_steps, 1, config, tmp_path_factory.mktemp(model))[0]

    return results


def compare(results: list[tuple], expected: tuple, tolerance: float) -> None:
    for losses, validation, *_ in results:
        assert losses == pytest.approx(expected[0], rel=tolerance)
        assert validation == pytest.approx(expected[1], rel=tolerance)
    for index in (2, 3):
        ours, theirs = joined([result[index] for result in results]), joined([expected[index]])
        total = torch.stack([tensor.norm() for tensor in theirs.values()]).norm()
        for name, tensor in theirs.items():
            difference = ((ours[name] - tensor).norm() / (tensor.norm() + 1e-2 * total)).item()
            assert difference < tolerance, (name, index, difference)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("world", "mesh"),
    [
        pytest.param(*case, marks=() if case in SHARDED[::3] else pytest.mark.slow)
        for case in SHARDED
    ],
)
def test_sharded_weights_make_the_same_steps(
    world: int, mesh: dict, data: Path, tmp_path: Path, on_one_rank: OneRank
) -> None:
    config = config_of(data, mesh=mesh | {"sharding": "fsdp"})
    compare(run_ranks(sgd_steps, world, config, tmp_path), on_one_rank("repeated"), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", slow_but([name for name in MODELS if name != "repeated"], "dense", "deepseek_v3")
)
def test_every_kind_of_model_can_be_sharded(
    model: str, data: Path, tmp_path: Path, on_one_rank: OneRank
) -> None:
    mesh = {"dp_shard": 4, "ep": 1 if model in ("dense", "few_experts") else 2}
    config = config_of(data, model, mesh=mesh | {"sharding": "fsdp"})
    # The gradient of SUT's routers is small beside its terms, and the norms of small embeddings
    # magnify: another order of sums shows, sharded or not.
    tolerance = 1e-4 if model == "halting" else 1e-5
    compare(run_ranks(sgd_steps, 4, config, tmp_path), on_one_rank(model), tolerance)


@pytest.mark.slow
def test_in_bfloat16_too(data: Path, tmp_path: Path, on_one_rank: OneRank) -> None:
    mesh = {"sharding": "fsdp", "ep": 2, "dp_shard": 4, "dispatcher": "alltoall"}
    config = config_of(data, mesh=mesh, train__precision="bfloat16")
    expected = on_one_rank("repeated", "bfloat16")
    compare(run_ranks(sgd_steps, 4, config, tmp_path), expected, 3e-2)


def compiled_steps(config: Config, run_dir: Path) -> tuple:
    """Runs `sgd_steps` with a backend without code generation, and counts graphs and breaks."""
    make_code = parts_of_a_run.compile_dense_parts
    parts_of_a_run.compile_dense_parts = partial(
        make_code, backend="aot_eager"
    )  # a process of its own
    torch._dynamo.reset()
    counters.clear()
    found = sgd_steps(config, run_dir)
    return *found, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "recompute"),
    [
        ("repeated", {"dp_shard": 2}, "none"),
        ("not_repeated", {"dp_shard": 2, "ep": 2}, "selective"),
    ],
)
def test_compiled_parts_read_sharded_weights(
    model: str, mesh: dict, recompute: str, data: Path, tmp_path: Path, on_one_rank: OneRank
) -> None:
    settings = {"train__compile": True, "train__recompute": recompute}
    config = config_of(data, model, mesh=mesh | {"sharding": "fsdp"}, **settings)
    results = run_ranks(compiled_steps, 2, config, tmp_path)
    compare(results, on_one_rank(model), 1e-5)
    for *_, graphs, breaks in results:
        # Norm, attention, read-out; in training and in evaluation, with two sizes of batch.
        assert graphs in range(3, 10)
        assert breaks == 0


COLLECTIVES = {  # as FSDP calls them in torch 2.11 and in 2.13
    "all_gather_into_tensor": "gathered",
    "all_gather_single": "gathered",
    "reduce_scatter_tensor": "scattered",
    "reduce_scatter_single": "scattered",
}


def collectives(config: Config, run_dir: Path) -> tuple[Counter, Counter, bool]:
    """Counts gathers and scatters in one step and one evaluation, and checks what stays
    gathered.
    """
    with assembled(config, run_dir) as run:
        counts: Counter = Counter()
        for name, kind in COLLECTIVES.items():
            original: Any = getattr(dist, name, None)

            def counted(*args, _kind=kind, _original=original, **options):
                counts[_kind] += 1
                return _original(*args, **options)

            setattr(dist, name, counted)
        with open_loader(run, None) as loader:
            step(run, next(loader), 1e-3)
        in_step = counts.copy()
        counts.clear()
        evaluate(run.model, config, run.process)
        all_sharded = [isinstance(p, DTensor) for p in run.model.parameters()].count(True)
        return (
            in_step,
            counts,
            all_sharded == len([n for n, _ in run.model.named_parameters() if is_sharded(n)]),
        )


def is_sharded(name: str) -> bool:
    return enters_a_product(name) or name.endswith("embedding")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "per_member"),
    [("repeated", 1), ("not_repeated", 2)],
)
def test_a_unit_is_gathered_once_per_pass_and_its_gradient_reduced_once(
    model: str, per_member: int, data: Path, tmp_path: Path
) -> None:
    """Repeated members gather once for forward and backward together, others once for each."""
    config = config_of(data, model, mesh={"dp_shard": 4, "sharding": "fsdp"}, train__eval_rows=4)
    members = MODELS[model].layers_per_group
    units = (
        members * 4 + 2
    )  # of each member its dense weights and three banks; the head; the embedding
    for in_step, in_evaluation, all_sharded in run_ranks(collectives, 4, config, tmp_path):
        assert in_step == {"gathered": per_member * members * 4 + 2, "scattered": units}
        assert in_evaluation["gathered"] == units
        assert all_sharded


@pytest.mark.slow
def test_a_sharded_run_resumes_bit_for_bit_and_on_other_layouts(data: Path, tmp_path: Path) -> None:
    sharded: dict[str, Any] = {"mesh": {"sharding": "fsdp", "dp_shard": 4, "ep": 2}}
    whole, resumed, moved = (tmp_path / name for name in ("whole", "resumed", "moved"))
    run_ranks(run_training, 4, config_of(data, **sharded), whole)
    assert len(column(whole)) == 6
    for folder in (resumed, moved):
        shutil.copytree(whole / "checkpoints/step_00000003", folder / "checkpoints/step_00000003")
    run_ranks(run_training, 4, config_of(data, **sharded), resumed)
    assert column(resumed) == column(whole)[3:]
    run_ranks(run_training, 2, config_of(data, mesh={"ep": 2}), moved)
    assert column(moved) == pytest.approx(column(whole)[3:], rel=1e-6)


class Interrupted(Exception):
    pass


def saved_after_a_lost_pass(config: Config, run_dir: Path) -> list[bool]:
    """Checks that a pass without a backward changes no saved state and leaves nothing stale."""
    with assembled(config, run_dir) as run:
        before, held_before = state_tensors(run.model, run.optimizer)
        before = {name: tensor.clone() for name, tensor in before.items()}
        rows = torch.arange(34).view(2, 17)
        expected = run.model(rows).logits_BSV.detach()
        gathered = [
            is_sharded(name) and not isinstance(p, DTensor)
            for name, p in run.model.named_parameters()
        ]
        after, held_after = state_tensors(run.model, run.optimizer)
        same = [any(gathered), held_before == held_after, before.keys() == after.keys()]
        same += [torch.equal(before[name], after[name]) for name in before]
        run.model(rows)
        with torch.no_grad():  # an update: what was gathered before it must not be used after it
            for parameter in run.parameters:
                if isinstance(parameter, DTensor):
                    parameter.mul_(0.5)
        return [*same, not torch.equal(run.model(rows).logits_BSV, expected)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", ["repeated", "not_repeated"])
def test_a_pass_without_a_backward_leaves_nothing_gathered_in_a_checkpoint(
    model: str, data: Path, tmp_path: Path
) -> None:
    config = config_of(data, model, mesh={"dp_shard": 2, "sharding": "fsdp"})
    for same in run_ranks(saved_after_a_lost_pass, 2, config, tmp_path):
        assert all(same)


def refusals_after_an_error(config: Config, run_dir: Path) -> list[str]:
    """Returns the errors of saving and of another pass after an interrupted pass."""
    with assembled(config, run_dir) as run:
        rows, said = torch.arange(34).view(2, 17), []
        broken = run.model.head.register_forward_pre_hook(interrupt)
        with pytest.raises(Interrupted), torch.no_grad():
            run.model(rows)
        broken.remove()
        for act in (lambda: state_tensors(run.model, run.optimizer), lambda: run.model(rows)):
            with pytest.raises(RuntimeError) as error:
                act()
            said.append(str(error.value))
        return said


def interrupt(*_: object) -> None:
    raise Interrupted


def test_after_a_pass_that_raised_nothing_is_saved_nor_computed(data: Path, tmp_path: Path) -> None:
    """FSDP would continue with weights that no update reaches."""
    config = config_of(data, mesh={"dp_shard": 2, "sharding": "fsdp"})
    for said in run_ranks(refusals_after_an_error, 2, config, tmp_path):
        assert len(said) == 2
        assert all(
            "sharded weights are still gathered" in one and "ended by an error" in one
            for one in said
        )
