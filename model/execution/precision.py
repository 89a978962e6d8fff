"""Low precision for matrix products only: weights are cast once per pass, not once per depth step.

A shared layer's weights serve R repeats; casting on use would cost R casts and keep R copies for
the backward pass. Here the forward pass runs on cast copies of the matrices. Their gradients add up
over the repeats and return to the float32 master weights in one cast. Routers, norms, biases,
embeddings and the residual stream stay float32.

train.precision="bfloat16_only" instead stores parameters in bfloat16. Gradients and AdamW's moments
then have that dtype too, and norms, routers and the residual stream compute in it, as in Mixture of
Tokens' runs without mixed precision (arXiv 2310.15961). Only what decides beside a router's matrix
keeps float32 (`deciding` in roles.py): selection biases, temperatures and exit gates. Each part takes its
precision from its own weight (`own_dtype` in model/layers.py). Sums inside a reduction (softmax,
norms, the loss, gradients over ranks) and the loss itself stay float32: three digits of a loss
measure nothing.
"""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from ..config.model_config import Precision
from ..documents import Documents
from ..loops.steps import PassOptions
from ..transformer import ModelOutput, Transformer
from .roles import deciding

_FULL_PRECISION = ("router", "norm", "halting")  # suffixes of module names

# Beside the products' inputs, bfloat16 rounds the sum of a shared weight's gradients over its repeats,
# sums of input gradients over one row's routes, gate weights inside experts, and the head's logits.


def products_dtype(precision: Precision) -> torch.dtype:
    """Returns the dtype in which a run of that precision multiplies matrices."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def stored_dtype(precision: Precision) -> torch.dtype:
    """Returns the dtype in which a run of that precision keeps all parameters that do not decide."""
    return torch.bfloat16 if precision == "bfloat16_only" else torch.float32


def store_in(model: Transformer, dtype: torch.dtype) -> None:
    """Stores a model's parameters in `dtype`, so that no pass casts them again."""
    if dtype != torch.float32:
        model.to(dtype)


def forward_in(
    model: Transformer,
    dtype: torch.dtype,
    tokens_BS: Tensor,
    *,
    targets_BS: Tensor | None = None,
    loss_mask_BS: Tensor | None = None,
    documents: Documents | None = None,
    options: PassOptions | None = None,
) -> ModelOutput:
    """Runs the model with matrix products in `dtype`; float32 runs it unchanged."""
    given = {
        "targets_BS": targets_BS,
        "loss_mask_BS": loss_mask_BS,
        "documents": documents,
        "options": options or PassOptions(),
    }
    # Sharded weights are cast when they are gathered.
    is_cast = model.embedding.dtype == dtype or isinstance(model.embedding, DTensor)
    if dtype == torch.float32 or is_cast:
        return model(tokens_BS, **given)
    return functional_call(model, cast_weights(model, dtype), (tokens_BS,), given)


def cast_weights(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns differentiable copies in `dtype` of the weights of matrix products, by name.

    A layer's are cast together, and so are their gradients, when the layer's last one is there.
    """
    products, found = product_weights(model), {}
    chosen = [each for each in model.named_parameters() if each[0] in products]
    for _, layer in groupby(chosen, key=lambda each: each[0].split(".")[:2]):
        names, weights = zip(*layer, strict=True)
        found |= zip(names, _Cast.apply(dtype, *weights), strict=True)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return found


class _Cast(torch.autograd.Function):
    """Casts several weights in one launch, and their gradients back in another."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        ctx.set_materialize_grads(False)
        copies = [torch.empty_like(weight, dtype=dtype) for weight in weights]
        torch._foreach_copy_(copies, list(weights))  # pyright: ignore[reportPrivateImportUsage]
        ctx.mark_non_differentiable(
            *(c for c, weight in zip(copies, weights, strict=True) if not weight.requires_grad)
        )
        return tuple(copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        given = [grad for grad in grads if grad is not None]
        forms = zip(ctx.dtypes, grads, strict=True)
        cast = [None if g is None else torch.empty_like(g, dtype=dtype) for dtype, g in forms]
        if given:
            found = [each for each in cast if each is not None]
            torch._foreach_copy_(found, given)  # pyright: ignore[reportPrivateImportUsage]
        return None, *cast


def product_weights(model: Transformer) -> set[str]:
    """Returns the names of the parameters that products take in a low precision."""
    named = {name for name, _ in model.named_parameters() if enters_a_product(name)}
    return named - {name for name, _, _ in deciding(model)}


def enters_a_product(name: str) -> bool:
    """Returns whether that parameter is an operand of a matrix product; others stay float32."""
    *modules, attribute = name.split(".")
    if any(module.endswith(_FULL_PRECISION) for module in modules):
        return False
    beside = ("b_up", "b_down", "sinks")
    return not attribute.endswith(("bias", "embedding")) and attribute not in beside
