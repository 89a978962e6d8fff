"""One sparse layer on one rank or a thousand: (split into sub-tokens) → router → dispatch → experts →
combine → (join) + shared experts.

A router returns routes or a mixture. A mixture's weighted sums are built here, sent as one row per
slot, and spread back here.

On one rank `LocalDispatcher` returns its input: no copy, no sort. Across ranks a dispatcher from
distributed/ replaces it; the layer, its experts and their kernels stay the same.

Legend: B sequences, S positions, T tokens or target rows, U rows, D width, G groups of M rows, P
slots, C width of a sub-token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from .config.model_config import DepthStep, ModelConfig
from .documents import DocumentRows
from .experts import ExpertLinears, ExpertMLPs
from .initialise import Initializer, Initializers, uniform, xavier_uniform
from .layers import DenseMLP, Linear, make_norm
from .loops.halting import Unhalted
from .routers.table import make_router
from .routing import Mixture, Routes, Routing, slot_routes


class Dispatched(Protocol):
    """Holds the rows that this rank's experts serve in one pass, and returns their outputs."""

    @property
    def x_UD(self) -> Tensor:
        """Returns the rows that this rank's experts read, (U, D), once they have arrived."""
        ...

    @property
    def routes(self) -> Routes:
        """Returns the routes over these rows, whose experts are numbered on this rank, from 0."""
        ...

    def combine(self, y_TD: Tensor) -> Tensor:
        """Returns the experts' outputs to their ranks and adds them up, (num_targets, D).

        Collective over the dispatcher's ranks.

        Args:
            y_TD: one row for each target row of `routes`.
        """
        ...


class Dispatcher(Protocol):
    """Moves rows to the ranks that hold their experts, and the outputs back."""

    def dispatch(self, x_UD: Tensor, routes: Routes) -> Dispatched:
        """Starts sending every row to the ranks of its experts, without waiting.

        Collective over the dispatcher's ranks, with or without rows.
        """
        ...


@dataclass(frozen=True)
class LocalRows:
    """Holds the rows of a rank that serves itself."""

    x_UD: Tensor
    routes: Routes

    def combine(self, y_TD: Tensor) -> Tensor:
        """Returns the outputs, which the experts have already added up."""
        return y_TD


class LocalDispatcher:
    """Leaves every row in place, because this rank has all experts."""

    def dispatch(self, x_UD: Tensor, routes: Routes) -> LocalRows:
        """Returns rows and routes as they are."""
        return LocalRows(x_UD, routes)


def _step_for(part: nn.Module, step: DepthStep | None) -> dict[str, DepthStep | None]:
    """Returns the depth step for a router or experts that read it."""
    return {"step": step} if getattr(part, "reads_step", False) else {}


class SparseLayer(nn.Module):
    """Puts a bank of experts behind a dispatcher: the only place where rows leave this rank."""

    def __init__(self, experts: ExpertMLPs | ExpertLinears) -> None:
        super().__init__()
        self.experts = experts
        self.dispatcher: Dispatcher = LocalDispatcher()

    def forward(
        self,
        x_UD: Tensor,
        routes: Routes,
        beside: Callable[[], None] | None = None,
        step: DepthStep | None = None,
    ) -> Tensor:
        """Returns the weighted sums of expert outputs, (U, D_in) to (num_targets, D_out).

        `beside` is called while the rows travel.
        """
        # Cast to the experts' dtype before travelling: bfloat16 halves the bytes, and sums round
        # alike on one rank and on many.
        dispatched = self.dispatcher.dispatch(x_UD.to(self.experts.dtype), routes)
        if beside is not None:
            beside()
        given = _step_for(self.experts, step)
        return dispatched.combine(self.experts(dispatched.x_UD, dispatched.routes, **given))


def expert_linears(
    num_experts: int, d_in: int, d_out: int, *, backend: str, init: Initializer
) -> SparseLayer:
    """Builds a sparse layer of one matrix per expert."""
    return SparseLayer(ExpertLinears(num_experts, d_in, d_out, backend=backend, init=init))


class SubTokens(nn.Module):
    """Splits a row into h sub-tokens of width D/h, and joins them (Multi-Head MoE, arXiv
    2404.15045).

    A row's sub-tokens are neighbours. Rows stay sequence-major, so a router sees h times as many
    positions. As in the released code, and unlike the paper's formula, a sub-token is not added to
    its experts' output.
    """

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head = Linear(
            d_model,
            d_model,
            init=xavier_uniform(2**-0.5),
            bias=True,
            bias_init=uniform(d_model**-0.5),
        )
        self.merge = Linear(d_model, d_model, init=xavier_uniform(), bias=True)

    def split(self, x_TD: Tensor) -> Tensor:
        """Splits rows, (T, D) to (T·h, D/h)."""
        return self.head(x_TD).unflatten(1, (self.num_heads, -1)).flatten(0, 1)

    def join(self, y_UC: Tensor) -> Tensor:
        """Joins the experts' outputs for the sub-tokens, (T·h, D/h), to (T, D)."""
        return self.merge(y_UC.unflatten(0, (-1, self.num_heads)).flatten(1))


class SparseFeedForward(nn.Module):
    """Routes rows through experts: the sparse feed-forward of every architecture here.

    In peri-layernorm the router reads the normalised row and the experts the raw one.
    """

    def __init__(self, config: ModelConfig, initializers: Initializers, *, backend: str) -> None:
        super().__init__()
        experts = config.experts
        assert experts is not None
        width = config.d_model // experts.sub_tokens
        self.same_input = config.norm != "peri"
        self.view = None
        if experts.sub_tokens > 1:
            self.view = SubTokens(config.d_model, experts.sub_tokens)
        self.router = make_router(
            experts.router, width, experts.num_experts, init=initializers.router(width)
        )
        self.router.backend = backend
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
        d_shared = experts.d_shared
        self.shared = self.shared_gate = None
        if d_shared:
            self.shared = DenseMLP(
                config.d_model,
                d_shared,
                activation=experts.activation,
                bias=experts.expert_bias,
                up_init=initializers.dense(config.d_model),
                down_init=initializers.dense(d_shared),
            )
        if experts.shared_gate:
            self.shared_gate = Linear(config.d_model, 1, init=initializers.dense(config.d_model))
        self.output_norm = (
            make_norm(config.norm_layer, config.norm_eps, config.d_model)
            if experts.output_norm
            else None
        )

    def forward(
        self,
        x_BSD: Tensor,
        router_input_BSD: Tensor,
        unhalted: Unhalted | None = None,
        rows: DocumentRows | None = None,
        step: DepthStep | None = None,
    ) -> tuple[Tensor, Routing]:
        """Returns the outputs, (B, S, D), and the routing for losses and metrics.

        Halted tokens and padding (marked in `rows`) cost no expert.
        """
        batch = x_BSD.shape[0]
        x_TD, router_input_TD = x_BSD.flatten(0, 1), router_input_BSD.flatten(0, 1)
        if self.view is not None:
            x_TD = self.view.split(x_TD)
            router_input_TD = x_TD if self.same_input else self.view.split(router_input_TD)
        given = _step_for(self.router, step)
        if rows is None:
            routing = self.router(router_input_TD, batch_size=batch, **given)
        else:
            rows = rows.repeated(len(x_TD) // rows.num_rows)
            routing = self.router(router_input_TD, batch_size=batch, real_T=rows.real_T, **given)
            routing = routing.of_documents(rows)
        if unhalted is not None:
            routing = routing.of_weighted_rows(unhalted.weight_of_rows(len(x_TD)))
        shared: list[Tensor] = []
        y_TD = self.expert_outputs(
            x_TD, routing.plan, beside=lambda: self._run_shared(x_BSD, shared), step=step
        )
        if self.view is not None:
            y_TD = self.view.join(y_TD)
        y_BSD = y_TD.unflatten(0, x_BSD.shape[:2])
        if self.output_norm is not None:
            y_BSD = self.output_norm(y_BSD)
        for shared_BSD in shared:
            y_BSD = y_BSD + shared_BSD
        return y_BSD, routing

    def _run_shared(self, x_BSD: Tensor, out: list[Tensor]) -> None:
        """Runs the shared experts while the routed rows travel."""
        if self.shared is not None:
            y_BSD = self.shared(x_BSD)
            if self.shared_gate is not None:
                y_BSD = y_BSD * torch.sigmoid(self.shared_gate(x_BSD))
            out.append(y_BSD)

    def expert_outputs(
        self,
        x_TD: Tensor,
        plan: Routes | Mixture,
        *,
        beside: Callable[[], None] | None = None,
        step: DepthStep | None = None,
    ) -> Tensor:
        """Returns the experts' outputs for T rows, following the plan."""
        if isinstance(plan, Routes):
            return self.sparse(x_TD, plan, beside, step)
        dtype = self.sparse.experts.dtype
        members_GMD = x_TD.to(dtype)[plan.rows_GM]
        mixed_PGD = torch.einsum("gmp,gmd->pgd", plan.merge_GMP.to(dtype), members_GMD)
        routes = slot_routes(
            mixed_PGD.shape[0] * mixed_PGD.shape[1],
            num_experts=plan.num_experts,
            device=x_TD.device,
        )
        outputs_PGD = self.sparse(mixed_PGD.flatten(0, 1), routes, beside, step).view_as(mixed_PGD)
        emitted_GMD = torch.einsum("gmp,pgd->gmd", plan.emit_GMP.to(dtype), outputs_PGD)
        return torch.empty_like(emitted_GMD.flatten(0, 1)).index_copy(
            0, plan.rows_GM.flatten(), emitted_GMD.flatten(0, 1)
        )
