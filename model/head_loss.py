"""The read-out (the output layer), and its cross-entropy without materialising all logits.

Logits are the widest rows of a model: V columns, where the residual stream has D. Keeping them
costs a training step T·V numbers four times (logits, their float32 log-softmax, two gradients),
none of which is needed once the gradients of rows, weight and bias are known. So the loss processes
tokens in chunks: logits, log-softmax, loss, gradient of the logits, and at once the chunk's share
of the three gradients. Those wait for the backward pass, T·D and V·D numbers, which only multiplies
them by the gradient of the loss.

Chunks are of tokens, not of the vocabulary. A softmax needs the whole row, so chunks of the
vocabulary would compute every logit twice (a fourth product beside the three). With chunks of
tokens the formulas are the plain loss's. The price: V·D sums are read and written once per chunk, so
a chunk is as large as the cache (CPU) or the products (GPU) prefer.

If only some targets count (prompts, padding), the other rows are in no chunk: they cost no product,
and their gradient is 0.

The whole loss is one op, because torch.compile could otherwise compute the chunks side by side.

Legend: B sequences, S positions, T = B·S tokens, C of them whose targets count, D model width, V
vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.flop_counter import register_flop_formula

from ..kernels.custom_op import custom_op
from .layers import Linear, wide_dtype

# per chunk: with fewer, summing the weight's gradient costs too much beside its products
_LEAST_ROWS = 256
_TILE = 128
_LOGITS_ON_CPU, _LOGITS_ELSEWHERE = 2**22, 2**25  # of a chunk: 16 and 128 MiB in float32


class ReadOut(Linear):
    """Computes the next token's logits, or their summed cross-entropy.

    With `tied` it has no weight, and every call passes the embedding's. Rows are divided by `scaling`.
    """

    def __init__(
        self, d_in: int, d_out: int, *, tied: bool = False, scaling: float = 1, **given: Any
    ) -> None:
        super().__init__(d_in, d_out, **given)
        self.scaling = scaling
        if tied:
            del self.weight
            self.register_parameter("weight", None)

    def forward(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        counted_C: Tensor | None = None,
        tied_VD: Tensor | None = None,
        share_BS: Tensor | None = None,
    ) -> Tensor:
        """Computes logits, (B, S, V) in the weight's dtype; with targets their cross-entropy.

        Targets are (B, S) int64; the loss is a scalar in nats, float32 or float64. For `counted_C`
        see `head_loss`. With `share_BS` the loss is Σ share · cross-entropy, differentiable in both.
        """
        weight_VD = self.weight if tied_VD is None else tied_VD
        x = x if self.scaling == 1 else x / self.scaling
        if targets is None:
            bias = None if self.bias is None else self.bias.to(weight_VD.dtype)
            return F.linear(x.to(weight_VD.dtype), weight_VD, bias)
        share_T = None if share_BS is None else share_BS.flatten()
        return head_loss(
            x.flatten(0, -2), weight_VD, self.bias, targets.flatten(), counted_C, share_T=share_T
        )


def head_loss(
    x_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_T: Tensor,
    counted_C: Tensor | None = None,
    *,
    rows: int | None = None,
    share_T: Tensor | None = None,
) -> Tensor:
    """Sums cross_entropy(W·x + b, target) over tokens without materialising all logits.

    Logits are computed in the weight's dtype, the rest in float32.

    Args:
        x_TD: any precision, as is the bias; their gradients have the same.
        weight_VD: W.
        bias_V: b.
        targets_T: int64, 0 … V−1.
        counted_C: int64, ascending: the tokens whose targets count; None: all.
        rows: tokens of a chunk; None: chosen for the device.
        share_T: float32 or float64, what each token's loss is multiplied by; None: 1.
    """
    wanted = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x_TD, weight_VD, bias_V)
    )
    if rows is None:
        rows = rows_of_chunk(weight_VD.shape[0], weight_VD.device.type)
    held_T = None if share_T is None else share_T.detach()
    given = (x_TD, weight_VD, bias_V, targets_T, counted_C, held_T, rows, wanted)
    loss, losses_T, *_ = _head_loss(*given)
    if share_T is None:
        return loss
    of_share = (share_T * losses_T).sum()  # whose value is in `loss`
    return loss + of_share - of_share.detach()


def rows_of_chunk(vocab_size: int, device_type: str) -> int:
    """Returns how many tokens' logits exist at a time, in whole tiles of the product."""
    logits = _LOGITS_ON_CPU if device_type == "cpu" else _LOGITS_ELSEWHERE
    return max(_LEAST_ROWS, logits // vocab_size // _TILE * _TILE)


# The op returns the loss, each token's if they have shares, and the gradients: of x in its dtype, of
# weight and bias in float32. They are empty unless wanted.


@custom_op("moebius::head_loss")
def _head_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    counted: Tensor | None,
    share: Tensor | None,
    rows: int,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide, low = wide_dtype(weight), None if bias is None else bias.to(weight.dtype)
    loss, losses, *grads = outputs = _outputs(x, weight, bias, share, wanted)
    if counted is not None:
        grads[0].zero_()  # uncounted rows are in no chunk
    losses_C1 = loss.new_empty(len(targets if counted is None else counted), 1)
    for first in range(0, len(losses_C1), rows):
        here = slice(first, first + rows)
        part = here if counted is None else counted[here]
        x_RD, targets_R1 = x[part].to(weight.dtype), targets[part][:, None]
        log_p_RV = F.linear(x_RD, weight, low).log_softmax(-1, dtype=wide)
        torch.gather(log_p_RV, 1, targets_R1, out=losses_C1[here])
        if wanted:
            grad_RV = log_p_RV.exp_()  # of the logits: softmax minus one at the target
            grad_RV.scatter_(1, targets_R1, -1, reduce="add")
            if share is not None:
                grad_RV *= share[part][:, None]
            _add_gradients(grads, part, grad_RV, x_RD, weight)
    losses_C = losses_C1.neg_().squeeze(1)
    if share is not None:
        losses[slice(None) if counted is None else counted] = losses_C
        losses_C = losses_C * (share if counted is None else share[counted])
    torch.sum(losses_C, 0, out=loss)
    return outputs


def _outputs(
    x: Tensor, weight: Tensor, bias: Tensor | None, share: Tensor | None, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocates the loss, each token's, and the gradients of x, weight and bias.

    The gradients of weight and bias start at 0, being sums over chunks; so does each token's loss.
    """
    wide = wide_dtype(weight)
    return (
        weight.new_empty((), dtype=wide),
        weight.new_zeros(0 if share is None else len(x), dtype=wide),
        x.new_empty(x.shape if wanted else 0),
        weight.new_zeros(weight.shape if wanted else 0, dtype=wide),
        weight.new_zeros(weight.shape[0] if wanted and bias is not None else 0, dtype=wide),
    )


def _add_gradients(
    grads: list[Tensor], part: slice | Tensor, grad_RV: Tensor, x_RD: Tensor, weight: Tensor
) -> None:
    """Adds one chunk's share to the gradients, with products in the weight's dtype."""
    grad_x, grad_weight, grad_bias = grads
    if len(grad_bias):
        grad_bias += grad_RV.sum(0)
    grad_RV = grad_RV.to(weight.dtype)
    grad_x[part] = (grad_RV @ weight).to(grad_x.dtype)
    if grad_weight.dtype == weight.dtype:
        grad_weight.addmm_(grad_RV.T, x_RD)
    else:
        grad_weight += grad_RV.T @ x_RD


@_head_loss.register_fake
def _(x, weight, bias, targets, counted, share, rows, wanted):
    return _outputs(x, weight, bias, share, wanted)


def _context(ctx: Any, inputs: tuple, output: tuple) -> None:
    _, weight, bias, *_ = inputs
    _, losses, *grads = output
    ctx.mark_non_differentiable(losses, *grads)
    ctx.set_materialize_grads(False)  # no zeros for non-differentiable outputs
    ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(*grads)


@once_differentiable  # the saved gradients have no history
def _gradients(ctx: Any, grad: Tensor | None, *_unused: Tensor) -> tuple:
    if grad is None:
        return (None,) * 8
    grad_x, grad_weight, grad_bias = ctx.saved_tensors
    weight_dtype, bias_dtype = ctx.dtypes
    bias = None if bias_dtype is None else (grad_bias * grad).to(bias_dtype)
    return (
        (grad_x * grad).to(grad_x.dtype),
        (grad_weight * grad).to(weight_dtype),
        bias,
        *(None,) * 5,
    )


_head_loss.register_autograd(_gradients, setup_context=_context)


@register_flop_formula(torch.ops.moebius.head_loss)
def _(x, weight, bias, targets, counted, share, rows, wanted, **_kwargs) -> int:
    tokens = x[0] if counted is None else counted[0]
    return 2 * tokens * weight[0] * weight[1] * (3 if wanted else 1)
