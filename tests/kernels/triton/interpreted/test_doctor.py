"""What `moebius doctor --gpu` says of kernels, in the interpreter."""

import pytest
import torch

from moebius.kernels.triton import backend as triton
from moebius.train import gpu_check

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time."""
    monkeypatch.setattr(gpu_check, "TOKENS", 12)


def test_right_kernels_are_ok() -> None:
    finding = gpu_check.check_kernels(CPU, torch.float32)
    assert finding.is_ok, finding
    assert "of plain PyTorch" in finding.found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_forward", "linear_backward"])
def test_a_wrong_kernel_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(triton, name)

    def wrong(*args: object, **options: object) -> tuple:
        first, *rest = right(*args, **options)
        return (first * 1.001, *rest)

    monkeypatch.setattr(triton, name, wrong)
    finding = gpu_check.check_kernels(CPU, torch.float32)
    assert not finding.is_ok
    what = "perceptrons with relu: output" if name == "mlp_forward" else "matrices from 64 to 32"
    assert what in finding.found
    assert "kernels.backend=segments" in finding.advice


def test_kernels_that_cannot_run_are_a_fault() -> None:
    finding = gpu_check.check_kernels(CPU, torch.bfloat16)  # which the interpreter computes wrongly
    assert not finding.is_ok
    assert "Triton's cannot run" in finding.found
