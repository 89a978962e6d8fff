"""The residual stream between two maps of a layer: add, normalise, and hand rows to each reader.

With plain operations every matrix casts its own input. With Triton's kernels the addition, the norm
and the casts are one pass over the rows (kernels/fused/norm.py), which gives each reader rows in
its products' dtype. Results agree up to float32 rounding and one sum: if a shared expert and routed
experts read the same bfloat16 copy, their two gradients are added in bfloat16, an error of at most
2⁻⁹ of the sum. All other sums are float32.

Legend: B sequences, S positions, D model width.
"""

from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor, nn

from ..kernels.fused.norm import Copied, add_norm, runs_fused
from .layers import LayerNorm

# residual: the stream that outputs are added to. routers: the norm in its own precision. queries
# (and keys) and values (and experts): operands of products.
Reader = Literal["residual", "routers", "queries", "values"]
Order = Literal["pre", "peri", "post"]


def read_residual(
    x_BSD: Tensor,
    y_BSD: Tensor | None,
    norm: nn.Module | None,
    *,
    order: Order,
    readers: Collection[Reader],
    low: torch.dtype,
    backend: str,
) -> dict[Reader, Tensor]:
    """Adds y to the residual stream, normalises, and returns each reader's rows, (B, S, D).

    Args:
        x_BSD: the residual stream.
        y_BSD: the previous map's output; None: add nothing.
        norm: applied to the sum; None: all readers read the sum.
        order: "pre": all but the residual read the norm; "peri": values read the raw sum too;
            "post": the norm is the residual.
        readers: the readers other than the residual; the result may omit any others.
        low: the dtype of products.
        backend: of the expert layers; Triton's does all of it in one pass.
    """
    if isinstance(norm, LayerNorm) and runs_fused(backend, x_BSD, y_BSD, norm.weight, low):
        return _in_one_pass(x_BSD, y_BSD, norm, order=order, readers=readers, low=low)
    x_BSD = x_BSD if y_BSD is None else x_BSD + y_BSD
    n_BSD = x_BSD if norm is None else norm(x_BSD)
    return {
        "residual": n_BSD if order == "post" else x_BSD,
        "routers": n_BSD,
        "queries": n_BSD,
        "values": x_BSD if order == "peri" else n_BSD,
    }


def _in_one_pass(
    x_BSD: Tensor,
    y_BSD: Tensor | None,
    norm: LayerNorm,
    *,
    order: Order,
    readers: Collection[Reader],
    low: torch.dtype,
) -> dict[Reader, Tensor]:
    kinds: dict[Reader, Copied] = {
        "queries": "normed",
        "values": "total" if order == "peri" else "normed",
    }
    copied: list[Reader] = [reader for reader in kinds if reader in readers]
    made = add_norm(
        x_BSD,
        y_BSD,
        norm.weight,
        norm.bias,
        norm.eps,
        low=low,
        copies=[kinds[reader] for reader in copied],
        wants_normed="routers" in readers or order == "post",
    )
    rows: dict[Reader, Tensor] = dict(zip(copied, made.copies, strict=True))
    if made.normed is not None:
        rows["routers"] = made.normed
    residual_BSD = made.normed if order == "post" else made.total
    assert residual_BSD is not None, "after a post-norm the residual is the norm"
    rows["residual"] = residual_BSD
    return rows
