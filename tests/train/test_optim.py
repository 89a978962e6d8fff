"""The published schedule at its published points."""

import pytest
import torch

from moebius.train.optim import OptimConfig, learning_rate_at, make_optimizer


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


def test_every_parameter_decays() -> None:
    weight, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer(OptimConfig(weight_decay=0.5, learning_rate=0.1), [weight, bias])
    for parameter in (weight, bias):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert weight[0, 0].item() == bias[0].item() == pytest.approx(0.95)
