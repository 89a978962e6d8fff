"""Low precision for the matrix products only: weights are cast once per pass, not once per depth
step.

A shared layer's weights serve R repeats, so casting them where they are used would cost R casts and
keep R copies for the backward. Here the forward pass runs on cast copies of the matrices; their
gradients add up over the repeats and come back to the float32 master weights in one cast. Routers,
norms, biases, embeddings and the residual stream stay float32.
"""

from typing import overload

import torch
from torch import Tensor
from torch.func import functional_call

from .transformer import ModelLoss, ModelOutput, Transformer

_FULL_PRECISION = ("router", "norm", "halting")  # ends of the names of modules, at any depth

# What bfloat16 does round, beside the products' inputs: the sum of a shared weight's gradients over
# its repeats, sums of input gradients over the routes of one row, gate weights inside the experts,
# and the head's logits.


@overload
def forward_in(model: Transformer, dtype: torch.dtype, tokens_BS: Tensor) -> ModelOutput: ...
@overload
def forward_in(
    model: Transformer, dtype: torch.dtype, tokens_BS: Tensor, *, targets_BS: Tensor
) -> ModelLoss: ...
def forward_in(
    model: Transformer, dtype: torch.dtype, tokens_BS: Tensor, *, targets_BS: Tensor | None = None
) -> ModelOutput | ModelLoss:
    """model(tokens), or with targets their loss, with matrix products in `dtype`; float32 is the
    model as it stands.
    """
    targets = {} if targets_BS is None else {"targets_BS": targets_BS}
    if dtype == torch.float32 or not model.casts_weights:
        return model(tokens_BS, **targets)
    return functional_call(model, cast_weights(model, dtype), (tokens_BS,), targets)


def cast_weights(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Differentiable copies in `dtype` of all weights that enter matrix products, by name."""
    return {
        name: parameter.to(dtype)
        for name, parameter in model.named_parameters()
        if enters_a_product(name)
    }


def enters_a_product(name: str) -> bool:
    """Whether the parameter of that name is an operand of a matrix product; all others stay
    float32.
    """
    *modules, attribute = name.split(".")
    if any(module.endswith(_FULL_PRECISION) for module in modules):
        return False
    return not attribute.endswith(("bias", "embedding")) and attribute not in ("b_up", "b_down")
