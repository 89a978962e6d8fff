"""The optimizer: its groups, its rates, the bits of its steps."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from family import tiny_model

from moebius.plugins import PluginError
from moebius.train.optim import (
    MuonConfig,
    OptimConfig,
    make_optimizer,
    muon_rate,
    optimizer_of,
    set_rates,
)
from moebius.train.state import allocate_moments, state_tensors


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
    optimizer = optimizer_of(config, model)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = {name: parameter.mean().item() for name, parameter in model.named_parameters()}
    kept = {name for name, value in after.items() if value == 1.0}
    of_injection = ("rate_bias", "step_bias", "input.weight", "output.weight")
    assert kept == {f"loops.injection.{name}" for name in of_injection}
    assert all(value == pytest.approx(0.95) for name, value in after.items() if name not in kept)


def grouped(named: list[tuple[str, torch.nn.Parameter]], config: OptimConfig) -> torch.optim.SGD:
    """Reads all keys that concern some parameters."""
    of_routers = [parameter for name, parameter in named if "router" in name]
    of_norms = [parameter for name, parameter in named if "norm" in name]
    others = [parameter for name, parameter in named if "router" not in name and "norm" not in name]
    rate, decay = config.learning_rate, config.weight_decay
    groups: list[dict[str, Any]] = [
        {"params": of_routers, "lr": rate * config.router_rate, "weight_decay": decay},
        {"params": of_norms, "lr": rate},
        {"params": others, "lr": rate},
    ]
    return torch.optim.SGD(groups)


def flat(named: list[tuple[str, torch.nn.Parameter]], config: OptimConfig) -> torch.optim.SGD:
    decay = config.weight_decay
    return torch.optim.SGD([one for _, one in named], config.learning_rate, weight_decay=decay)


@pytest.mark.parametrize(
    ("own", "settings", "unread"),
    [
        (flat, {"router_rate": 0.5}, "optim.router_rate"),
        (flat, {"router_rate": 0.0, "head_rate": 2.0}, "optim.router_rate, optim.head_rate"),
        (flat, {"embedding_rate": 0.5}, "optim.embedding_rate"),
        (flat, {"weight_decay_on": "matrices"}, "optim.weight_decay_on"),
        (flat, {"weight_decay_on": "matrices", "weight_decay": 0.0}, ""),
        (flat, {}, ""),
        (grouped, {"router_rate": 0.5, "weight_decay_on": "matrices"}, ""),
        (grouped, {"router_rate": 0.5, "embedding_rate": 3.0}, "optim.embedding_rate"),
    ],
)
def test_an_own_optimizer_that_ignores_a_key_is_refused(
    own: Any, settings: dict[str, Any], unread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "parts_of_this_test", SimpleNamespace(make=own))
    config = OptimConfig(kind="parts_of_this_test:make", **settings)
    model = tiny_model("olmoe_small")
    if unread:
        with pytest.raises(PluginError) as refused:
            optimizer_of(config, model)
        assert f"parts_of_this_test:make does not read {unread}: give" in str(refused.value)
    else:
        assert isinstance(optimizer_of(config, model), torch.optim.SGD)


def test_muon_without_a_matrix_says_what_to_use() -> None:
    with pytest.raises(
        PluginError, match=r"no trained parameter is a matrix: use optim\.kind=adamw"
    ):
        optimizer_of(OptimConfig(kind="muon"), torch.nn.LayerNorm(3))


def test_the_rate_of_muons_matrices_is_logged_if_it_is_their_own() -> None:
    own = OptimConfig(kind="muon", muon=MuonConfig(learning_rate=0.02), learning_rate=1e-3)
    assert muon_rate(own, 5e-4) == {"muon_learning_rate": pytest.approx(0.01)}
    assert muon_rate(OptimConfig(kind="muon"), 5e-4) == {}


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(32, 3), (8, 8), (33, 3), (1, 1)])
def test_experts_are_updated_alike_in_any_slot_and_by_any_thread(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Else copies of an expert would drift apart, and moved ones from those that stay."""
    generator = torch.Generator().manual_seed(0)
    bank = torch.randn(101, *shape, generator=generator).to(dtype)
    grads = [1e-2 * torch.randn(bank.shape, generator=generator).to(dtype) for _ in range(20)]

    def updated(parts: list[torch.Tensor], num_threads: int, dim: int = 0) -> torch.Tensor:
        parameters = [torch.nn.Parameter(part.contiguous().clone()) for part in parts]
        named = [(str(place), parameter) for place, parameter in enumerate(parameters)]
        optimizer = make_optimizer(OptimConfig(learning_rate=1e-2), named)
        assert [group["fused"] for group in optimizer.param_groups] == [True]
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        for grad in grads:
            cuts = grad.split([p.shape[dim] for p in parts], dim)
            for parameter, part in zip(parameters, cuts, strict=True):
                parameter.grad = part
            optimizer.step()
        torch.set_num_threads(before)
        return torch.cat([parameter.detach() for parameter in parameters], dim)

    whole = updated([bank], 3)
    assert torch.equal(whole, updated(list(bank.split(1)), 1))
    assert torch.equal(whole, updated([bank[:7], bank[7:60], bank[60:]], 2))
    for dim in (1, 2):  # as FSDP cuts inside a bank
        assert torch.equal(whole, updated(list(bank.split(5, dim)), 1, dim))


def fused(config: OptimConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    return make_optimizer(config, model.named_parameters())


def unfused(config: OptimConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        foreach=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_makes_the_same_steps(dtype: torch.dtype) -> None:
    """GPUs use it; here it runs on a CPU, resumed in the middle like a checkpoint."""
    config = OptimConfig(learning_rate=1e-2, weight_decay=0.1)
    found = []
    for make in (unfused, fused):
        model = tiny_model("moeut", dtype=dtype)
        optimizer = make(config, model)
        allocate_moments(model, optimizer, 0)
        generator = torch.Generator().manual_seed(0)
        for step in range(4):
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad = noise.to(parameter.dtype)
            if step == 2:
                saved, _ = state_tensors(model, optimizer)
                saved = {name: tensor.clone() for name, tensor in saved.items()}
                optimizer = make(config, model)
                allocate_moments(model, optimizer, step)
                for name, tensor in state_tensors(model, optimizer)[0].items():
                    tensor.copy_(saved[name])
            optimizer.step()
        found.append(state_tensors(model, optimizer)[0])
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for name, expected in found[0].items():
        error = (found[1][name].double() - expected.double()).norm()
        assert error <= tolerance * expected.double().norm(), name
