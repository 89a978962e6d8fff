"""What `moebius doctor --gpu` says of kernels, in the interpreter."""

import pytest
import torch

from moebius.cluster.checks import gpus
from moebius.kernels.triton import backend as triton

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes its time."""
    monkeypatch.setattr(gpus, "TOKENS", 12)


def test_right_kernels_are_ok() -> None:
    finding = gpus.look_at_kernels(CPU, torch.float32)
    assert finding.verdict == "ok", finding
    assert "of plain PyTorch" in finding.found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_forward", "linear_backward"])
def test_a_wrong_kernel_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(triton, name)

    def wrong(*args: object, **options: object) -> tuple:
        first, *rest = right(*args, **options)
        return (first * 1.001, *rest)

    monkeypatch.setattr(triton, name, wrong)
    finding = gpus.look_at_kernels(CPU, torch.float32)
    assert finding.verdict == "fail"
    what = "perceptrons with relu: output" if name == "mlp_forward" else "matrices from 64 to 32"
    assert what in finding.found
    assert "kernels.backend=segments" in finding.advice


def test_kernels_that_cannot_run_are_a_fault() -> None:
    finding = gpus.look_at_kernels(CPU, torch.bfloat16)  # which the interpreter computes wrongly
    assert finding.verdict == "fail"
    assert "Triton's cannot run" in finding.found
