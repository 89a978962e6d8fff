"""One run on many layouts: equal loss, gradients and weights on 1, 2 and 4 ranks.

Stopped and resumed equals uninterrupted.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairwise import slow_but
from parts import make_config
from small_model import MODEL
from torch import Tensor
from trained import (
    assembled,
    by_step,
    check_near,
    column,
    different,
    gradients,
    newest_state,
    run_training,
    whole,
)
from world import run_ranks

from moebius.data_pipeline.read.loader import Batch
from moebius.distributed.checkpoint.format import list_checkpoints
from moebius.model.routers.deepseek import DeepSeekConfig
from moebius.model.transformer import Transformer
from moebius.train import loop
from moebius.train.config.run_config import Config
from moebius.train.config.schedule import learning_rate_at
from moebius.train.loop import step
from moebius.train.rank_data import open_loader


def config_of(data: Path, **changes: Any) -> Config:
    settings = {"steps": 8, "eval_every": 4, "eval_rows": 10}
    defaults = {"optim__clip_norm": 1.0, "train": settings, "checkpoint__every": 4}
    return make_config(data, **({"model": MODEL, "data__seq_len": 24} | defaults | changes))


def sgd_step(config: Config, run_dir: Path) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Returns loss, gradients, and weights and buffers after one step of SGD with rate 1.

    SGD shows a wrong scale, which Adam would hide.
    """
    with assembled(config, run_dir) as run:
        run = replace(run, optimizer=torch.optim.SGD(run.model.parameters(), lr=1.0))
        with open_loader(run, None) as loader:
            result = step(run, next(loader), 1.0)
        named = [*run.model.named_parameters(), *run.model.named_buffers()]
        state = {name: tensor.detach().clone() for name, tensor in named}
        return result.meter.reduce()["loss"].item(), gradients(run), whole(run, state)


# world, ep, micro-batch, accumulation follows; and dp_shard where it is larger than ep, so that
# efsdp ranks hold a block
LAYOUTS = [
    (1, 1, 8),
    (1, 1, 2),
    (2, 1, 2),
    (2, 2, 4),
    (4, 1, 2),
    (4, 2, 1),
    (4, 4, 2),
    (4, 2, 2, 4),
    (8, 4, 1),
    (8, 2, 1, 4),  # dp × ep: 2 × 4 and 2 × 2 × 2
]


# A bias follows the whole batch's loads, and a loss is over each sequence.
BALANCED = {"feed_forward.router": DeepSeekConfig(top_k=3, bias_rate=0.01, balance=0.1)}


@pytest.mark.parametrize(
    ("precision", "layouts", "changes"),
    [
        pytest.param("float32", LAYOUTS, {}, marks=pytest.mark.slow),
        pytest.param("float32", LAYOUTS[::2], BALANCED, marks=pytest.mark.slow),
        ("float32", [(1, 1, 8), (4, 2, 2, 4)], {}),
        ("bfloat16", [(1, 1, 8), (4, 2, 2)], {}),
    ],
)
def test_every_layout_makes_the_same_step(
    precision: str, layouts: list, changes: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    tolerance = 1e-6 if precision == "float32" else 3e-2
    found = []
    for world, ep, micro, *dp_shard in layouts:
        config = config_of(
            data,
            model=MODEL.changed(changes),
            train__micro_batch=micro,
            train__precision=precision,
            optim__clip_norm=1e9,
            # In bfloat16 another order of sums flips choices, as any rounding would; alltoall adds
            # in the same order.
            mesh__dispatcher="auto" if precision == "float32" or ep == 1 else "alltoall",
            mesh__ep=ep,
            mesh__dp_shard=dp_shard[0] if dp_shard else None,
        )
        found += run_ranks(sgd_step, world, config, tmp_path / f"{world}-{ep}-{micro}-{dp_shard}")
    expected_loss, expected_grads, expected_state = found[0]
    for loss, grads, state in found:
        assert loss == pytest.approx(expected_loss, rel=tolerance)
        check_near(grads, expected_grads, tolerance)
        for name, theirs in expected_state.items():
            moved = expected_grads.get(name, torch.zeros(()))
            check_near(state, {name: theirs}, tolerance, 1e-3 * tolerance * moved.norm().item())


def uneven_step(
    config: Config, run_dir: Path, shares: list[int]
) -> tuple[float, dict[str, Tensor]]:
    """Returns loss and gradients of one step with `shares[r]` of eight rows on rank r."""
    with assembled(config, run_dir) as run:
        rank = run.process.rank
        rows = np.random.default_rng(0).integers(0, 257, (2, 8, 25))
        first = sum(shares[:rank])
        result = step(run, Batch(rows[:, first : first + shares[rank]], 0, 0), 0.0)
        return result.meter.reduce()["loss"].item(), gradients(run)


@pytest.mark.slow
def test_ranks_with_different_numbers_of_tokens_make_the_same_step(
    data: Path, tmp_path: Path
) -> None:
    """Averaging each rank's own mean would overweight tokens on a rank with few."""
    results = []
    for shares, ep in (([8], 1), ([1, 7], 2), ([4, 1, 1, 2], 2)):
        config = config_of(data, train__global_batch=16, optim__clip_norm=1e9, mesh__ep=ep)
        folder = tmp_path / f"{shares}"
        results += run_ranks(uneven_step, len(shares), config, folder, shares)
    for loss, found in results:
        assert loss == pytest.approx(results[0][0], rel=1e-6)
        check_near(found, results[0][1], 2e-6)


@pytest.mark.fault("F21")
@pytest.mark.parametrize("ranks", slow_but([2, 4], 2))
def test_resumed_equals_uninterrupted_bit_for_bit(ranks: int, data: Path, tmp_path: Path) -> None:
    config, straight, cut = config_of(data, mesh__ep=2), tmp_path / "straight", tmp_path / "cut"
    run_ranks(run_training, ranks, config, straight)
    shorter = config.model_copy(update={"train": config.train.model_copy(update={"steps": 5})})
    run_ranks(run_training, ranks, shorter, cut)
    assert [c.step for c in list_checkpoints(cut / "checkpoints")] == [4, 5]
    run_ranks(run_training, ranks, config, cut)
    assert by_step(cut, "start")[5]["resumed_from_step"] == 5
    for name in ("loss", "digest"):
        assert column(cut, name) == column(straight, name)
    assert different(newest_state(straight), newest_state(cut)) == []


@pytest.mark.fault("F23")
@pytest.mark.slow
def test_resumed_on_another_layout_gives_the_same_losses(data: Path, tmp_path: Path) -> None:
    straight, midway = tmp_path / "straight", "checkpoints/step_00000004"
    run_ranks(run_training, 2, config_of(data), straight)
    assert len(column(straight)) == 8
    for world, ep in ((1, 1), (2, 2), (4, 4)):
        moved = tmp_path / f"{world}-{ep}"
        shutil.copytree(straight / midway, moved / midway)
        run_ranks(run_training, world, config_of(data, mesh__ep=ep), moved)
        assert column(moved) == pytest.approx(column(straight)[4:], rel=1e-6), (world, ep)
        evals = [by_step(folder, "eval")[8]["loss"] for folder in (straight, moved)]
        assert evals[0] == pytest.approx(evals[1], rel=1e-6), (world, ep)
        assert column(moved, "digest") == column(straight, "digest")[4:]


def stop_after(config: Config, run_dir: Path, step_number: int) -> str:
    """Trains, and requests a stop during step `step_number`."""
    original = loop.step

    def step_and_ask(run, batch, rate, **options):
        if run.progress.step + 1 == step_number and run.process.rank == 0:
            (run_dir / "stop").touch()
        return original(run, batch, rate, **options)

    loop.step = step_and_ask
    return run_training(config, run_dir)


@pytest.mark.fault("F21")
def test_a_stop_ends_all_ranks_at_one_step_with_a_checkpoint(data: Path, tmp_path: Path) -> None:
    config = config_of(data, train__log_every=5)
    assert run_ranks(stop_after, 2, config, tmp_path, 3) == ["stopped", "stopped"]
    assert json.loads((tmp_path / "result.json").read_text()) == {"state": "stopped", "step": 3}
    assert list(by_step(tmp_path)) == [1, 3]  # although only every 5th step is logged
    assert [c.step for c in list_checkpoints(tmp_path / "checkpoints")] == [3]


def poison(config: Config, run_dir: Path, bad_rank: int, name: str) -> list[int]:
    """Returns the updates after each of three steps with an infinite gradient on one rank in the
    second.
    """
    with assembled(config, run_dir) as run:
        updates = []
        with open_loader(run, None) as loader:
            for number in range(3):
                hook = None
                if number == 1 and run.process.rank == bad_rank:
                    weight = dict(run.model.named_parameters())[name]
                    hook = weight.register_hook(lambda grad: grad * float("inf"))
                before = [p.detach().clone() for p in run.model.parameters()]
                step(run, next(loader), 1e-3)
                if hook is not None:
                    hook.remove()
                changed = any(
                    not torch.equal(a, b)
                    for a, b in zip(before, run.model.parameters(), strict=True)
                )
                assert changed == (number != 1)
                updates.append(run.progress.updates)
        assert run.progress.step == 3
        return updates


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["head.weight", "group.0.feed_forward.sparse.experts.w_up"])
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(
    name: str, data: Path, tmp_path: Path
) -> None:
    config = config_of(data, mesh__ep=2)
    assert run_ranks(poison, 2, config, tmp_path, 1, name) == [[1, 1, 2]] * 2


def beside_torch(config: Config, run_dir: Path) -> None:
    """Compares two steps with torch's AdamW on one model in float64, by the formulas of loss,
    clipping and schedule.
    """
    optim = config.optim
    with assembled(config, run_dir) as run, open_loader(run, None) as loader:
        oracle = Transformer(config.model, backend="reference").double()
        oracle.load_state_dict(run.model.state_dict())
        adamw = torch.optim.AdamW(
            oracle.parameters(),
            betas=(optim.beta1, optim.beta2),
            eps=optim.epsilon,
            weight_decay=optim.weight_decay,
        )
        for number in range(2):
            batch = next(loader)
            rows = torch.from_numpy(batch.tokens).flatten(0, 1)
            output = oracle(rows[:, :-1])
            log_p = output.logits_BSV.log_softmax(-1).gather(-1, rows[:, 1:, None])
            adamw.zero_grad()
            (output.regularisation_B.mean() - log_p.mean()).backward()
            norm = torch.nn.utils.clip_grad_norm_(oracle.parameters(), optim.clip_norm).item()
            rate = learning_rate_at(optim.over(config.train.steps), number)
            adamw.param_groups[0]["lr"] = rate
            adamw.step()
            result = step(run, batch, rate)
            assert result.grad_norm == pytest.approx(norm, rel=1e-4)
            assert norm > 2 * optim.clip_norm  # clipping is at work
            loss = result.meter.reduce()["loss"].item()
            assert loss == pytest.approx(-log_p.mean().item(), rel=1e-5)
            state = {name: value.double() for name, value in run.model.state_dict().items()}
            check_near(state, oracle.state_dict(), 1e-5)


def test_a_step_is_what_the_formulas_say(data: Path, tmp_path: Path) -> None:
    changes = {"clip_norm": 0.05, "weight_decay": 0.3, "beta1": 0.8, "beta2": 0.95, "epsilon": 1e-3}
    run_ranks(beside_torch, 1, config_of(data, optim=changes), tmp_path)


def test_it_learns_and_logs_what_it_should(data: Path, tmp_path: Path) -> None:
    changes = {"steps": 40, "eval_every": 20, "micro_batch": 8}
    config = config_of(data, train=changes | {"eval_rows": 10}, optim__decay_steps=60)
    assert run_ranks(run_training, 1, config, tmp_path) == ["finished"]
    evals, steps = by_step(tmp_path, "eval"), by_step(tmp_path)
    assert sorted(evals) == [0, 20, 40]
    assert evals[0]["loss"] == pytest.approx(np.log(257), abs=0.5)
    assert evals[40]["loss"] < evals[0]["loss"] - 2
    assert evals[40]["perplexity"] == pytest.approx(np.exp(evals[40]["loss"]))
    record = steps[40]
    load_LE = np.array(record["expert_load"])
    assert load_LE.shape == np.array(record["value_expert_load"]).shape == (4, 8)
    np.testing.assert_allclose(load_LE.sum(1), 1, atol=1e-3)
    np.testing.assert_allclose(record["max_violation"], load_LE.max(1) * 8 - 1, atol=1e-3)
    assert all(1 <= value <= 8 for value in record["effective_experts"])
    assert all(0 < value < 1 for value in record["gate_mean"])
    assert (record["tokens"], record["skipped"]) == (40 * 8 * 24, 0)
    for number in (1, 2, 30):
        rate = learning_rate_at(config.optim.over(40), number - 1)
        assert steps[number]["learning_rate"] == pytest.approx(rate)
    assert (tmp_path / "tensorboard").is_dir()


def test_a_world_that_does_not_fit_is_refused_on_every_rank(data: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"mesh.ep 3 does not divide the world's 2 ranks"):
        run_ranks(run_training, 2, config_of(data, mesh__ep=3), tmp_path)
