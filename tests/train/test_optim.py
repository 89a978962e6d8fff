"""The published schedule at its published points."""

import pytest
import torch
from family import tiny_model

from moebius.train.optim import OptimConfig, learning_rate_at, make_optimizer
from moebius.train.state import allocate_moments, set_updates, state_tensors


def test_the_published_rates() -> None:
    config = OptimConfig(warmup_steps=4000)
    expected = {0: 6.25e-8, 3999: 2.5e-4, 4000: 2.5e-4, 54000: 1.375e-4, 99999: 2.5888e-5}
    for step, rate in expected.items():
        assert learning_rate_at(config, step) == pytest.approx(rate, rel=1e-4), step


def test_without_warmup_it_starts_at_the_peak_and_never_falls_below_the_floor() -> None:
    config = OptimConfig(learning_rate=1e-3, decay_steps=10)
    rates = [learning_rate_at(config, step) for step in range(30)]
    assert rates[0] == 1e-3
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-4)


def test_every_parameter_decays_except_those_of_parcaes_injection() -> None:
    model = tiny_model("parcae_small")
    config = OptimConfig(weight_decay=0.5, learning_rate=0.1)
    optimizer = make_optimizer(config, model.named_parameters())
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = {name: parameter.mean().item() for name, parameter in model.named_parameters()}
    kept = {name for name, value in after.items() if value == 1.0}
    of_injection = ("rate_bias", "step_bias", "input.weight", "output.weight")
    assert kept == {f"loops.injection.{name}" for name in of_injection}
    assert all(value == pytest.approx(0.95) for name, value in after.items() if name not in kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_makes_the_same_steps(dtype: torch.dtype) -> None:
    """GPUs use it; here it runs on a CPU, resumed in the middle like a checkpoint."""
    config = OptimConfig(learning_rate=1e-2, weight_decay=0.1)
    found = []
    for fused in (False, True):
        model = tiny_model("moeut", dtype=dtype)
        optimizer = make_optimizer(config, model.named_parameters(), fused=fused)
        allocate_moments(model, optimizer)
        generator = torch.Generator().manual_seed(0)
        for step in range(4):
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad = noise.to(parameter.dtype)
            if step == 2:
                saved, _ = state_tensors(model, optimizer)
                saved = {name: tensor.clone() for name, tensor in saved.items()}
                optimizer = make_optimizer(config, model.named_parameters(), fused=fused)
                allocate_moments(model, optimizer)
                set_updates(model, optimizer, step)
                for name, tensor in state_tensors(model, optimizer)[0].items():
                    tensor.copy_(saved[name])
            optimizer.step()
        found.append(state_tensors(model, optimizer)[0])
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for name, expected in found[0].items():
        error = (found[1][name].double() - expected.double()).norm()
        assert error <= tolerance * expected.double().norm(), name


def test_gpus_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert not make_optimizer(OptimConfig(), [("weight", weight)]).defaults["fused"]
    monkeypatch.setattr(torch.nn.Parameter, "device", torch.device("cuda"), raising=False)
    assert make_optimizer(OptimConfig(), [("weight", weight)]).defaults["fused"]
