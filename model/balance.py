"""Balancing losses, and what the monitor needs to know of a routing.

Every balancing loss here has the form Σ_e P_e · c_e: P_e the mean probability of expert e, through
which the router gets its gradient, and c_e a number taken from a scope's statistics without
gradient:

    entropy   c_e = ln P_e(scope)        (the derivative of P ln P is ln P + 1, and Σ_e dP_e = 0, so nothing is lost)
    load      c_e = E · f_e(scope)       f_e: fraction of all choices that fell on e

So a loss over all ranks costs one all-reduce of a few numbers per router, and every sequence's
share of it adds up to the whole.

A layer group's weights serve several depth steps. Each returns its sums; they are added up and the
loss is computed once at the end of the forward pass, so recomputing a layer cannot count it twice
(MoEUT, arXiv 2405.16039, eq. 8 to 10).

Legend: B sequences, S positions, H heads (1 for the feed-forward), A experts of a head, N experts
in all (H·A), L depth steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .routing import Mixture, Routes, Routing


class RunningSum:
    """Sums over the micro-batches of one optimizer step, and over ranks where `over_ranks` adds
    them up.

    A global balancing loss reads it: with gradient accumulation micro-batch j sees the choices of
    the micro-batches 1 … j, since those after it have not been routed yet.
    """

    def __init__(
        self,
        over_ranks: Callable[[Tensor], Tensor] = lambda local: local,
        *,
        prefix: str = "",
        totals: dict[str, Tensor] | None = None,
    ) -> None:
        """Takes `over_ranks`, which adds a small tensor up over all ranks; by default nothing."""
        self._over_ranks, self._prefix = over_ranks, prefix
        self._totals: dict[str, Tensor] = {} if totals is None else totals

    def reset(self) -> None:
        """Begins a new optimizer step: all sums become empty."""
        self._totals.clear()

    def add(self, name: str, local: Tensor) -> Tensor:
        """Adds a detached tensor to the sum of that name, and returns the sum so far.

        Collective where there are ranks.
        """
        key, added = self._prefix + name, self._over_ranks(local.detach())
        self._totals[key] = self._totals[key] + added if key in self._totals else added
        return self._totals[key]

    def named(self, prefix: str) -> "RunningSum":
        """Returns the same sums under names of its own: one view for every router."""
        return RunningSum(self._over_ranks, prefix=f"{self._prefix}{prefix}/", totals=self._totals)


def count_per_sequence(index: Tensor, batch_size: int, num_experts: int) -> Tensor:
    """Counts how often each expert stands in `index`, per sequence: (B, N) int64.

    The first axis of `index` is rows, sequence-major.
    """
    flat_BX = index.reshape(batch_size, -1)
    counts_BN = torch.zeros(batch_size, num_experts, dtype=torch.int64, device=index.device)
    return counts_BN.scatter_add_(1, flat_BX, torch.ones_like(flat_BX))


def count_routes(routes: Routes, batch_size: int) -> Tensor:
    """Counts the routes of each sequence to each expert, however many a row has: (B, N) int64.

    Targets are sequence-major.
    """
    sequence_N = routes.target_N // (routes.num_targets // batch_size)
    index_N = sequence_N * routes.num_experts + routes.expert_N
    counts = torch.zeros(batch_size * routes.num_experts, dtype=torch.int64, device=index_N.device)
    return counts.scatter_add_(0, index_N, torch.ones_like(index_N)).view(
        batch_size, routes.num_experts
    )


def choice_sums(
    routing: Routing, batch_size: int, *, with_z: bool = False, first_choices: bool = False
) -> dict[str, Tensor]:
    """Returns what the losses of a choice need, summed per sequence.

    `probability` (B, H, A), `load` (B, N) int64 choices, `rows` (B,), and with `with_z` `z` (B,).
    With `first_choices` the load counts every row's first choice alone, as GShard, Switch and
    torchscale publish it.
    """
    logits_THA = routing.logits_THA
    probabilities_THA = (
        logits_THA.softmax(-1) if routing.probabilities_THA is None else routing.probabilities_THA
    )
    rows_per_sequence = logits_THA.shape[0] // batch_size
    routes, wanted_TK = routing.routes, routing.wanted_TK
    if first_choices:
        assert wanted_TK is not None, "only a router that says what was wanted knows its order"
        wanted_TK = wanted_TK[:, :1]
    load_BN = (
        count_routes(routes, batch_size)
        if wanted_TK is None
        else count_per_sequence(wanted_TK, batch_size, routes.num_experts)
    )
    sums = {
        "probability": probabilities_THA.unflatten(0, (batch_size, -1)).sum(1),
        "load": load_BN,
        "rows": torch.full((batch_size,), float(rows_per_sequence), device=logits_THA.device),
    }
    if with_z:
        z_T = logits_THA.logsumexp(-1).square().sum(1)
        sums["z"] = z_T.unflatten(0, (batch_size, -1)).sum(1)
    return sums


def balance_value(sums: dict[str, Tensor], form: str, scope: str, running: RunningSum) -> Tensor:
    """Computes the balancing loss, (B,): shares whose mean over the batch is the scope's loss.

    Args:
        sums: of `choice_sums`, added up over repeats.
        form: "load", 1 at perfect balance and E where all choices and all probability fall on one
            expert; or "entropy", negative, −ln A at perfect balance, averaged over heads.
        scope: "sequence", "micro_batch" or "global_batch".
        running: sums over the global batch so far.
    """
    p_BHA = sums["probability"] / sums["rows"][:, None, None]
    if form == "entropy":
        mean_HA = _in_scope(sums["probability"], "probability", scope, running) / _in_scope(
            sums["rows"], "rows", scope, running
        ).view(-1, 1, 1)
        tiny = torch.finfo(
            p_BHA.dtype
        ).tiny  # an expert whose softmax underflows everywhere adds 0, and no NaN
        return (p_BHA * mean_HA.clamp_min(tiny).log()).sum(-1).mean(-1)
    load_BHA = _in_scope(sums["load"], "load", scope, running).unflatten(1, p_BHA.shape[1:])
    fraction_BHA = load_BHA / load_BHA.sum(-1, keepdim=True).clamp_min(1)
    return p_BHA.shape[-1] * (p_BHA * fraction_BHA).sum(-1).mean(-1)


def normalised_coefficient(
    published: float, *, choices: Literal["first", "all"], top_k: int = 1, summed_layers: int = 1
) -> float:
    """Converts a published coefficient of the load balancing loss to the loss here.

    Ours is 1 at perfect balance, and a mean over layers.

    Args:
        published: the coefficient of E·Σ_e (n_e/T)·P_e.
        choices: what n_e counts: "first" choices only (Switch, GShard, torchscale; 1 at perfect
            balance) or "all" choices (flaxformer, llm-random; K at perfect balance).
        top_k: K.
        summed_layers: the number of sparse layers where the published loss adds them up; 1 where it
            takes their mean.
    """
    return published * (top_k if choices == "all" else 1) * summed_layers


def _in_scope(per_sequence: Tensor, name: str, scope: str, running: RunningSum) -> Tensor:
    """Returns the sum over the scope, without gradient: (B, …), or (1, …) where all share it."""
    if scope == "sequence":
        return per_sequence.detach()
    micro_batch = per_sequence.detach().sum(0, keepdim=True)
    return running.add(name, micro_batch) if scope == "global_batch" else micro_batch


@dataclass(frozen=True)
class RouterReport:
    """Reports what one router did in one depth step."""

    sums: dict[str, Tensor]  # the router's own statistics, per sequence, differentiable
    load_N: Tensor  # int64: routes per expert that were served
    wanted: Tensor  # int64 scalar: routes that were asked for
    # float32 scalar: Σ of gate weights; for a mixture of every slot's largest merge weight
    gate_sum: Tensor


def report_routing(routing: Routing, sums: dict[str, Tensor]) -> RouterReport:
    """Reports a routing for the monitor, beside the router's own statistics."""
    device = routing.logits_THA.device
    if isinstance(routing.plan, Mixture):
        groups, _, slots = routing.plan.merge_GMP.shape
        served = groups * slots // routing.plan.num_experts
        load_N = torch.full((routing.plan.num_experts,), served, dtype=torch.int64, device=device)
        return RouterReport(
            sums, load_N, load_N.sum(), routing.plan.merge_GMP.detach().amax(1).sum()
        )
    routes = routing.plan
    load_N = routes.counts()
    wanted = (
        load_N.sum()
        if routing.wanted_TK is None
        else torch.tensor(routing.wanted_TK.numel(), device=device)
    )
    return RouterReport(sums, load_N, wanted, routes.weight_N.detach().sum())


def add_sums(repeats: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Adds up the statistics of one router over the depth steps that it served."""
    return {name: torch.stack([sums[name] for sums in repeats]).sum(0) for name in repeats[0]}


@dataclass(frozen=True)
class DepthLoad:
    """Holds the load of one kind of router over the depth steps of one forward pass."""

    load_LN: Tensor  # int64: routes per depth step and expert
    wanted_L: Tensor  # int64: routes asked for; more than were served where a capacity refused some
    gate_sum_L: Tensor  # float32


def collect_loads(steps: Sequence[dict[str, RouterReport]]) -> dict[str, DepthLoad]:
    """Stacks the reports of all depth steps, per kind of router.

    Depth steps without that kind are left out.
    """
    kinds = {kind: None for step in steps for kind in step}
    found = {kind: [step[kind] for step in steps if kind in step] for kind in kinds}
    return {
        kind: DepthLoad(
            torch.stack([report.load_N for report in reports]),
            torch.stack([report.wanted for report in reports]),
            torch.stack([report.gate_sum for report in reports]),
        )
        for kind, reports in found.items()
    }
