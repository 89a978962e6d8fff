"""Scores, softmax and the weighted sum of values, over the positions that each query sees.

A position sees itself and those before it; with a window only the last W of them, with documents only
its own document. A sink is a logit per head that takes part in the softmax and adds no value: one
more key, whose score is that logit, in an additional channel (gpt-oss).

Legend: B sequences, S new positions, M all positions (S and the cached ones), H heads of queries, V
of keys and values (a divisor of H; neighbouring query heads share one), C channels of a head.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..documents import Documents

_VARLEN_DTYPES = (torch.bfloat16, torch.float16)


def attend_visible(
    q_BHSC: Tensor,
    k_BVMC: Tensor,
    v_BVMC: Tensor,
    documents: Documents | None,
    *,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Returns softmax(q·kᵀ + causal)·v, within documents if attention respects them, (B, H, S, C).

    Queries and keys are scaled already; the queries are the last S of M positions. Values may have
    another width. Documents need a mask only where torch's variable-length attention does not run,
    as in float32 and with sinks.
    """
    visible = _visible(q_BHSC, k_BVMC, documents, window, needs_mask=sinks_H is not None)
    if isinstance(visible, Documents):
        return _attend_runs(q_BHSC, k_BVMC, v_BVMC, visible, window)
    if sinks_H is not None:
        assert visible is not None
        q_BHSC, k_BVMC, v_BVMC = _with_sinks(q_BHSC, k_BVMC, v_BVMC, sinks_H)
        visible = F.pad(visible, (1, 0), value=True)
    return F.scaled_dot_product_attention(
        q_BHSC,
        k_BVMC,
        v_BVMC,
        attn_mask=visible,
        is_causal=visible is None,
        scale=1.0,
        enable_gqa=q_BHSC.shape[1] != k_BVMC.shape[1],
    )


def _visible(
    q_BHSC: Tensor,
    k_BVMC: Tensor,
    documents: Documents | None,
    window: int | None,
    *,
    needs_mask: bool,
) -> Tensor | Documents | None:
    """Returns which of M positions each of S sees; None: itself and all before; documents: see there."""
    new, total, channels = q_BHSC.shape[2], k_BVMC.shape[2], q_BHSC.shape[3]
    if documents is not None and documents.positions_BS is not None:
        has_kernel = documents.offsets is not None and q_BHSC.dtype in _VARLEN_DTYPES
        if has_kernel and channels <= 256 and not needs_mask:
            return documents
        visible = documents.visible_B1SS
        assert visible is not None, "attention respects documents"
    elif new == total and not needs_mask and (window is None or window >= total):
        return None
    else:
        visible = torch.ones(new, total, dtype=torch.bool, device=q_BHSC.device).tril(total - new)
    if window is not None and window < total:
        visible = visible.triu(total - new - window + 1)
    return visible


def _with_sinks(
    q_BHSC: Tensor, k_BVMC: Tensor, v_BVMC: Tensor, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a first key, which every query scores with its head's sink, and whose value is 0."""
    sinks = sinks_H.to(q_BHSC.dtype)[:, None, None].expand(*q_BHSC.shape[:3], 1)
    sink_BV1C = F.pad(torch.zeros_like(k_BVMC[:, :, :1]), (0, 1), value=1.0)
    k_BVMC = torch.cat((sink_BV1C, F.pad(k_BVMC, (0, 1))), 2)
    return torch.cat((q_BHSC, sinks), -1), k_BVMC, F.pad(v_BVMC, (0, 0, 1, 0))


def _attend_runs(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, window: int | None
) -> Tensor:
    """Attends within each run of rows laid end to end; every tensor is (B, H or V, S, C)."""
    from torch.nn.attention.varlen import varlen_attn  # late: imports torch's compiler, seconds

    batch, heads, length, channels = v.shape[0], q.shape[1], q.shape[2], v.shape[3]
    is_grouped = heads != k.shape[1]
    wide = -(-max(q.shape[3], channels) // 8) * 8  # what the kernel takes: one width, of eights
    q, k, v = (F.pad(x, (0, wide - x.shape[3])) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    offsets, longest = documents.offsets, documents.longest
    assert offsets is not None, "the device has variable-length attention"
    before = -1 if window is None else window - 1
    attended_THC = cast(
        Tensor,
        varlen_attn(
            q,
            k,
            v,
            offsets,
            offsets,
            longest,
            longest,
            scale=1.0,
            window_size=(before, 0),
            enable_gqa=is_grouped,
        ),
    )
    return attended_THC.narrow(-1, 0, channels).unflatten(0, (batch, length)).transpose(1, 2)
