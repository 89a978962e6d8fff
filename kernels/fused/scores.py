"""A router's scores on CPUs: where the greatest stand, and what a balancing loss averages.

`top_k` takes a third of the time of `torch.topk` for 155 experts of which 12 are chosen, two thirds
for 5 of which two are. `softmax_sums` takes 3 ns for each expert of a head with 8, where
`torch.softmax`, which goes head by head, takes 18; and it keeps for the backward pass the logits,
which are there already, and no probability. Without a compiler, on another device and in another
dtype torch's operations do the same.

Legend: B sequences, T rows (B·S, sequence-major), H heads, A experts of a head, K chosen.
"""

from typing import Any

import torch
from torch import Tensor

from ..cpu.library import call, handles

WIDEST = 32  # experts of a head up to which softmaxes are quicker in C++


def finds_first(scores: Tensor) -> bool:
    """Tells whether `top_k` takes the first of equal scores, which `torch.topk` leaves open."""
    return handles(scores, torch.float32)


def top_k(scores: Tensor, count: int) -> Tensor:
    """Returns where the `count` greatest along the last axis stand, the greatest first: int64.

    NaN is greater than any number.

    Raises:
        ValueError: `count` is not in 1 … E.
    """
    if not 0 < count <= scores.shape[-1]:
        raise ValueError(f"the {count} greatest of {scores.shape[-1]} scores: choose 1 to all")
    if finds_first(scores):
        return _top_k(scores, count)
    return scores.topk(count, dim=-1).indices


def softmax_sums_reference(logits_THA: Tensor, batch_size: int) -> Tensor:
    """Returns what `softmax_sums` does, by plain operations under autograd: its meaning."""
    return logits_THA.softmax(-1).unflatten(0, (batch_size, -1)).sum(1)


def softmax_sums(logits_THA: Tensor, batch_size: int) -> Tensor:
    """Returns Σ over the rows of each sequence of softmax(logits), (B, H, A), differentiable."""
    if logits_THA.shape[-1] <= WIDEST and handles(logits_THA, torch.float32):
        return _softmax_sums(logits_THA, batch_size)
    return softmax_sums_reference(logits_THA, batch_size)


@torch.library.custom_op("moebius::top_k", mutates_args=())
def _top_k(scores: Tensor, count: int) -> Tensor:
    scores, width = scores.contiguous(), scores.shape[-1]
    places = torch.empty(*scores.shape[:-1], count, dtype=torch.int64)
    num_rows = places.numel() // count
    call("top_k", scores, num_rows, width, count, places, torch.get_num_threads())
    return places


@_top_k.register_fake
def _(scores: Tensor, count: int) -> Tensor:
    return scores.new_empty(*scores.shape[:-1], count, dtype=torch.int64)


@torch.library.custom_op("moebius::softmax_sums", mutates_args=())
def _softmax_sums(logits_THA: Tensor, batch_size: int) -> Tensor:
    logits_THA, threads = logits_THA.contiguous(), torch.get_num_threads()
    rows, heads, experts = logits_THA.shape
    sums_BHA = logits_THA.new_empty(batch_size, heads, experts)
    shape = batch_size, rows // batch_size, heads, experts
    call("softmax_sums", logits_THA, *shape, sums_BHA, threads)
    return sums_BHA


@torch.library.custom_op("moebius::softmax_sums_gradient", mutates_args=())
def _softmax_sums_gradient(grad_BHA: Tensor, logits_THA: Tensor) -> Tensor:
    grad_BHA, logits_THA = grad_BHA.contiguous(), logits_THA.contiguous()
    batch, (rows, heads, experts) = len(grad_BHA), logits_THA.shape
    grad_THA, threads = torch.empty_like(logits_THA), torch.get_num_threads()
    shape = batch, rows // batch, heads, experts
    call("softmax_sums_gradient", grad_BHA, logits_THA, *shape, grad_THA, threads)
    return grad_THA


@_softmax_sums.register_fake
def _(logits_THA: Tensor, batch_size: int) -> Tensor:
    return logits_THA.new_empty(batch_size, *logits_THA.shape[1:])


@_softmax_sums_gradient.register_fake
def _(grad_BHA: Tensor, logits_THA: Tensor) -> Tensor:
    return torch.empty_like(logits_THA)


def _context(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _gradients(ctx: Any, grad_BHA: Tensor) -> tuple:
    return _softmax_sums_gradient(grad_BHA, *ctx.saved_tensors), None


_softmax_sums.register_autograd(_gradients, setup_context=_context)
