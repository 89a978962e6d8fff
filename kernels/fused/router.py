"""Top-k routing by logits as one operation: x Wᵀ, the K greatest of each head, and their gates.

In torch on a GPU this is a float32 product without tensor cores, a sort of every row, and the gates'
operations, each through memory. In Triton, `route_top_k` is one kernel forward (triton/router.py,
which bounds the error of its logits) and three backward (triton/router_gradients.py), also with the
sums of a balancing loss, and for several routers of the same rows. Elsewhere it runs in torch
operations in float32. On CPUs with the `brgemm` backend its micro-kernels compute all three
products, which have few columns and are slow in torch's own library.

Legend: B sequences, T rows (B·S, sequence-major), D width, R routers, H heads of one, A experts of a
head, E = R·H·A experts, K experts chosen, S parts of the rows.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..backend import resolve_backend
from ..cpu import brgemm
from ..cpu.library import call, handles
from ..custom_op import custom_op
from ..gradients import gradient_sum, shared_weights, sum_parts
from ..triton.available import kernels, reason_against

Product = Callable[[Tensor, Tensor], Tensor]
Gate = Literal["sigmoid", "softmax", "softmax_of_chosen"]
WIDEST = 32  # experts of a head up to which softmaxes are faster in C++
MOST_EXPERTS = 1024  # of a head: a warp keeps a row of logits in registers


def can_route(backend: str, x_TD: Tensor, weight_ED: Tensor, *, heads: int = 1) -> bool:
    """Returns whether a kernel supports these rows and weights with this backend (`kernels.backend`).

    Kernels need float32 weights and float32 or bfloat16 rows. `auto` uses Triton on CUDA and
    `brgemm` on CPUs.
    """
    device = x_TD.device.type
    if weight_ED.dtype != torch.float32 or x_TD.dtype not in (torch.float32, torch.bfloat16):
        return False
    if backend in ("auto", "brgemm") and device == "cpu":
        return _has_brgemm()
    is_tritons = backend == "triton" or (backend == "auto" and device == "cuda")
    return (
        is_tritons
        and weight_ED.shape[0] <= heads * MOST_EXPERTS
        and torch.version.hip is None  # warps read other warps' stores, which AMD does not order
        and reason_against(device, torch.float32) is None
    )


class Routed(NamedTuple):
    """Holds what one router decides, or several that read the same rows."""

    logits_THA: Tensor  # float32, H counts the heads of all routers
    experts_THK: Tensor  # int64, numbered over one router's heads; of several (R, T, H, K)
    gates_THK: Tensor  # float32; of several (R, T, H, K)
    # softmax(logits) summed over each sequence; None: not requested, or Triton's kernel does not run
    sums_BHA: Tensor | None = None

    def of_each(self, routers: int) -> "list[Routed]":
        """Returns what each of several routers decides."""
        logits = self.logits_THA.unflatten(1, (routers, -1)).unbind(1)
        found = [*map(Routed, logits, self.experts_THK.unbind(), self.gates_THK.unbind())]
        if self.sums_BHA is None:
            return found
        sums = self.sums_BHA.unflatten(1, (routers, -1)).unbind(1)
        return [each._replace(sums_BHA=own) for each, own in zip(found, sums, strict=True)]


def by_triton(x_TD: Tensor) -> bool:
    """Returns whether `route_top_k` runs Triton's kernels on these rows."""
    return reason_against(x_TD.device.type, torch.float32) is None


def route_top_k(
    x_TD: Tensor,
    weight_ED: Tensor,
    *,
    top_k: int,
    gate: Gate,
    heads: int = 1,
    routers: int = 1,
    num_sequences: int = 0,
    given_THK: Tensor | None = None,
) -> Routed:
    """Selects the K experts with the greatest logits in each head, greatest first, and gates them.

    Among equal logits the kernel selects the lowest expert, torch on CPUs any. NaN is greater than
    any number.

    Args:
        x_TD: rows, cast to float32.
        weight_ED: float32; every head has A neighbours of them.
        top_k: K, at most A.
        gate: "sigmoid" of the chosen logits, "softmax" over the A experts of the head, or
            "softmax_of_chosen" over the K chosen ones.
        heads: H of one router; a router's head h has its experts h·A … h·A + A − 1.
        routers: R, whose weights follow each other. More than one needs `by_triton`.
        num_sequences: B, for sums over so many equal parts of the rows; 0: no sums.
        given_THK: int64, experts to use instead of a selection: an earlier run's decision.

    Returns:
        Logits, experts, gates and sums. All but the experts are differentiable.

    Raises:
        ValueError: an unknown gate, or numbers of experts, heads and choices that do not fit.
    """
    num_experts, all_heads = weight_ED.shape[0], routers * heads
    if gate not in get_args(Gate):
        raise ValueError(f"gate={gate!r} is unknown: choose {', '.join(get_args(Gate))}")
    if all_heads < 1 or num_experts % all_heads or not 0 < top_k <= num_experts // all_heads:
        raise ValueError(
            f"top_k={top_k} of each of heads={heads} cannot be chosen among {num_experts} experts: "
            "heads must divide the experts, and top_k is at most the experts of a head"
        )
    x_TD, weight_ED = x_TD.to(torch.float32).contiguous(), weight_ED.contiguous()
    number, sums_BHA = 0, None
    if by_triton(x_TD):
        (weight_ED,), number = shared_weights(weight_ED, defer=False)
    is_summed = num_sequences and len(x_TD) and len(x_TD) % num_sequences == 0
    if not is_summed or not by_triton(x_TD):
        num_sequences = 0
    sizes = top_k, heads, routers, num_sequences
    logits_TE, experts_THK, gates_THK, sums_BE = _route_top_k(
        x_TD, weight_ED, given_THK, gate, *sizes, number
    )
    if num_sequences:
        sums_BHA = sums_BE.unflatten(1, (all_heads, -1))
    return Routed(logits_TE.unflatten(1, (all_heads, -1)), experts_THK, gates_THK, sums_BHA)


@custom_op("moebius::route_top_k")
def _route_top_k(
    x_TD: Tensor,
    weight_ED: Tensor,
    given_THK: Tensor | None,
    gate: str,
    top_k: int,
    heads: int,
    routers: int,
    num_sequences: int,
    number: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns logits, experts, gates and sums (B, E), empty if not requested."""
    if by_triton(x_TD):
        kernel = kernels("router").route_top_k
        return kernel(x_TD, weight_ED, given_THK, gate, top_k, heads, routers, num_sequences)
    assert routers == 1, "several routers need Triton's kernel"
    logits_TE = _logits(x_TD, weight_ED)
    logits_THA = logits_TE.unflatten(1, (heads, -1))
    first_H1 = torch.arange(heads, device=x_TD.device)[:, None] * logits_THA.shape[2]
    if given_THK is None:
        place_THK = greatest(logits_THA, top_k)
        chosen_THK, experts_THK = logits_THA.gather(-1, place_THK), place_THK + first_H1
    else:
        experts_THK = given_THK.clone()
        chosen_THK = logits_THA.gather(-1, given_THK - first_H1)
    if gate == "sigmoid":
        gates_THK = chosen_THK.sigmoid()
    elif gate == "softmax":
        gates_THK = (chosen_THK - logits_THA.logsumexp(-1, keepdim=True)).exp()
    else:
        gates_THK = chosen_THK.softmax(-1)
    return logits_TE, experts_THK, gates_THK, x_TD.new_empty(0)


def _logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    if x_TD.device.type == "cpu" and _has_brgemm():
        return brgemm.product(x_TD, weight_ED, transposed=True)
    return x_TD @ weight_ED.T


@_route_top_k.register_fake
def _(x_TD: Tensor, weight_ED: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    top_k, heads, routers, num_sequences = given[2:6]
    num_rows, num_experts = x_TD.shape[0], weight_ED.shape[0]
    gates_THK = x_TD.new_empty(*[routers] * (routers > 1), num_rows, heads, top_k)
    experts_THK = torch.empty_like(gates_THK, dtype=torch.int64)
    sums_BE = x_TD.new_empty(num_sequences, num_experts) if num_sequences else x_TD.new_empty(0)
    return x_TD.new_empty(num_rows, num_experts), experts_THK, gates_THK, sums_BE


def _context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    x_TD, weight_ED, _, ctx.gate, *_, num_sequences, ctx.number = inputs
    logits_TE, experts_THK, gates_THK, _ = output
    ctx.mark_non_differentiable(experts_THK)
    ctx.set_materialize_grads(False)  # without a balancing loss the logits have no gradient
    kept_TE = logits_TE if ctx.gate == "softmax" or num_sequences else None
    ctx.save_for_backward(x_TD, weight_ED, experts_THK, gates_THK, kept_TE)


def _gradients(ctx: Any, grad_TE: Tensor | None, _experts: Any, *others: Tensor | None) -> tuple:
    grads = grad_TE, *others  # of logits, gates and sums
    if all(grad is None for grad in grads):
        return (None,) * 9
    x_TD, weight_ED, *made = ctx.saved_tensors
    wants_x, wants_weight, *_ = ctx.needs_input_grad
    grad_x, parts_SED = _route_top_k_backward(
        x_TD, weight_ED, *made, *grads, ctx.gate, wants_x, wants_weight
    )
    grad_weight, total = None, gradient_sum(ctx.number)
    if wants_weight and total is not None:
        total.add_parts(parts_SED)
    elif wants_weight:
        grad_weight = sum_parts(parts_SED)
    return grad_x if wants_x else None, grad_weight, *(None,) * 7


@custom_op("moebius::route_top_k_backward")
def _route_top_k_backward(
    x_TD: Tensor,
    weight_ED: Tensor,
    experts_THK: Tensor,
    gates_THK: Tensor,
    logits_TE: Tensor | None,
    grad_TE: Tensor | None,
    grad_THK: Tensor | None,
    grad_BE: Tensor | None,
    gate: str,
    wants_x: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of x, and the weights' in parts (S, E, D); empty if not requested."""
    made = experts_THK, gates_THK, logits_TE
    if by_triton(x_TD):
        given = grad_TE, grad_THK, grad_BE
        grads = tuple(None if each is None else each.contiguous() for each in given)
        found = kernels("router_gradients").route_top_k_backward(
            x_TD, weight_ED, made, grads, gate=gate, wants=(wants_x, wants_weight)
        )
        grad_x, grad_weight = (x_TD.new_empty(0) if grad is None else grad for grad in found)
        return grad_x, grad_weight
    if grad_THK is not None:
        grad_TE = _logit_gradient(made, grad_TE, grad_THK, gate, num_experts=len(weight_ED))
    assert grad_TE is not None
    product, product_gradient = _backward_products(grad_TE)
    return (
        product(grad_TE, weight_ED) if wants_x else x_TD.new_empty(0),
        product_gradient(grad_TE, x_TD)[None] if wants_weight else x_TD.new_empty(0),
    )


def _backward_products(grad_TE: Tensor) -> tuple[Product, Product]:
    """Returns the functions that compute a · b and aᵀ · b."""
    if grad_TE.device.type == "cpu" and _has_brgemm():
        return brgemm.product, brgemm.product_gradient
    return torch.matmul, lambda a, b: a.T @ b


def _logit_gradient(
    made: tuple[Tensor, Tensor, Tensor | None],
    grad_TE: Tensor | None,
    grad_THK: Tensor,
    gate: str,
    *,
    num_experts: int,
) -> Tensor:
    """Returns the logits' gradient: their own plus that through the gates."""
    experts_THK, gates_THK, logits_TE = made
    weighed_THK = grad_THK * gates_THK
    if gate == "sigmoid":
        chosen_THK = weighed_THK * (1 - gates_THK)
    elif gate == "softmax":
        chosen_THK = weighed_THK
    else:
        chosen_THK = weighed_THK - gates_THK * weighed_THK.sum(-1, keepdim=True)
    if grad_TE is None:
        grad_TE = gates_THK.new_zeros(len(gates_THK), num_experts)
    # no row has an expert twice, so the order of additions does not matter
    grad_TE = grad_TE.scatter_add(1, experts_THK.flatten(1), chosen_THK.flatten(1))
    if logits_TE is None:
        return grad_TE
    share_THA = logits_TE.unflatten(1, (experts_THK.shape[1], -1)).softmax(-1)
    return grad_TE - (share_THA * weighed_THK.sum(-1, keepdim=True)).flatten(1)


@_route_top_k_backward.register_fake
def _(x_TD: Tensor, weight_ED: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    (wants_x, wants_weight), num_parts = given[-2:], 1
    if by_triton(x_TD):
        num_parts = kernels("router_gradients").num_parts(len(x_TD), weight_ED)
    return (
        torch.empty_like(x_TD) if wants_x else x_TD.new_empty(0),
        x_TD.new_empty(num_parts, *weight_ED.shape) if wants_weight else x_TD.new_empty(0),
    )


_route_top_k.register_autograd(_gradients, setup_context=_context)


def _has_brgemm() -> bool:
    return resolve_backend("auto", torch.device("cpu"), torch.float32) == "brgemm"


@register_flop_formula(torch.ops.moebius.route_top_k)
def _(x: Any, weight: Any, *_: Any, **_kw: Any) -> int:
    """Counts one product, two FLOPs per multiply-accumulate, although the kernel computes three."""
    return 2 * x[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.moebius.route_top_k_backward)
def _(x: Any, weight: Any, *rest: Any, **_kw: Any) -> int:
    """Counts one product for each requested gradient."""
    return sum(rest[-2:]) * 2 * x[0] * weight[0] * weight[1]


# Scores on CPUs: top-k, and the averages of a balancing loss --------------------------------------
#
# `greatest` takes a third of the time of `torch.topk` for 12 of 155 experts, two thirds for 2 of 5.
# `softmax_sums` takes 3 ns per expert in heads of 8; `torch.softmax` takes 18. It saves no
# probabilities for the backward pass, only the existing logits. Without a compiler, on other devices
# and in other dtypes, torch operations compute the same.


def finds_first(scores: Tensor) -> bool:
    """Returns whether `greatest` breaks ties by the lowest index, which `torch.topk` leaves open."""
    return handles(scores, torch.float32)


def greatest(scores: Tensor, count: int) -> Tensor:
    """Returns the indices (int64) of the `count` greatest scores along the last axis, greatest first.

    NaN is greater than any number.

    Raises:
        ValueError: `count` is not in 1 … E.
    """
    if not 0 < count <= scores.shape[-1]:
        raise ValueError(f"count={count} must be 1 to {scores.shape[-1]}, the number of scores")
    if finds_first(scores):
        return _top_k(scores, count)
    return scores.topk(count, dim=-1).indices


def softmax_sums_reference(logits_THA: Tensor, batch_size: int) -> Tensor:
    """Defines `softmax_sums` in plain operations under autograd."""
    return logits_THA.softmax(-1).unflatten(0, (batch_size, -1)).sum(1)


def softmax_sums(logits_THA: Tensor, batch_size: int) -> Tensor:
    """Sums softmax(logits) over the rows of each sequence, (B, H, A); differentiable."""
    if logits_THA.shape[-1] <= WIDEST and handles(logits_THA, torch.float32):
        return _softmax_sums(logits_THA, batch_size)
    return softmax_sums_reference(logits_THA, batch_size)


@custom_op("moebius::top_k")
def _top_k(scores: Tensor, count: int) -> Tensor:
    scores, width = scores.contiguous(), scores.shape[-1]
    places = torch.empty(*scores.shape[:-1], count, dtype=torch.int64)
    num_rows = places.numel() // count
    call("top_k", scores, num_rows, width, count, places, torch.get_num_threads())
    return places


@_top_k.register_fake
def _(scores: Tensor, count: int) -> Tensor:
    return scores.new_empty(*scores.shape[:-1], count, dtype=torch.int64)


@custom_op("moebius::softmax_sums")
def _softmax_sums(logits_THA: Tensor, batch_size: int) -> Tensor:
    logits_THA, threads = logits_THA.contiguous(), torch.get_num_threads()
    rows, heads, experts = logits_THA.shape
    sums_BHA = logits_THA.new_empty(batch_size, heads, experts)
    shape = batch_size, rows // batch_size, heads, experts
    call("softmax_sums", logits_THA, *shape, sums_BHA, threads)
    return sums_BHA


@custom_op("moebius::softmax_sums_gradient")
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


def _keep_logits(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _sums_gradients(ctx: Any, grad_BHA: Tensor) -> tuple:
    return _softmax_sums_gradient(grad_BHA, *ctx.saved_tensors), None


_softmax_sums.register_autograd(_sums_gradients, setup_context=_keep_logits)
