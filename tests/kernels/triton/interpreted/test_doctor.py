"""What `moebius doctor --gpu` says of kernels, in the interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moebius.kernels.calls import RowGradients
from moebius.kernels.triton import norm, rotary, router, router_gradients
from moebius.kernels.triton.backend import TritonKernels
from moebius.train import gpu_check

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time."""
    monkeypatch.setattr(gpu_check, "TOKENS", 12)


@pytest.mark.slow
def test_right_kernels_are_ok() -> None:
    finding = gpu_check.check_kernels(CPU, torch.float32)
    assert finding.is_ok, finding
    assert "of plain PyTorch" in finding.found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_forward", "linear_backward"])
def test_a_wrong_kernel_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Any = getattr(TritonKernels, name)

    def wrong(*args: object) -> Any:
        found = right(*args)
        if isinstance(found, RowGradients):
            return replace(found, x_UD=found.x_UD * 1.001)
        return found[0] * 1.001, found[1]

    monkeypatch.setattr(TritonKernels, name, wrong)
    finding = gpu_check.check_kernels(CPU, torch.float32)
    assert not finding.is_ok
    what = "perceptrons with relu: output" if name == "mlp_forward" else "matrices from 64 to 32"
    assert what in finding.found
    assert "kernels.backend=segments" in finding.advice


def test_a_wrong_router_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_calls", lambda: iter(()))
    assert gpu_check.check_kernels(CPU, torch.float32).is_ok
    right = router.route_top_k

    def wrong(*args: Any, **options: Any) -> tuple:
        logits, experts, gates = right(*args, **options)
        return logits, experts.flip(-1), gates  # only the gradients see it

    monkeypatch.setattr(router, "route_top_k", wrong)
    finding = gpu_check.check_kernels(CPU, torch.float32)
    assert not finding.is_ok
    assert "router: gradients of rows are off by" in finding.found


def test_a_wrong_gradient_of_a_router_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_calls", lambda: iter(()))
    right: Any = router_gradients.route_top_k_backward

    def wrong(*args: Any, **options: Any) -> tuple:
        grad_x, grad_weight = right(*args, **options)
        return grad_x, grad_weight * 1.001

    monkeypatch.setattr(router_gradients, "route_top_k_backward", wrong)
    finding = gpu_check.check_kernels(CPU, torch.float32)
    assert not finding.is_ok
    assert "router: gradients of weights are off by" in finding.found


def test_a_wrong_norm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_calls", lambda: iter(()))
    right = norm.add_norm_backward

    def wrong(s_TD: torch.Tensor, *args: object, **options: bool) -> None:
        right(s_TD + 0.01, *args, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(norm, "add_norm_backward", wrong)
    finding = gpu_check.check_kernels(CPU, torch.float32)
    assert not finding.is_ok
    assert "residual and norm: gradient of rows is off" in finding.found


def test_a_wrong_rotation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "_calls", lambda: iter(()))
    right = rotary.rotate_pair

    def wrong(*args: Any, scale: float, back: bool) -> None:
        right(*args, scale=scale, back=False)  # only the gradients see it

    monkeypatch.setattr(rotary, "rotate_pair", wrong)
    finding = gpu_check.check_kernels(CPU, torch.float32)
    assert not finding.is_ok
    assert "rotation: gradient of queries is off" in finding.found


def test_kernels_that_cannot_run_are_a_fault() -> None:
    finding = gpu_check.check_kernels(CPU, torch.bfloat16)  # which the interpreter computes wrongly
    assert not finding.is_ok
    assert "Triton's cannot run" in finding.found
