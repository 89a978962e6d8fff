"""Triton's operators in eager mode compute the bits that they compute through `torch.library`, and
kernels are launched on their tensors' device.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from kernel_cases import Case, all_equal, make_call, through_library
from torch import Tensor

from moebius.kernels.functional import routed_linear, routed_mlp
from moebius.kernels.fused.norm import add_norm
from moebius.kernels.fused.rotary import rotate_pair
from moebius.kernels.fused.router import route_top_k
from moebius.kernels.gradients import accumulate_weight_gradients
from moebius.kernels.triton import guard
from moebius.kernels.triton.guard import cdiv, launch, next_power_of_2, triton

Graph = tuple[Callable[..., Tensor], list[Tensor]]


def experts(*, defer: bool) -> Graph:
    _, x, weights, routes = make_call(Case(4, 8, 4, 6, 2), "relu", "no bias", seed=1)

    def call(weight_N: Tensor, x: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
        given = routes.with_weights(weight_N)
        with accumulate_weight_gradients() if defer else nullcontext():
            y = routed_mlp(x, w_up, w_down, given, backend="triton", defer=defer)
            y = y.sum() + routed_linear(x, w_up, given, backend="triton", defer=defer).sum()
        return y

    return call, [routes.weight_N.clone(), x, *weights]


def layer() -> Graph:
    """A norm, a rotation and a router."""
    table = torch.rand(3, 8), torch.rand(3, 8)

    def call(x: Tensor, y: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        rows = add_norm(x, y, norm, None, 1e-5, low=torch.float32, copies=("normed", "total"))
        assert rows.normed is not None
        q, k = (each.view(1, 2, 3, 8) for each in rows.copies)
        q, k = rotate_pair(q, k, *table, scale=0.5)
        logits, _, gates, _ = route_top_k(rows.normed, weight, top_k=2, gate="softmax")
        return (q * k).sum() + (logits * 0.1).sum() + gates.square().sum() + rows.total.sum()

    return call, [torch.randn(6, 8), torch.randn(6, 8), torch.rand(8), torch.randn(5, 8)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [experts(defer=False), experts(defer=True), layer()],
    ids=["experts", "deferred", "layer"],
)
def test_values_and_gradients_are_those_of_the_library(case: Graph) -> None:
    call, values = case
    leaves, found = [value.clone().requires_grad_() for value in values], []
    for way in (nullcontext, through_library):
        with way():
            loss = call(*leaves)
            found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert all_equal(*found)


@pytest.mark.parametrize(("device", "is_entered"), [(-1, False), (0, False), (1, True)])
def test_a_kernel_is_launched_on_its_tensors_device(device: int, is_entered: bool) -> None:
    entered, launched = [], []
    tensor = SimpleNamespace(is_cuda=device >= 0, get_device=lambda: device)

    @contextmanager
    def device_of(tensor: Any) -> Iterator[None]:
        entered.append(tensor)
        yield

    def run(*args: Any, grid: tuple[int], warmup: bool, **constants: Any) -> None:
        assert (grid, warmup) == ((3,), False)
        launched.append((args, constants, list(entered)))

    with (
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "device_of", device_of),
    ):
        launch(SimpleNamespace(run=run), 3, None, tensor, 5, E=2)
        launch(None, 0, tensor)
    assert launched == [((None, tensor, 5), {"E": 2}, [tensor] * is_entered)]


def test_sizes_are_those_of_triton_which_takes_long_for_them() -> None:
    """A call of Triton's own functions on the host takes 3 µs."""
    for path in Path(guard.__file__).parent.glob("*.py"):
        assert not re.findall(r"triton\.(?:cdiv|next_power_of_2)\(", path.read_text()), path
    numbers: Sequence[int] = (1, 2, 3, 16, 17, 1000, 2**20 + 1)
    assert [next_power_of_2(n) for n in numbers] == [triton.next_power_of_2(n) for n in numbers]
    assert [cdiv(n, 7) for n in (0, *numbers)] == [triton.cdiv(n, 7) for n in (0, *numbers)]
