"""One layer: attention and feed-forward, and the residual stream between them.

Attention and feed-forward each add their output to the stream. The sum is then normalised and
handed to each reader. With plain operations every matrix casts its own input. With Triton's kernels
the addition, the norm and the casts are one pass over the rows (kernels/fused/norm.py), which gives
each reader rows in its products' dtype. Results agree up to float32 rounding, except for one sum: if
a shared expert and routed experts read the same bfloat16 copy, their two gradients are added in
bfloat16, an error of at most 2⁻⁹ of the sum.

Legend: B sequences, S positions, D model width.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ..kernels.fused.norm import Copied, add_norm, runs_fused
from ..plugins import PluginError
from .attention.attention import make_attention
from .attention.base import DepthContext
from .balance import RouterReport, report_routing
from .config.model_config import ModelConfig
from .execution.draws import drawing
from .execution.recompute import recomputing, run_recomputed
from .initialise import Initializers
from .layers import DenseMLP, LayerNorm, make_norm
from .loops.halting import Unhalted
from .moe import SparseFeedForward
from .routers.router import Router
from .routing import Routing

# residual: the stream that outputs are added to. routers: the norm in its own precision. queries
# (and keys) and values (and experts): operands of products.
Reader = Literal["residual", "routers", "queries", "values"]
Order = Literal["pre", "peri", "post"]


class Layer(nn.Module):
    """Applies attention and feed-forward with their residual connections.

    Peri-layernorm normalises only the input of maps that end in a softmax or sigmoid (queries,
    keys, routers). Values and experts read the raw residual, so an update scales with the residual
    it joins. Pre-layernorm: everything reads the normalised rows. Post-layernorm: everything reads
    the residual, and the norm follows the addition. Sandwich also normalises after each addition,
    branch each output before it. Output normalises each output and nothing else.
    """

    def __init__(
        self, config: ModelConfig, initializers: Initializers, member: int, *, backend: str
    ) -> None:
        super().__init__()
        self.norm, self._has_own_parts = config.norm, bool(config.own_parts)
        self.backend = backend
        new_norm = partial(make_norm, config.norm_layer, config.norm_eps)
        has_norm = config.norm != "output"
        self.attention_norm = new_norm(config.d_model) if has_norm else None
        self.attention = make_attention(config, initializers, member, backend=backend)
        sparse = config.has_experts(member)
        # A dense feed-forward has no router, so nothing would read its norm under peri-layernorm.
        has_norm = has_norm and (sparse or config.norm != "peri")
        self.feed_forward_norm = new_norm(config.d_model) if has_norm else None
        if sparse:
            self.feed_forward = SparseFeedForward(config, initializers, backend=backend)
        else:
            self.feed_forward = DenseMLP(
                config.d_model,
                config.feed_forward.d_feed_forward,
                activation=config.feed_forward.activation,
                bias=config.feed_forward.dense_bias,
                up_init=initializers.dense(config.d_model),
                down_init=initializers.dense(config.feed_forward.d_feed_forward, is_output=True),
            )
        self.attention_output_norm = self.feed_forward_output_norm = None
        if config.norm in ("sandwich", "branch", "output"):
            self.attention_output_norm = new_norm(config.d_model)
            self.feed_forward_output_norm = new_norm(config.d_model)

        has_routers = bool(self.attention.routers())
        self._attention_readers: tuple[Reader, ...] = (
            "queries",
            "values",
            *(("routers",) if has_routers else ()),
        )
        self._feed_forward_readers: tuple[Reader, ...] = (
            "values",
            *(("routers",) if sparse else ()),
        )

    def routers(self) -> dict[str, Router]:
        """Returns this layer's routers by kind."""
        found = self.attention.routers()
        if isinstance(self.feed_forward, SparseFeedForward):
            found["feed_forward"] = self.feed_forward.router
        return found

    def forward(
        self, x_BSD: Tensor, context: DepthContext
    ) -> tuple[Tensor, dict[str, RouterReport]]:
        """Computes one depth step, (B, S, D) to (B, S, D), both in the residual's dtype.

        Returns:
            The new residual stream, and the routers' reports by kind.
        """
        if context.recompute == "none" or context.cache is not None or not torch.is_grad_enabled():
            return self._step(context, x_BSD)
        unhalted = context.unhalted
        halting = () if unhalted is None else (unhalted.memory_BSD, unhalted.weight_BS)
        step, before = partial(self._step, replace(context, unhalted=None)), self._router_states()
        found = run_recomputed(
            context.recompute, self, step, x_BSD, *halting, reset_generators=self._has_own_parts
        )
        if (after := self._router_states()) != before:
            changed = next(key for key in after if after[key] != before.get(key))
            raise PluginError(
                f"train.recompute={context.recompute}: the forward pass of a router changes its own "
                f"{changed}, and a recomputed step runs it twice: keep no state between calls (set "
                "reads_step to get the depth step), or set train.recompute=none"
            )
        return found

    def _router_states(self) -> dict[str, object]:
        """Returns the numbers that routers keep, and the versions of their buffers."""
        found: dict[str, object] = {}
        for kind, router in self.routers().items():
            kept = vars(router).items()
            found |= {
                f"{kind}.{key}": value for key, value in kept if isinstance(value, int | float)
            }
            found |= {f"{kind}.{key}": value._version for key, value in router.named_buffers()}
        return found

    def _step(
        self, context: DepthContext, x_BSD: Tensor, *halting: Tensor
    ) -> tuple[Tensor, dict[str, RouterReport]]:
        if halting:  # the step is recomputed
            context = replace(context, unhalted=Unhalted(*halting))
        with drawing(context.draws):
            return self._attend_and_feed(context, x_BSD)

    def _attend_and_feed(
        self, context: DepthContext, x_BSD: Tensor
    ) -> tuple[Tensor, dict[str, RouterReport]]:
        is_post = self.norm == "post"
        read = self._read(
            x_BSD, None, None if is_post else self.attention_norm, self._attention_readers
        )
        y_BSD, routings = self.attention(
            read["values"],
            read["queries"],
            context,
            router_input_BSD=read.get("routers"),
        )
        norm = self.attention_norm if is_post else self.feed_forward_norm
        x_BSD, y_BSD = self._after(
            read["residual"], y_BSD, self.attention_output_norm, context.residual_scale
        )
        read = self._read(x_BSD, y_BSD, norm, self._feed_forward_readers)
        if isinstance(self.feed_forward, SparseFeedForward):
            y_BSD, routings["feed_forward"] = self.feed_forward(
                read["values"], read["routers"], context.unhalted, context.rows, context.step
            )
        else:
            y_BSD = self.feed_forward(read["values"])
        x_BSD, y_BSD = self._after(
            read["residual"], y_BSD, self.feed_forward_output_norm, context.residual_scale
        )
        read = self._read(x_BSD, y_BSD, self.feed_forward_norm if is_post else None)
        marks = context.marks_choices and not recomputing()
        return read["residual"], self._reports(routings, x_BSD.shape[0], marks=marks)

    def _after(
        self, x_BSD: Tensor, y_BSD: Tensor, output_norm: nn.Module | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the residual stream and the output that the next `_read` adds to it; None: nothing."""
        is_branch = self.norm in ("branch", "output")
        if output_norm is not None and is_branch:
            y_BSD = output_norm(y_BSD)
        if scale != 1:
            y_BSD = scale * y_BSD
        if output_norm is None or is_branch:
            return x_BSD, y_BSD
        return output_norm(x_BSD + y_BSD), None

    def _read(
        self,
        x_BSD: Tensor,
        y_BSD: Tensor | None,
        norm: nn.Module | None,
        readers: Collection[Reader] = (),
    ) -> dict[Reader, Tensor]:
        """Adds y, normalises, and returns the rows for the next map and the residual."""
        return read_residual(
            x_BSD,
            y_BSD,
            norm,
            order=self.norm if self.norm in ("peri", "post") else "pre",
            readers=readers,
            low=self.attention.dtype,
            backend=self.backend,
        )

    def _reports(
        self, routings: dict[str, Routing], batch_size: int, *, marks: bool
    ) -> dict[str, RouterReport]:
        routers = self.routers()
        return {
            kind: report_routing(
                routing,
                routers[kind].statistics(routing, batch_size)
                if self.training and batch_size
                else {},
                marks=marks and kind == "feed_forward",
            )
            for kind, routing in routings.items()
        }


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
