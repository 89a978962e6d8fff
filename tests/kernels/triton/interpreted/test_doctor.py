"""The findings of `moebius doctor --gpu` about kernels, in the interpreter."""

from dataclasses import replace
from functools import partial
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
    """The interpreter is slow."""
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


def other_experts(*args: Any, right: Any, **options: Any) -> tuple:
    logits, experts, *others = right(*args, **options)
    return logits, experts.flip(-1), *others  # only the gradients see it


def larger_gradient(*args: Any, right: Any, **options: Any) -> tuple:
    grad_x, grad_weight = right(*args, **options)
    return grad_x, grad_weight * 1.001


def other_rows(s_TD: torch.Tensor, *args: Any, right: Any, **options: Any) -> None:
    right(s_TD + 0.01, *args, **options)


def without_compiling(*args: Any, right: Any, **options: Any) -> None:
    raise RuntimeError("at 3:33:\nout of") from ValueError("300000 bytes,\nshared memory")


def never_back(*args: Any, right: Any, scale: float, back: bool) -> None:
    right(*args, scale=scale, back=False)  # only the gradients see it


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("module", "name", "wrong", "found"),
    [
        (router, "route_top_k", other_experts, "router: gradient of rows: off by"),
        (
            router_gradients,
            "route_top_k_backward",
            larger_gradient,
            "router: gradient of weights: off by",
        ),
        (norm, "add_norm_backward", other_rows, "residual and norm: gradient of rows: off"),
        (rotary, "rotate_pair", never_back, "rotation: gradient of queries: off"),
        (norm, "add_norm", without_compiling, "norm: RuntimeError: 300000 bytes, shared memory"),
    ],
    ids=["router", "its gradient", "norm", "rotation", "no kernel"],
)
def test_another_wrong_kernel_is_named(
    module: Any, name: str, wrong: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "_expert_cases", lambda: iter(()))
    assert gpu_check.check_kernels(CPU, torch.float32).is_ok
    monkeypatch.setattr(module, name, partial(wrong, right=getattr(module, name)))
    finding = gpu_check.check_kernels(CPU, torch.float32)
    assert not finding.is_ok
    assert found in finding.found


def test_kernels_that_cannot_run_are_a_fault() -> None:
    finding = gpu_check.check_kernels(CPU, torch.bfloat16)  # which the interpreter computes wrongly
    assert not finding.is_ok
    assert "Triton's kernels cannot run" in finding.found
