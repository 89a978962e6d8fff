"""Low precision for the matrix products only: weights are cast once per pass, not once per depth
step.

A shared layer's weights serve R repeats, so casting them where they are used would cost R casts and
keep R copies for the backward. Here the forward pass runs on cast copies of the matrices; their
gradients add up over the repeats and come back to the float32 master weights in one cast. Routers,
norms, biases, embeddings and the residual stream stay float32.

train.precision="bfloat16_only" is something else: all parameters and buffers are stored in
bfloat16, so gradients and AdamW's moments have it too, and norms, routers and the residual stream
compute in it (the protocol by which Mixture of Tokens, arXiv 2310.15961, was tried without mixed
precision). Each part asks its own weight how exact it is to be (`own_dtype` in model/layers.py),
so nothing is told to it. Two things stay float32: the sums inside of a reduction (softmax, norms,
the loss, gradients over ranks), as in PyTorch's own bfloat16 operations, and the loss itself, for
three digits of it would measure nothing.
"""

import torch
from torch import Tensor
from torch.func import functional_call

from ..config.model_config import Precision
from ..documents import Documents
from ..transformer import ModelOutput, Transformer

_FULL_PRECISION = ("router", "norm", "halting")  # ends of the names of modules, at any depth

# What bfloat16 does round, beside the products' inputs: the sum of a shared weight's gradients over
# its repeats, sums of input gradients over the routes of one row, gate weights inside the experts,
# and the head's logits.


def products_dtype(precision: Precision) -> torch.dtype:
    """Returns the type in which a run of that precision multiplies matrices."""
    return torch.float32 if precision == "float32" else torch.bfloat16


def stored_dtype(precision: Precision) -> torch.dtype:
    """Returns the type in which a run of that precision keeps its parameters and buffers."""
    return torch.bfloat16 if precision == "bfloat16_only" else torch.float32


def store_in(model: Transformer, dtype: torch.dtype) -> None:
    """Stores all parameters and floating buffers of a model in `dtype`; no pass casts them again.

    A model that is stored in float32 already stays as it is.
    """
    if dtype == torch.float32:
        return
    model.to(dtype)
    model.casts_weights = False


def forward_in(
    model: Transformer,
    dtype: torch.dtype,
    tokens_BS: Tensor,
    *,
    targets_BS: Tensor | None = None,
    loss_mask_BS: Tensor | None = None,
    documents: Documents | None = None,
) -> ModelOutput:
    """Runs the model with its matrix products in `dtype`; float32 is the model as it stands."""
    given = {"targets_BS": targets_BS, "loss_mask_BS": loss_mask_BS, "documents": documents}
    if dtype == torch.float32 or not model.casts_weights:
        return model(tokens_BS, **given)
    return functional_call(model, cast_weights(model, dtype), (tokens_BS,), given)


def cast_weights(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns differentiable copies in `dtype` of the weights of matrix products, by name."""
    return {
        name: parameter.to(dtype)
        for name, parameter in model.named_parameters()
        if enters_a_product(name)
    }


def enters_a_product(name: str) -> bool:
    """Returns whether that parameter is an operand of a matrix product; others stay float32."""
    *modules, attribute = name.split(".")
    if any(module.endswith(_FULL_PRECISION) for module in modules):
        return False
    return not attribute.endswith(("bias", "embedding")) and attribute not in ("b_up", "b_down")
