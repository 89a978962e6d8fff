"""What a step on one GPU reads on the host: nothing, where no route is dropped. Traced with tensors
that have no values, so that whoever asks for one is found.
"""

from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from family import NAMES, tiny_config
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from moebius.kernels import functional
from moebius.kernels.triton import backend
from moebius.model.precision import forward_in
from moebius.model.recompute import Recompute
from moebius.model.transformer import Transformer
from moebius.train.loss import micro_batch_loss


class Literals(TorchDispatchMode):
    """Notes where a number of the host becomes a tensor: on a GPU a copy that it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the kernels are Triton's, which take counts from the device."""
    monkeypatch.setattr(functional, "resolve_backend", lambda *given: "triton")
    # what is launched at the end of the backward pass, and is no operator
    for name, fields in (
        ("mlp_weight_gradients", ("bank.w_up_EDW", "bank.w_down_EFO")),
        ("linear_weight_gradients", ("w_EDO",)),
    ):
        weights = attrgetter(*fields, "x_UD")
        monkeypatch.setattr(
            backend, name, lambda calls, of=weights: tuple(map(torch.zeros_like, of(calls[0])[:-1]))
        )


def trace(name: str, dtype: torch.dtype, recompute: Recompute) -> int:
    """One micro-batch, forward and backward; how many numbers became tensors."""
    with FakeTensorMode():
        model = Transformer(tiny_config(name))
        model.recompute_layers(recompute)
        rows = torch.zeros(8, 13, dtype=torch.int64)
        forward = partial(forward_in, model, dtype)
        with Literals() as literals:
            micro_batch_loss(forward, rows, global_sequences=8).loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        return literals.count


# Where tokens halt or a capacity refuses routes, the number of those that remain is read.
READS = {"sut", "switch", "switch_causal", "gshard", "x_moe_torchscale"}
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("name", "dtype", "recompute"),
    [
        *((name, FLOAT32, "none") for name in NAMES),
        ("moeut", BFLOAT16, "full"),
        ("moeut", FLOAT32, "selective"),
        ("top_k", BFLOAT16, "selective"),
    ],
)
def test_a_step_without_dropped_routes_reads_nothing(
    name: str, dtype: torch.dtype, recompute: Recompute
) -> None:
    if name in READS:
        with pytest.raises(DynamicOutputShapeException, match="nonzero"):
            trace(name, dtype, recompute)
    else:
        assert trace(name, dtype, recompute) == 0


def test_who_asks_for_a_value_is_found() -> None:
    with FakeTensorMode():
        with pytest.raises(DataDependentOutputException):
            torch.ones(3).sum().item()
        with Literals() as literals:
            torch.tensor([1, 2])
    assert literals.count == 1
