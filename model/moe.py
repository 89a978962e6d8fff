"""One sparse layer: token view → router → dispatch → experts → combine (+ shared). One rank or a
thousand, these are the lines.

A router returns routes, or a mixture; a mixture's rows are merged here, travel as routes of known
counts, and are emitted here.

On one rank `LocalDispatcher` hands back what it got: no copy, no sort. Across ranks another
dispatcher (distributed/) takes its place; the layer, its experts and their kernels stay the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .experts import ExpertLinears, ExpertMLPs
from .feed_forward_config import ExpertsConfig
from .halting import Unhalted
from .initialise import Initializers, uniform, xavier_uniform
from .layers import DenseMLP, LayerNorm, Linear
from .routers.table import make_router
from .routing import Mixture, Routes, Routing, slot_routes


class Part(Protocol):
    """Rows that this rank must serve, and their routes with local expert numbers."""

    @property
    def x_UD(self) -> Tensor:
        """Waits for the rows where they are still under way."""
        ...

    @property
    def routes(self) -> Routes: ...

    def answer(self, y_UD: Tensor) -> Any:
        """The experts' answers set out for home; what comes back is for `combine` alone."""
        ...


@dataclass(frozen=True)
class Sent:
    """What a rank must serve after dispatch: one part, or several, each under way while the experts
    answer the one before.
    """

    parts: Sequence[Part]
    way_home: Any = None  # the dispatcher's own

    @property
    def x_UD(self) -> Tensor:
        """Rows of the only part."""
        [part] = self.parts
        return part.x_UD

    @property
    def routes(self) -> Routes:
        """Routes of the only part."""
        [part] = self.parts
        return part.routes

    def answers(self, y: Tensor | Sequence[Any]) -> Sequence[Any]:
        """The parts' answers as they set out; those of the only part may be given as they are."""
        if not isinstance(y, Tensor):
            return y
        [part] = self.parts
        return [part.answer(y)]


class Dispatcher(Protocol):
    """Moves rows to the ranks that hold their experts, and brings the answers home."""

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Sent:
        """Collective over the dispatcher's ranks, with or without rows. Does not wait for the rows."""
        ...

    def combine(self, y: Tensor | Sequence[Any], sent: Sent) -> Tensor:
        """(num_targets, D): the answers of all experts, weighted and added up where their routes
        say.

        Args:
            y: what `answer` gave for every part, in order; or the only part's answers (U, D).
        """
        ...


@dataclass(frozen=True)
class Here:
    """The part of a rank that serves itself."""

    x_UD: Tensor
    routes: Routes

    def answer(self, y_UD: Tensor) -> Tensor:
        """Is at home."""
        return y_UD


class LocalDispatcher:
    """Every expert is here."""

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Sent:
        """Hands back what it got."""
        return Sent((Here(x_UD, routes),))

    def combine(self, y: Tensor | Sequence[Any], sent: Sent) -> Tensor:
        """The experts have added up their answers already."""
        [answer] = sent.answers(y)
        return answer


class SparseLayer(nn.Module):
    """A bank of experts behind a dispatcher: the one place where rows may leave this rank."""

    def __init__(self, experts: ExpertMLPs | ExpertLinears) -> None:
        super().__init__()
        self.experts = experts
        self.dispatcher: Dispatcher = LocalDispatcher()

    def forward(
        self, x_UD: Tensor, routes: Routes, beside: Callable[[], None] | None = None
    ) -> Tensor:
        """(U, D_in) source rows to (num_targets, D_out). `beside` is called while the rows travel."""
        # In the experts' own precision before they travel: half the bytes in bfloat16, and sums of
        # the same rounding on one rank and on many.
        sent = self.dispatcher.dispatch(x_UD.to(self.experts.dtype), routes)
        if beside is not None:
            beside()
        answers = [part.answer(self.experts(part.x_UD, part.routes)) for part in sent.parts]
        return self.dispatcher.combine(answers, sent)


class SubTokens(nn.Module):
    """The token view of Multi-Head MoE (arXiv 2404.15045): a row becomes h rows of width D/h, and
    one again.

    The sub-tokens of a row are neighbours. Rows stay sequence-major, so to a router it looks like h
    times as many positions. With `residual` a sub-token is added to its experts' answer, as the
    paper writes it; its released code does not.
    """

    def __init__(self, d_model: int, num_heads: int, *, residual: bool) -> None:
        super().__init__()
        self.num_heads, self.residual = num_heads, residual
        self.head = Linear(
            d_model,
            d_model,
            init=xavier_uniform(2**-0.5),
            bias=True,
            bias_init=uniform(d_model**-0.5),
        )
        self.merge = Linear(d_model, d_model, init=xavier_uniform(), bias=True)

    def split(self, x_TD: Tensor) -> Tensor:
        """(T, D) to (T·h, D/h)."""
        return self.head(x_TD).unflatten(1, (self.num_heads, -1)).flatten(0, 1)

    def join(self, y_UC: Tensor, x_UC: Tensor) -> Tensor:
        """The experts' answers to the sub-tokens x, each (T·h, D/h), to (T, D)."""
        y_UC = y_UC + x_UC if self.residual else y_UC
        return self.merge(y_UC.unflatten(0, (-1, self.num_heads)).flatten(1))


class SparseFeedForward(nn.Module):
    """The feed-forward of every architecture here that has experts.

    Router and experts may read different inputs: in peri-layernorm the router sees the normalised
    row, the experts the raw one.
    """

    def __init__(self, config: ModelConfig, initializers: Initializers, *, backend: str) -> None:
        super().__init__()
        experts = config.experts
        assert experts is not None
        width = config.d_model // experts.sub_tokens
        self.view = None
        if experts.sub_tokens > 1:
            self.view = SubTokens(
                config.d_model, experts.sub_tokens, residual=experts.sub_token_residual
            )
        self.router = make_router(
            experts.router, width, experts.num_experts, init=initializers.router(width)
        )
        up_init, down_init = (
            initializers.expert_up(width),
            initializers.expert_down(experts.num_experts, experts.d_expert),
        )
        bias_inits = (
            initializers.expert_biases(width, experts.d_expert) if experts.expert_bias else None
        )
        self.sparse = SparseLayer(
            ExpertMLPs(
                experts.num_experts,
                width,
                experts.d_expert,
                backend=backend,
                up_init=up_init,
                down_init=down_init,
                activation=experts.activation,
                bias_inits=bias_inits,
            )
        )
        d_shared = experts.num_shared_experts * experts.d_expert
        self.shared = None
        if d_shared:
            self.shared = DenseMLP(
                config.d_model,
                d_shared,
                activation=experts.activation,
                bias=experts.expert_bias,
                up_init=initializers.dense(config.d_model),
                down_init=initializers.dense(d_shared),
            )
        self.routed_weight, self.shared_weight = _sum_weights(experts)
        self.output_norm = LayerNorm(config.d_model) if experts.output_norm else None

    def forward(
        self, x_BSD: Tensor, router_input_BSD: Tensor, unhalted: Unhalted | None = None
    ) -> tuple[Tensor, Routing]:
        """(B, S, D) to (B, S, D), with the routing for losses and metrics. Tokens that have halted
        cost no expert.
        """
        batch = x_BSD.shape[0]
        x_TD, router_input_TD = x_BSD.flatten(0, 1), router_input_BSD.flatten(0, 1)
        same_input = router_input_BSD is x_BSD
        if self.view is not None:
            x_TD = self.view.split(x_TD)
            router_input_TD = x_TD if same_input else self.view.split(router_input_TD)
        routing = self.router(router_input_TD, batch_size=batch)
        if unhalted is not None:
            routing = routing.of_weighted_rows(unhalted.weight_of_rows(len(x_TD)))
        shared: list[Tensor] = []
        y_TD = self.answers(x_TD, routing.plan, beside=lambda: self._share(x_BSD, shared))
        if self.view is not None:
            y_TD = self.view.join(y_TD, x_TD)
        y_BSD = y_TD.view(batch, -1, y_TD.shape[1])
        if self.output_norm is not None:
            y_BSD = self.output_norm(y_BSD)
        for shared_BSD in shared:
            y_BSD = self.routed_weight * y_BSD + self.shared_weight * shared_BSD
        return y_BSD, routing

    def _share(self, x_BSD: Tensor, out: list[Tensor]) -> None:
        """The shared experts work while the rows of the others travel."""
        if self.shared is not None:
            out.append(self.shared(x_BSD))

    def answers(
        self, x_TD: Tensor, plan: Routes | Mixture, *, beside: Callable[[], None] | None = None
    ) -> Tensor:
        """The experts' answers to T rows, as the plan says."""
        if isinstance(plan, Routes):
            return self.sparse(x_TD, plan, beside)
        dtype = self.sparse.experts.dtype
        members_GMD = x_TD.to(dtype)[plan.rows_GM]
        mixed_PGD = torch.einsum("gmp,gmd->pgd", plan.merge_GMP.to(dtype), members_GMD)
        routes = slot_routes(
            mixed_PGD.shape[0] * mixed_PGD.shape[1],
            num_experts=plan.num_experts,
            device=x_TD.device,
        )
        answers_PGD = self.sparse(mixed_PGD.flatten(0, 1), routes, beside).view_as(mixed_PGD)
        emitted_GMD = torch.einsum("gmp,pgd->gmd", plan.emit_GMP.to(dtype), answers_PGD)
        return torch.empty_like(emitted_GMD.flatten(0, 1)).index_copy(
            0, plan.rows_GM.flatten(), emitted_GMD.flatten(0, 1)
        )


def _sum_weights(config: ExpertsConfig) -> tuple[float, float]:
    """Weights of the routed and of the shared experts' answers."""
    if config.shared_sum == "plain":
        return 1.0, 1.0
    k = config.router.active_experts(config.num_experts, sequence_rows=1)
    return k / (k + 1), 1 / (k + 1)
