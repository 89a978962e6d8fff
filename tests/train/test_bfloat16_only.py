"""train.precision="bfloat16_only" keeps only what decides in float32, and resumes bit for bit."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from family import tiny_config
from pairwise import slow_but
from parts import make_config
from trained import by_step, column, different, newest_state
from world import run_ranks

from moebius.cli.main import main
from moebius.distributed.process.process import start_process
from moebius.evaluation.restore import restore
from moebius.export.hf.model_folder import export
from moebius.model.execution.precision import product_weights, store_in
from moebius.model.layers import LayerNorm, router_logits
from moebius.model.transformer import Transformer
from moebius.planning.simulation.calls import ranks_of
from moebius.train.config.run_config import Config, ConfigError
from moebius.train.evaluate import evaluate
from moebius.train.loop import step, train
from moebius.train.rank_data import open_loader
from moebius.train.run import assemble

STEPS = 4
# A mixture, a choice of tokens, a choice of experts, a buffer that learns, a weight that is brought
# back to its norm, and routers in the attention.
RESUMED = ("mixture_of_tokens", "switch", "expert_choice", "deepseek", "x_moe_torchscale", "moeut")


def config_of(
    data: Path, name: str = "mixture_of_tokens", *, precision: str = "bfloat16_only", **mesh: Any
) -> Config:
    return make_config(
        data,
        model=tiny_config(name, {"vocab_size": 257}),
        mesh=mesh,
        optim={"warmup_steps": 0, "clip_norm": 1.0},
        train={"global_batch": 16, "micro_batch": 8, "eval_rows": 16, "precision": precision},
        checkpoint__every=2,
    )


def train_in(config: Config, run_dir: Path) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    config.save(run_dir / "config.json")
    assert train(config, run_dir) == "finished"
    return run_dir


@pytest.mark.parametrize("name", ["mixture_of_tokens", "deepseek"])
def test_parameters_gradients_and_moments_are_bfloat16_and_buffers_float32(
    name: str, data: Path, tmp_path: Path
) -> None:
    config = config_of(data, name)
    residuals: set[torch.dtype] = set()
    with start_process("cpu") as process:
        run = assemble(config, tmp_path, process)
        for layer in run.model.group:
            layer.register_forward_hook(lambda _, given, out: residuals.add(out[0].dtype))
        with open_loader(run, None) as loader:
            step(run, next(loader), 1e-3)
        moments = [
            run.optimizer.state[parameter][moment]
            for parameter in run.parameters
            for moment in ("exp_avg", "exp_avg_sq")
        ]
        gradients = [p.grad for p in run.parameters if p.grad is not None]
        assert len(gradients) == len(run.parameters)
        assert residuals == {torch.bfloat16}
        for tensors in (run.parameters, gradients, moments):
            assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
        assert {tensor.dtype for tensor in run.model.buffers()} <= {torch.float32}
        assert sum(moment.abs().sum().item() for moment in moments) > 0


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half()])
@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("deepseek", ["feed_forward.router.selection_bias"]),
        ("transition", ["feed_forward.router.mean_logit"]),
        ("x_moe", ["feed_forward.router.log_temperature"]),
        ("gpt_oss_small", ["feed_forward.router.bias"]),
        ("ouro_moe", ["loops.exit_gate.weight", "loops.exit_gate.bias"]),
        ("sut", ["halting.hidden.weight", "halting.hidden.bias", "halting.output.weight"]),
        ("moeut", []),
    ],
)
def test_no_cast_rounds_what_decides(
    name: str, kept: list[str], cast: Callable[[Transformer], Transformer]
) -> None:
    model = Transformer(tiny_config(name))
    for tensor in model.state_dict().values():
        tensor.uniform_(-0.1, 0.1)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    after = cast(model).state_dict()
    decides = [key for key in after if key.endswith(tuple(kept))] if kept else []
    assert sorted(key for key in after if after[key].dtype == torch.float32) == sorted(decides)
    assert all(torch.equal(after[key], before[key]) for key in decides)
    assert not product_weights(model) & set(decides)  # mixed precision and exports round the others
    assert {tensor.dtype for tensor in model.double().state_dict().values()} == {torch.float64}
    model.float().to(torch.bfloat16)(torch.zeros(8, 4, dtype=torch.int64))


def test_a_selection_bias_moves_by_its_rate_wherever_it_is() -> None:
    model = Transformer(tiny_config("deepseek").changed({"feed_forward.router.bias_rate": 1e-3}))
    store_in(model, torch.bfloat16)
    [(_, _, router)] = [*model.routers()][:1]
    router.get_buffer("selection_bias").fill_(0.5)  # where bfloat16's next number is 4e-3 away
    load_E = torch.arange(router.num_experts).float()
    router.after_step(0, {"load": load_E})
    moved_E = router.get_buffer("selection_bias") - 0.5
    assert moved_E == pytest.approx(1e-3 * (load_E.mean() - load_E).sign(), rel=1e-4)


@pytest.mark.parametrize("name", slow_but(RESUMED, "moeut"))
def test_a_resumed_run_equals_one_that_was_not_interrupted(
    name: str, data: Path, tmp_path: Path
) -> None:
    config, midway = config_of(data, name), "checkpoints/step_00000002"
    whole = train_in(config, tmp_path / "whole")
    shutil.copytree(whole / midway, tmp_path / "parted" / midway)
    parted = train_in(config, tmp_path / "parted")
    expected, found = by_step(whole), by_step(parted)
    for key in ("loss", "grad_norm", "regularisation"):
        assert [found[at][key] for at in (3, 4)] == [expected[at][key] for at in (3, 4)]
    state, resumed = newest_state(whole), newest_state(parted)
    decides = ("bias", "temperature")  # and its moments
    wide = {key for key, tensor in state.items() if tensor.dtype == torch.float32}
    assert wide == {key for key in state if ".router." in key and key.endswith(decides)}
    assert different(state, resumed) == []


def test_a_restored_model_is_the_one_that_was_trained(data: Path, tmp_path: Path) -> None:
    run_dir = train_in(config_of(data, "deepseek"), tmp_path / "run")
    with start_process("cpu") as process:
        restored = restore(run_dir, process)
        assert {p.dtype for p in restored.model.parameters()} == {torch.bfloat16}
        found = evaluate(restored.model, restored.config, process).loss
    assert found == by_step(run_dir, "eval")[STEPS]["loss"]
    with pytest.raises(ConfigError, match="bfloat16_only"):
        export(run_dir / "checkpoints" / f"step_{STEPS:08d}", tmp_path / "out")


@pytest.mark.slow
def test_two_ranks_with_half_of_the_experts_each_train_as_one(data: Path, tmp_path: Path) -> None:
    name = "switch"
    alone = train_in(config_of(data, name), tmp_path / "alone")
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    assert run_ranks(train, 2, config_of(data, name, ep=2), ranks) == ["finished"] * 2
    assert column(ranks) == pytest.approx(column(alone), rel=1e-2)


@pytest.mark.parametrize(
    ("name", "mesh", "word"),
    [
        ("switch", {"sharding": "fsdp", "dp_shard": 2}, "mesh.sharding"),
        ("switch", {"ep": 2, "rebalance_every": 5}, "mesh.rebalance_every"),
        ("sut", {}, "model.halting"),
    ],
)
def test_what_does_not_work_in_it_is_refused(
    name: str, mesh: dict[str, Any], word: str, data: Path
) -> None:
    config_of(data, name, precision="bfloat16", **mesh)
    with pytest.raises(ValueError, match=f'"bfloat16_only" does not support {word}'):
        config_of(data, name, **mesh)


def test_the_planner_and_the_simulator_refuse_it(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "switch", "train.precision=bfloat16_only"])
    assert ended.value.code == 2
    assert "bfloat16_only" in capsys.readouterr().err
    with pytest.raises(ValueError, match="bfloat16_only"):
        ranks_of(config_of(data, "switch"), None, None)


def test_routers_and_norms_compute_in_what_their_weights_are_stored_in() -> None:
    generator = torch.Generator().manual_seed(0)
    x_TD, weight_ED = (
        torch.randn(64, 32, generator=generator),
        torch.randn(8, 32, generator=generator),
    )
    stored_ED = weight_ED.bfloat16()
    rough_TE = router_logits(x_TD, stored_ED)
    assert rough_TE.dtype == torch.float32
    assert torch.equal(rough_TE, (x_TD.bfloat16() @ stored_ED.T).float())
    assert not torch.equal(rough_TE, x_TD @ stored_ED.float().T)
    # Mixed precision: a float32 weight decides in float32, whatever the rows are.
    low_TD = x_TD.bfloat16()
    assert torch.equal(router_logits(low_TD, weight_ED), low_TD.float() @ weight_ED.T)
    norm = LayerNorm(32)
    with torch.no_grad():
        norm.get_parameter("weight").fill_(1.0)
        norm.get_parameter("bias").zero_()
    assert norm(low_TD).dtype == torch.float32
    assert norm.bfloat16()(x_TD).dtype == torch.bfloat16
