"""Residual, norm and casts on a GPU against plain operations in float64; the same bits in every run, and
in a CUDA graph.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

from family import tiny_model

from moebius.kernels.fused.norm import WIDEST, Copied, NormedRows, add_norm, add_norm_reference
from moebius.model.execution.precision import forward_in

BF16, FP32 = torch.bfloat16, torch.float32
COPIES: list[tuple[Copied, ...]] = [("normed", "total"), ("normed", "normed"), ("total",)]


def operands(
    rows: int, width: int, stream: torch.dtype, added: torch.dtype | None
) -> list[Tensor | None]:
    torch.manual_seed(1)
    x = torch.randn(rows, width, device="cuda").to(stream)
    y = None if added is None else torch.randn(rows, width, device="cuda").to(added)
    weight, bias = (torch.randn(width, device="cuda").to(stream) for _ in range(2))
    return [None if value is None else value.requires_grad_() for value in (x, y, weight, bias)]


def run(
    function: Callable[..., NormedRows], given: Sequence[Tensor | None], **options: Any
) -> list[Tensor]:
    """Its outputs that are wanted."""
    rows = function(*given, 1e-5, **options)
    return [out for out in (rows.total, rows.normed, *rows.copies) if out is not None]


def leaves_of(given: Sequence[Tensor | None]) -> list[Tensor]:
    return [value for value in given if value is not None]


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("width", [5, 412, 1024, 4096, WIDEST])
@pytest.mark.parametrize(
    ("stream", "added"), [(FP32, FP32), (FP32, BF16), (FP32, None), (BF16, BF16)]
)
def test_values_and_gradients(
    stream: torch.dtype, added: torch.dtype | None, width: int, copies: tuple[Copied, ...]
) -> None:
    for rows in (0, 1, 3000):
        given = operands(rows, width, stream, added)
        exact = [None if v is None else v.detach().double().requires_grad_() for v in given]
        found = run(add_norm, given, low=BF16, copies=copies)
        expected = run(add_norm_reference, exact, low=torch.float64, copies=copies)
        grads = [torch.randn_like(out) for out in found]
        mine = torch.autograd.grad(found, leaves_of(given), grads)
        wanted = torch.autograd.grad(expected, leaves_of(exact), [grad.double() for grad in grads])
        for one, other in zip([*found, *mine], [*expected, *wanted], strict=True):
            tolerance = 1e-5 if stream is FP32 and one.dtype is FP32 else 1e-2
            assert (one.double() - other).norm() <= tolerance * other.norm()


def test_equal_bits_in_every_run_and_in_a_graph() -> None:
    given = operands(5000, 412, FP32, BF16)

    def call() -> list[Tensor]:
        found = run(add_norm, given, low=BF16, copies=("normed", "total"))
        grads = [out.detach() for out in found]
        return [*found, *torch.autograd.grad(found, leaves_of(given), grads)]

    first, second = call(), call()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    graph.replay()
    for one, other, replayed in zip(first, second, captured, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, replayed)


@pytest.mark.parametrize("name", ["moeut", "moeut_pre", "moeut_post", "dense"])
def test_a_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where nothing else of the pass differs."""
    tokens = torch.randint(61, (8, 16), device="cuda")

    def gradients() -> list[Tensor]:
        model = tiny_model(name).cuda()
        forward_in(model, FP32, tokens, targets_BS=tokens).read_out.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    fused = gradients()
    monkeypatch.setattr("moebius.model.residual.runs_fused", lambda *given: False)
    for mine, theirs in zip(fused, gradients(), strict=True):
        assert (mine - theirs).norm() <= 1e-4 * theirs.norm() + 1e-6
