"""The published schedule at its published points."""

import pytest
import torch
from family import tiny_model

from moebius.train.optim import (
    OptimConfig,
    learning_rate_at,
    make_optimizer,
    optimizer_of,
    schedule_notes,
    set_rates,
)
from moebius.train.recipes.smoke import RECIPES
from moebius.train.state import allocate_moments, state_tensors


def test_the_published_rates() -> None:
    config = OptimConfig(warmup_steps=4000, decay_steps=100_000)
    expected = {0: 6.25e-8, 3999: 2.5e-4, 4000: 2.5e-4, 54000: 1.375e-4, 99999: 2.5888e-5}
    for step, rate in expected.items():
        assert learning_rate_at(config, step) == pytest.approx(rate, rel=1e-4), step


def test_without_warmup_it_starts_at_the_peak_and_never_falls_below_the_floor() -> None:
    config = OptimConfig(learning_rate=1e-3, decay_steps=10)
    rates = [learning_rate_at(config, step) for step in range(30)]
    assert rates[0] == 1e-3
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-4)


def test_the_cosine_ends_with_the_run_unless_a_recipe_means_a_number() -> None:
    for name, build in RECIPES.items():
        config = build()
        optim = config.optim.over(config.train.steps)
        last = learning_rate_at(optim, config.train.steps - 1) / optim.learning_rate
        assert last == pytest.approx(optim.final_fraction, rel=0.04), name
        assert not schedule_notes(config.optim, config.train.steps), name
    smoke = RECIPES["smoke"]().optim
    rates = [learning_rate_at(smoke.over(300), step) for step in range(20, 300)]
    assert len(set(rates)) == len(rates)
    large = RECIPES["moeut_244m"]().optim
    assert large.over(100_000) == large.over(50_000)
    assert (large.warmup_steps, large.decay_steps) == (4000, 100_000)


def test_a_cosine_that_does_not_end_with_the_run_is_told_in_one_line() -> None:
    optim = OptimConfig(learning_rate=1e-3, warmup_steps=20)
    early = optim.model_copy(update={"decay_steps": 160})
    assert schedule_notes(early, 300) == [
        "optim.decay_steps=160 ends the cosine at step 180, and train.steps=300: the last step's "
        "rate is 0.0001; optim.decay_steps=none ends it with the run"
    ]
    assert "the last step's rate is 0.000929;" in schedule_notes(early, 50)[0]
    assert schedule_notes(optim, 10) == [
        "optim.warmup_steps=20 is more than train.steps=10: the last step's rate is 0.0005"
    ]
    assert "set optim.decay_steps=140" in schedule_notes(optim, 300, 160)[0]
    own = early.model_copy(update={"schedule": "mine:constant"})
    for quiet in (
        schedule_notes(early, 180),
        schedule_notes(optim, 160, 160),
        schedule_notes(own, 9),
    ):
        assert not quiet


def test_groups_keep_the_ratio_of_their_rates() -> None:
    model = tiny_model("dense")
    optimizer = optimizer_of(OptimConfig(learning_rate=1e-3), model)
    set_rates(optimizer, 3e-4, peak=1e-3)
    assert {group["lr"] for group in optimizer.param_groups} == {3e-4}
    optimizer.param_groups[0]["initial"]["lr"] = 0.0
    set_rates(optimizer, 3e-4, peak=1e-3)
    assert optimizer.param_groups[0]["lr"] == 0.0


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


def test_gpus_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(2))

    def is_fused() -> bool:
        return make_optimizer(OptimConfig(), [("weight", weight)]).param_groups[0]["fused"]

    assert not is_fused()
    monkeypatch.setattr(torch.nn.Parameter, "device", torch.device("cuda"), raising=False)
    assert is_fused()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "fused"), [((32, 3), True), ((8, 8), True), ((33, 3), False)])
def test_experts_are_updated_alike_in_any_slot_and_by_any_thread(
    shape: tuple[int, int], fused: bool, dtype: torch.dtype
) -> None:
    """Else copies of an expert would drift apart, and moved ones from those that stay."""
    generator = torch.Generator().manual_seed(0)
    bank = torch.randn(101, *shape, generator=generator).to(dtype)
    grads = [1e-2 * torch.randn(bank.shape, generator=generator).to(dtype) for _ in range(20)]

    def updated(parts: list[torch.Tensor], num_threads: int) -> torch.Tensor:
        parameters = [torch.nn.Parameter(part.clone()) for part in parts]
        named = [(str(place), parameter) for place, parameter in enumerate(parameters)]
        optimizer = make_optimizer(OptimConfig(learning_rate=1e-2), named)
        assert [group["fused"] for group in optimizer.param_groups] == [fused]
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        for grad in grads:
            for parameter, part in zip(
                parameters, grad.split([len(p) for p in parts]), strict=True
            ):
                parameter.grad = part
            optimizer.step()
        torch.set_num_threads(before)
        return torch.cat([parameter.detach() for parameter in parameters])

    whole = updated([bank], 3)
    assert torch.equal(whole, updated(list(bank.split(1)), 1))
    assert torch.equal(whole, updated([bank[:7], bank[7:60], bank[60:]], 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_makes_the_same_steps(dtype: torch.dtype) -> None:
    """GPUs use it; here it runs on a CPU, resumed in the middle like a checkpoint."""
    config = OptimConfig(learning_rate=1e-2, weight_decay=0.1)
    found = []
    for fused in (False, True):
        model = tiny_model("moeut", dtype=dtype)
        optimizer = make_optimizer(config, model.named_parameters(), fused=fused)
        allocate_moments(model, optimizer, 0)
        generator = torch.Generator().manual_seed(0)
        for step in range(4):
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad = noise.to(parameter.dtype)
            if step == 2:
                saved, _ = state_tensors(model, optimizer)
                saved = {name: tensor.clone() for name, tensor in saved.items()}
                optimizer = make_optimizer(config, model.named_parameters(), fused=fused)
                allocate_moments(model, optimizer, step)
                for name, tensor in state_tensors(model, optimizer)[0].items():
                    tensor.copy_(saved[name])
            optimizer.step()
        found.append(state_tensors(model, optimizer)[0])
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for name, expected in found[0].items():
        error = (found[1][name].double() - expected.double()).norm()
        assert error <= tolerance * expected.double().norm(), name
