"""What a router decides: a list of routes, or a soft mixture.

A route says: read this source row, send it through this expert, weight the output, add it to this
target row. Every sparse layer is such a list, so one dispatcher and one set of kernels serve them
all:

| layer | source row | experts | target row |
|---|---|---|---|
| feed-forward (σ-MoE) | token | E | the same token |
| V projection of SwitchHead | token | H·N_A: head h picks among its own N_A | (token, head) |
| O projection of SwitchHead | (token, head) | H·N_A | token: heads and choices add up |
| Q projection of MoMHA | token | N_A | (token, choice): each chosen expert's queries stay separate |
| O projection of MoMHA | (token, choice) | N_A | token: choices add up |
| expert choice | token | E | the same token; some tokens have no route |

In a mixture (Mixture of Tokens, Soft MoE) every expert slot reads a weighted sum of a group's rows,
and every row gets a weighted sum of the slots' outputs. In between, `slot_routes` lists one route
per mixed row.

Legend: T tokens, H heads, A experts of one head, K experts chosen, N routes, G groups of M members,
P slots (equally many for each of E experts).
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..kernels.calls import Sorting
from ..kernels.permute import sort_routes
from .documents import DocumentRows, with_neighbours
from .execution.recompute import save_decision


@dataclass(frozen=True)
class Routes:
    """Lists N routes over `num_experts` experts, in the order in which a target row's outputs are
    summed.

    The last fields describe regular lists, which need no index; 0 means that the rule does not
    hold. `per_source` and `per_target`: route n has source row n // per_source and target row n //
    per_target, so a backend sums without an index. `per_expert`: route n goes through expert n //
    per_expert, on every rank alike, so counts are known and nothing is sorted. `equal_blocks`:
    experts form so many equal blocks (heads), each token's routes visit them in order, equally many
    in each, and all ranks have equally many tokens.
    """

    source_N: Tensor  # int64
    expert_N: Tensor  # int64
    weight_N: Tensor  # float32, differentiable: the gate weights
    target_N: Tensor  # int64
    num_experts: int
    num_targets: int
    per_source: int
    per_target: int
    per_expert: int = 0
    equal_blocks: int = 0

    @property
    def sorting(self) -> Sorting:
        """Returns the routes sorted by expert; sorts on first use and keeps the result."""
        keeps = not torch.compiler.is_compiling()  # the compiler caches by itself
        known = self.__dict__.get("_sorting") if keeps else None
        if known is None:
            known = sort_routes(self.expert_N, self.num_experts, per_expert=self.per_expert)
            if keeps:
                object.__setattr__(self, "_sorting", known)
        return known

    def known_starts(self) -> Tensor | None:
        """Returns each expert's start in sorted order, (E + 1,) int32; None: not sorted yet."""
        return self.sorting.starts_E1 if "_sorting" in self.__dict__ else None

    def counts(self) -> Tensor:
        """Counts the routes of each expert, (E,) int64; int32 if already sorted."""
        if "_sorting" in self.__dict__:
            return self.sorting.starts_E1.diff()
        zeros = torch.zeros(self.num_experts, dtype=torch.int64, device=self.expert_N.device)
        return zeros.scatter_add_(0, self.expert_N, torch.ones_like(self.expert_N))

    def with_weights(self, weight_N: Tensor) -> "Routes":
        """Returns the same routes with other gate weights."""
        return replace(self, weight_N=weight_N)

    def kept(self, keep_N: Tensor) -> "Routes":
        """Returns the routes where `keep_N` is true, in order.

        Their number is read from the device: the one synchronisation that a router may cause.

        On the meta device, which has no values, all routes stay: shapes and costs are the full
        list's.
        """
        if keep_N.is_meta:
            return self
        return self._at(save_decision(lambda: keep_N.nonzero().squeeze(1)))

    def without_padding(self, rows: DocumentRows) -> "Routes":
        """Returns the routes of tokens that are not padding, in order.

        Routes of experts that choose rows all stay: such a router itself takes padding last.
        """
        if rows.real_R is None or rows.real_T is None or self.per_expert:
            return self
        if self.per_source and self.per_target:  # equally many routes per token, side by side
            return self._at(with_neighbours(rows.real_R, len(self.expert_N) // rows.num_rows))
        return self.kept(rows.real_T[self.target_N // (self.num_targets // rows.num_rows)])

    def _at(self, index: Tensor) -> "Routes":
        """Returns the routes at these positions, which no longer follow a rule."""
        return Routes(
            self.source_N[index],
            self.expert_N[index],
            self.weight_N[index],
            self.target_N[index],
            self.num_experts,
            self.num_targets,
            per_source=0,
            per_target=0,
        )


@dataclass(frozen=True)
class _RuledRoutes(Routes):
    """Routes that compute their source and target rows by rule on first read.

    Local kernels never read them. Built with None in their places.
    """

    def __post_init__(self) -> None:
        for name in ("source_N", "target_N"):
            if self.__dict__[name] is None:
                del self.__dict__[name]  # the first read computes it

    @cached_property
    def source_N(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Returns the row that each route reads."""
        return _rows_by_rule(self.expert_N, self.per_source)

    @cached_property
    def target_N(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Returns the row that each route adds to; the same list if the rules agree."""
        if self.per_target == self.per_source:
            return self.source_N
        return _rows_by_rule(self.expert_N, self.per_target)


def routes_by_rule(
    expert_N: Tensor,
    weight_N: Tensor,
    *,
    num_experts: int,
    num_targets: int | None = None,
    per_source: int,
    per_target: int,
    per_expert: int = 0,
    equal_blocks: int = 0,
) -> Routes:
    """Returns routes in which route n reads row n // per_source and adds to row n // per_target.

    The rules are positive and divide N, and N / per_target is `num_targets`. The rows are listed on
    first read.
    """
    rows: tuple[Any, Any] = (None, None)
    kind: type[Routes] = _RuledRoutes
    if torch.compiler.is_compiling():  # the compiler drops unread tensors
        kind = Routes
        rows = _rows_by_rule(expert_N, per_source), _rows_by_rule(expert_N, per_target)
    return kind(
        rows[0],
        expert_N,
        weight_N,
        rows[1],
        num_experts,
        len(expert_N) // per_target if num_targets is None else num_targets,
        per_source,
        per_target,
        per_expert=per_expert,
        equal_blocks=equal_blocks,
    )


def _rows_by_rule(expert_N: Tensor, per_row: int) -> Tensor:
    row_R = torch.arange(len(expert_N) // per_row, device=expert_N.device)
    return row_R if per_row == 1 else row_R.repeat_interleave(per_row)


@dataclass(frozen=True)
class Mixture:
    """Mixes rows without choosing (Mixture of Tokens, arXiv 2310.15961; Soft MoE, arXiv
    2308.00951).

    Slot p of a group reads Σ_m merge[m, p] · row m; row m gets Σ_p emit[m, p] · (the output of slot
    p). Slot p belongs to expert p // (P / E).
    """

    rows_GM: Tensor  # int64: the rows of each group; every row is in exactly one
    merge_GMP: Tensor  # float32, differentiable
    emit_GMP: Tensor  # float32, differentiable; the same object as merge_GMP in Mixture of Tokens
    num_experts: int


@dataclass(frozen=True)
class Routing:
    """Holds a router's plan for the rows, and the values that losses and metrics need."""

    plan: Routes | Mixture
    logits_THA: Tensor  # float32, before the gate's nonlinearity; the feed-forward has H = 1
    # The balancing loss's probabilities, (T, H, A), summing to 1 over A; None: softmax of the logits.
    probabilities_THA: Tensor | None = None
    # The requested experts before any refusal, (T, K'); None: those of the routes.
    wanted_TK: Tensor | None = None
    # Under halting (T,): each row's weight in the losses, 0 for skipped rows. None: equal weights.
    row_weight_T: Tensor | None = None
    # Padding and documents; None: no padding, and documents are not tracked.
    rows: DocumentRows | None = None
    # softmax(logits) summed over sequences, (B, H, A), if a kernel has; `replace` drops it.
    sums_BHA: Tensor | None = field(default=None, init=False)

    def with_sums(self, sums_BHA: Tensor | None) -> "Routing":
        """Returns this routing, which keeps the sums of its logits' softmax."""
        object.__setattr__(self, "sums_BHA", sums_BHA)
        return self

    @property
    def routes(self) -> Routes:
        """Returns the plan of a router that chooses.

        Raises:
            TypeError: the router mixes.
        """
        if isinstance(self.plan, Mixture):
            raise TypeError(
                "a soft mixture has no routes for its rows; `slot_routes` lists those of its slots"
            )
        return self.plan

    def of_weighted_rows(self, weight_T: Tensor) -> "Routing":
        """Returns the same decisions with weighted rows; rows of weight 0 lose their routes."""
        routes = self.routes
        kept = routes.kept(weight_T[routes.target_N] > 0)
        return replace(self, plan=kept, wanted_TK=None, row_weight_T=weight_T)

    def of_documents(self, rows: DocumentRows | None) -> "Routing":
        """Returns the same decisions without routes of padding, which then counts nowhere."""
        if rows is None:
            return self
        plan = self.plan
        if isinstance(plan, Routes):
            plan = plan.without_padding(rows)
        return replace(self, plan=plan, rows=rows)


def token_routes(experts_TK: Tensor, weights_TK: Tensor, *, num_experts: int) -> Routes:
    """Routes every token through its K experts and back to the token."""
    top_k = experts_TK.shape[1]
    return routes_by_rule(
        experts_TK.reshape(-1),
        weights_TK.reshape(-1),
        num_experts=num_experts,
        per_source=top_k,
        per_target=top_k,
    )


def token_to_head_routes(
    experts_THK: Tensor, weights_THK: Tensor, *, num_experts: int, equal_blocks: bool = False
) -> Routes:
    """Routes every token to each of its H heads, through K experts for each (token, head).

    Experts are numbered over all heads. `equal_blocks`: each head has an equal block of them, and all
    ranks have equally many rows.
    """
    _, num_heads, top_k = experts_THK.shape
    return routes_by_rule(
        experts_THK.reshape(-1),
        weights_THK.reshape(-1),
        num_experts=num_experts,
        per_source=num_heads * top_k,
        per_target=top_k,
        equal_blocks=num_heads if equal_blocks else 0,
    )


def head_to_token_routes(
    experts_THK: Tensor, weights_THK: Tensor, *, num_experts: int, equal_blocks: bool = False
) -> Routes:
    """Routes every (token, head) row through its K experts to the token, which sums them.

    `equal_blocks`: as in `token_to_head_routes`.
    """
    _, num_heads, top_k = experts_THK.shape
    return routes_by_rule(
        experts_THK.reshape(-1),
        weights_THK.reshape(-1),
        num_experts=num_experts,
        per_source=top_k,
        per_target=num_heads * top_k,
        equal_blocks=num_heads if equal_blocks else 0,
    )


def slot_routes(num_rows: int, *, num_experts: int, device: torch.device) -> Routes:
    """Returns one route per row: row n goes through expert n // (rows ÷ E) and back to row n."""
    per_expert = num_rows // num_experts
    return routes_by_rule(
        torch.arange(num_rows, device=device) // per_expert,
        torch.ones(num_rows, device=device),
        num_experts=num_experts,
        per_source=1,
        per_target=1,
        per_expert=per_expert,
    )
