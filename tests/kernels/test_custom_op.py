"""Operators in eager mode: the numbers that they have through `torch.library`, which modes still see."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from kernel_cases import CASES, all_equal, make_call, through_library
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from moebius.kernels.custom_op import CustomOp, custom_op
from moebius.kernels.functional import routed_linear
from moebius.kernels.fused.router import route_top_k, softmax_sums
from moebius.kernels.gradients import accumulate_weight_gradients
from moebius.model.head_loss import head_loss

Call = Callable[..., Tensor]


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def experts(activation: str, biases: str, backend: str) -> tuple[Call, list[Tensor]]:
    operation, x, weights, routes = make_call(CASES["random"], activation, biases, seed=1)
    weight_N = routes.weight_N.clone()

    def call(weight_N: Tensor, *leaves: Tensor) -> Tensor:
        given = routes.with_weights(weight_N)
        with accumulate_weight_gradients():
            y = operation(*leaves, given, backend=backend)
            y = y + operation(*leaves, given, backend=backend)
        narrow = routed_linear(leaves[0], leaves[1], given, backend=backend)
        return y.square().sum() + narrow.square().sum()

    return call, [weight_N, x, *weights]


def router(gate: Any) -> tuple[Call, list[Tensor]]:
    def call(x: Tensor, weight: Tensor) -> Tensor:
        logits, experts, gates, _ = route_top_k(x, weight, top_k=2, gate=gate, heads=2)
        return (gates * experts).sum() + softmax_sums(logits, 3).square().sum()

    return call, [numbers(9, 8), numbers(10, 8)]


def head(*, shares: bool) -> tuple[Call, list[Tensor]]:
    targets, share = torch.arange(9) % 7, torch.rand(9) if shares else None

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return head_loss(x, weight, bias, targets, rows=4, share_T=share) * 3

    return call, [numbers(9, 8), numbers(7, 8), numbers(7)]


CALLS = {
    "relu, segments": experts("relu", "both biases", "segments"),
    "geglu, the fastest": experts("geglu", "no bias", "auto"),
    "sigmoid": router("sigmoid"),
    "softmax": router("softmax"),
    "head": head(shares=False),
    "head with shares": head(shares=True),
}


@contextmanager
def packed() -> Iterator[None]:
    with saved_tensors_hooks(lambda x: x.numpy(force=True), torch.from_numpy):
        yield


def of_checkpoint(call: Call, *leaves: Tensor) -> Any:
    return checkpoint(call, *leaves, use_reentrant=False)


def gradients(call: Call, leaves: Sequence[Tensor], *, twice: bool = False) -> list[Any]:
    """The loss and all gradients; or where there is an error, its kind."""
    try:
        loss = call(*leaves)
        if not loss.requires_grad:
            return [loss]
        grads = torch.autograd.grad(loss, leaves, create_graph=twice)
        if twice:
            total = torch.stack([grad.sum() for grad in grads]).sum()
            grads = torch.autograd.grad(total, leaves, allow_unused=True)
        return [loss.detach(), *grads]
    except (RuntimeError, NotImplementedError) as error:
        return [type(error)]


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "alone": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "saved tensors' hooks": packed,
    "checkpoint": nullcontext,
    "twice": nullcontext,
}


@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_the_library(name: str, around: str) -> None:
    call, values = CALLS[name]
    leaves = [value.clone().requires_grad_() for value in values]

    def run(*leaves: Tensor) -> Tensor:
        return of_checkpoint(call, *leaves) if around == "checkpoint" else call(*leaves)

    found = []
    for way in (nullcontext, through_library):
        profile: Any = torch.autograd.profiler.profile()
        with way(), SURROUNDINGS[around](), profile:
            found.append(gradients(run, leaves, twice=around == "twice"))
        calls = [event.name for event in profile.function_events if "moebius::" in event.name]
        # what has no second gradient is refused by the library
        assert bool(calls) == (way is through_library) or around == "twice", calls
    assert len(found[0]) == len(found[1])
    for one, other in zip(*found, strict=True):
        assert one is other or all_equal([one], [other])


# An operator of our own ---------------------------------------------------------------------------


def make_operator() -> CustomOp:
    """Returns scale · x, and x's sum, which has no gradient; adds 1 to the buffers."""

    @custom_op("moebius_test::scaled")
    def scaled(x: Tensor, scale: float, name: str | None) -> tuple[Tensor, Tensor]:
        return x * scale, x.sum()

    def keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.scale = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0])

    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
        [_output] = ctx.saved_tensors
        return grad * ctx.scale, None, None

    scaled.register_fake(lambda x, scale, name: (torch.empty_like(x), x.new_empty(())))
    scaled.register_autograd(backward, setup_context=keep)
    return scaled


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Own(Tensor): ...


def inside(mode: AbstractContextManager[Any], x: Tensor) -> Callable[[Call], Any]:
    def run(call: Call) -> Any:
        with mode:
            return call(x)

    return run


X = torch.arange(6.0)
THROUGH_THE_LIBRARY: dict[str, tuple[bool, Callable[[Call], Any]]] = {
    "eager": (False, lambda call: call(X)),
    "a parameter": (False, lambda call: call(torch.nn.Parameter(X))),
    "a mode of operators": (True, inside(Seen(), X)),
    "counted FLOPs": (True, inside(FlopCounterMode(display=False), X)),
    "a mode of functions": (True, inside(Functions(), X)),
    "a default device": (True, inside(torch.device("cpu"), X)),
    "without data": (True, lambda call: call(X.to("meta"))),
    "a fake tensor": (True, lambda call: call(FakeTensorMode().from_tensor(X))),
    "a class of its own": (True, lambda call: call(X.as_subclass(Own))),
    "vmap": (True, lambda call: torch.vmap(call)(X[:, None])),
    "a traced graph": (True, lambda call: make_fx(call)(X)),
}


@pytest.mark.parametrize("name", THROUGH_THE_LIBRARY)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_whoever_looks_at_operators_sees_one(name: str) -> None:
    operator = make_operator()
    is_seen, run = THROUGH_THE_LIBRARY[name]
    with mock.patch.object(operator, "_op", wraps=operator._op) as library:
        run(lambda x: operator(x, scale=2.0, name=None)[0])
    assert library.called == is_seen


def test_gradients_are_taken_as_torch_takes_them() -> None:
    operator, x = make_operator(), X.clone().requires_grad_()
    scaled, total = operator(x, 2.0, None)
    assert (scaled.requires_grad, total.requires_grad) == (True, False)
    scaled.sum().backward(retain_graph=True)
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 6
    with torch.no_grad():
        scaled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scaled.sum().backward()
    for wrong in ({"scale": 1.0}, {"scale": 1.0, "name": None, "other": 1}):
        with pytest.raises((RuntimeError, TypeError)):
            operator(x, **wrong)


def test_what_an_operator_writes_has_another_version() -> None:
    @custom_op(
        "moebius_test::add",
        mutates_args=("into",),
        schema="(Tensor x, Tensor(a!)[] into) -> Tensor",
    )
    def add(x: Tensor, into: list[Tensor]) -> Tensor:
        for each in into:
            each.numpy()[...] += x.detach().numpy()  # as a kernel writes
        return x.clone()

    into, x = [torch.zeros(6), torch.zeros(6)], X.clone().requires_grad_()
    add(X, into)
    assert [(float(each[1]), each._version) for each in into] == [(1, 1), (1, 1)]
    with pytest.raises(RuntimeError, match="no autograd formula"):  # as the library says
        add(x, into).sum().backward()
