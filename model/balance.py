"""Balancing losses of routers, and the load that each router reports.

Every balancing loss has the form Σ_e P_e · c_e. P_e is the mean probability of expert e and carries
the router's gradient; c_e is computed from a scope's statistics without gradient:

    entropy   c_e = ln P_e(scope)        (the derivative of P ln P is ln P + 1, and Σ_e dP_e = 0, so nothing is lost)
    load      c_e = E · f_e(scope)       f_e: fraction of all choices that fell on e

A loss over all ranks therefore costs one all-reduce of a few numbers per router, and the sequences'
shares add up to the whole.

A layer group's weights serve several depth steps. Their sums are added up and the loss is computed
once, at the end of the forward pass, so recomputing a layer cannot count it twice (MoEUT, arXiv
2405.16039, eq. 8 to 10).

Padding never counts. A loss over sequences can be taken over documents instead
(model/documents.py): the mean over a sequence's documents, weighted by their tokens, so each
sequence keeps its share.

Legend: B sequences, S positions, H heads (1 for the feed-forward), A experts of a head, N experts
in all (H·A), L depth steps, D documents of a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.fused.router import softmax_sums
from ..plugins import Registry
from .documents import DocumentRows
from .layers import literal
from .routing import Mixture, Routes, Routing

BALANCE = Registry(
    "model.feed_forward.router.balance_form",
    "a form of the balancing loss",
    dict.fromkeys(["load", "entropy"]),
    "a function of (mean probability, fraction of choices) that returns each expert's cost",
    takes=2,
)


class RunningSum:
    """Sums statistics over the micro-batches of one optimizer step, and over ranks.

    Global balancing losses read it. With gradient accumulation, micro-batch j sees the choices of
    micro-batches 1 … j, because later ones have not been routed yet. The sums stay in the same
    memory, so that a recorded pass adds to them when it is repeated.
    """

    def __init__(
        self,
        over_ranks: Callable[[Tensor], Tensor] = lambda local: local,
        *,
        prefix: str = "",
        totals: dict[Any, Tensor] | None = None,
    ) -> None:
        """Takes `over_ranks`, which sums a small tensor over all ranks; the default is one rank."""
        self._over_ranks, self._prefix = over_ranks, prefix
        self._totals: dict[Any, Tensor] = {} if totals is None else totals

    def reset(self) -> None:
        """Sets all sums to 0 at the start of an optimizer step."""
        if self._totals:
            torch._foreach_zero_([*self._totals.values()])  # pyright: ignore[reportPrivateImportUsage]

    def add(self, name: str, local: Tensor) -> Tensor:
        """Adds a detached tensor to the sum under `name`, and returns the sum so far.

        Collective across ranks.
        """
        added = self._over_ranks(local.detach())
        # A model that was cast or moved since has other sums.
        key = (self._prefix + name, added.dtype, added.device)
        if key not in self._totals:
            self._totals[key] = torch.zeros_like(added)
        return self._totals[key].add_(added)

    def named(self, prefix: str) -> "RunningSum":
        """Returns a view of the same sums under a prefix, one for each router."""
        return RunningSum(self._over_ranks, prefix=f"{self._prefix}{prefix}/", totals=self._totals)


def count_per_sequence(index: Tensor, batch_size: int, num_experts: int) -> Tensor:
    """Counts each expert's occurrences in `index`, per sequence: (B, N) int64.

    The first axis of `index` is rows, sequence-major.
    """
    flat_BX = index.reshape(batch_size, -1)
    counts_BN = torch.zeros(batch_size, num_experts, dtype=torch.int64, device=index.device)
    return counts_BN.scatter_add_(1, flat_BX, torch.ones_like(flat_BX))


def count_routes(routes: Routes, batch_size: int) -> Tensor:
    """Counts the routes from each sequence to each expert: (B, N) int64.

    Targets are sequence-major; rows may have any number of routes.
    """
    if len(routes.expert_N) == routes.num_targets * routes.per_target:  # grouped by sequence
        return count_per_sequence(routes.expert_N, batch_size, routes.num_experts)
    sequence_N = routes.target_N // (routes.num_targets // batch_size)
    index_N = sequence_N * routes.num_experts + routes.expert_N
    counts = torch.zeros(batch_size * routes.num_experts, dtype=torch.int64, device=index_N.device)
    return counts.scatter_add_(0, index_N, torch.ones_like(index_N)).view(
        batch_size, routes.num_experts
    )


def sum_per_sequence(values: Tensor, routing: Routing, batch_size: int) -> Tensor:
    """Sums (T, …) over each sequence's rows without padding: (B, …)."""
    if routing.rows is not None and routing.rows.real_T is not None:
        padding = ~routing.rows.real_T.view(-1, *(1,) * (values.ndim - 1))
        values = values.masked_fill(padding, 0)
    return values.unflatten(0, (batch_size, -1)).sum(1)


def rows_per_sequence(routing: Routing, batch_size: int) -> Tensor:
    """Counts each sequence's rows without padding: (B,) float."""
    logits_THA = routing.logits_THA
    if routing.rows is not None:
        return routing.rows.count_B.to(logits_THA.device)
    count = logits_THA.shape[0] // batch_size
    return torch.full((batch_size,), float(count), device=logits_THA.device)


def count_chosen(index_TK: Tensor, routing: Routing, batch_size: int, num_experts: int) -> Tensor:
    """Does what `count_per_sequence` does, ignoring the choices of padding: (B, N) int64."""
    if routing.rows is None or routing.rows.real_T is None:
        return count_per_sequence(index_TK, batch_size, num_experts)
    padding_TK = ~routing.rows.real_T.view(-1, *(1,) * (index_TK.ndim - 1))
    index_TK = index_TK.masked_fill(padding_TK, num_experts)  # a dummy expert, cut off below
    return count_per_sequence(index_TK, batch_size, num_experts + 1)[:, :num_experts]


def choice_sums(
    routing: Routing,
    batch_size: int,
    *,
    with_z: bool = False,
    with_load: bool = True,
    first_choices: bool = False,
) -> dict[str, Tensor]:
    """Returns the statistics for the losses of a choice, summed per sequence without padding.

    `probability` (B, H, A), `rows` (B,), optionally `load` (B, N) int64 choices and `z` (B,). With
    `first_choices` the load counts only each row's first choice, as GShard, Switch and torchscale
    do. The form "entropy" needs no load.
    """
    logits_THA = routing.logits_THA
    sums = {
        "probability": _probability_sums(routing, batch_size),
        "rows": rows_per_sequence(routing, batch_size),
    }
    if with_load:
        routes, wanted_TK = routing.routes, _wanted(routing, first_choices=first_choices)
        sums["load"] = (
            count_routes(routes, batch_size)
            if wanted_TK is None
            else count_chosen(wanted_TK, routing, batch_size, routes.num_experts)
        )
    if with_z:
        z_T = logits_THA.logsumexp(-1).square().sum(1)
        sums["z"] = sum_per_sequence(z_T, routing, batch_size)
    return sums


def _probability_sums(routing: Routing, batch_size: int) -> Tensor:
    is_padded = routing.rows is not None and routing.rows.real_T is not None
    if routing.probabilities_THA is None and not is_padded:
        return softmax_sums(routing.logits_THA, batch_size)
    probabilities_THA = routing.probabilities_THA
    if probabilities_THA is None:
        probabilities_THA = routing.logits_THA.softmax(-1)
    return sum_per_sequence(probabilities_THA, routing, batch_size)


def document_sums(
    routing: Routing, *, first_choices: bool = False, chosen_TK: Tensor | None = None
) -> dict[str, Tensor]:
    """Returns the statistics for a loss over documents; empty if documents are not tracked.

    Args:
        routing: the router's decisions, with documents in `rows`.
        first_choices: count only first choices in the load.
        chosen_TK: the choices to count; None: those that rows asked for.

    Returns:
        `document_probability` (D, H, A), `document_load` (D, N) int64 and `document_rows` (D, B),
        which holds each document's row count in the column of its sequence.
    """
    rows = routing.rows
    if rows is None or rows.length_D is None:
        return {}
    assert rows.document_T is not None
    assert rows.length_DB is not None
    probabilities_THA = routing.probabilities_THA
    if probabilities_THA is None:
        probabilities_THA = routing.logits_THA.softmax(-1)
    if chosen_TK is None:
        chosen_TK = _wanted(routing, first_choices=first_choices)
    document_N, expert_N = _chosen_pairs(routing, rows, rows.document_T, chosen_TK)
    num_experts = routing.routes.num_experts
    load = torch.zeros(len(rows.length_D) * num_experts, dtype=torch.int64, device=expert_N.device)
    load.scatter_add_(0, document_N * num_experts + expert_N, torch.ones_like(expert_N))
    real_RHA = probabilities_THA if rows.real_R is None else probabilities_THA[rows.real_R]
    return {
        # deterministic on every device; `unsafe` skips the check of our own lengths
        "document_probability": torch.segment_reduce(
            real_RHA, "sum", lengths=rows.length_D, axis=0, unsafe=True
        ),
        "document_load": load.view(-1, num_experts),
        "document_rows": rows.length_DB,
    }


def _wanted(routing: Routing, *, first_choices: bool) -> Tensor | None:
    """Returns the choices that a loss counts, (T, K'); None: count the routes."""
    if not first_choices:
        return routing.wanted_TK
    assert routing.wanted_TK is not None, "the order of choices needs wanted_TK"
    return routing.wanted_TK[:, :1]


def _chosen_pairs(
    routing: Routing, rows: DocumentRows, document_T: Tensor, chosen_TK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the document and the expert of every choice except padding's, each (N,) int64."""
    if chosen_TK is None:  # read the routes, which exclude padding
        routes = routing.routes
        token_N = routes.target_N // (routes.num_targets // rows.num_rows)
        return document_T[token_N], routes.expert_N
    chosen_TK = chosen_TK.flatten(1)
    if rows.real_R is not None:
        chosen_TK, document_T = chosen_TK[rows.real_R], document_T[rows.real_R]
    return document_T.repeat_interleave(chosen_TK.shape[1]), chosen_TK.flatten()


def balance_value(sums: dict[str, Tensor], form: str, scope: str, running: RunningSum) -> Tensor:
    """Computes the balancing loss as per-sequence shares, (B,), whose mean is the scope's loss.

    Args:
        sums: from `choice_sums`, added up over repeats; with those of `document_sums` the scope is
            the document.
        form: "load" is 1 at perfect balance and E when one expert takes all choices and
            probability. "entropy" is negative, −ln A at perfect balance, averaged over heads.
            Otherwise the user's own c_e, a function of the scope's P and f, each (B or 1, H, A).
        scope: "sequence", "micro_batch" or "global_batch".
        running: sums over the global batch so far.
    """
    if "document_rows" in sums:
        return _mean_over_documents(sums, form, running)
    p_BHA = sums["probability"] / sums["rows"].clamp_min(1)[:, None, None]
    mean_HA = p_BHA.detach()
    if form != "load" and scope != "sequence":
        rows = _in_scope(sums["rows"], "rows", scope, running).clamp_min(1)
        mean_HA = _in_scope(sums["probability"], "probability", scope, running)
        mean_HA = mean_HA / rows.view(-1, 1, 1)
    if form == "entropy":
        # an expert whose softmax underflows everywhere adds 0 instead of NaN
        tiny = torch.finfo(p_BHA.dtype).tiny
        return (p_BHA * mean_HA.clamp_min(tiny).log()).sum(-1).mean(-1)
    load_BHA = _in_scope(sums["load"], "load", scope, running).unflatten(1, p_BHA.shape[1:])
    load_BHA = load_BHA.to(p_BHA.dtype)
    fraction_BHA = load_BHA / load_BHA.sum(-1, keepdim=True).clamp_min(1)
    if form != "load":
        return (p_BHA * BALANCE.get(form)(mean_HA, fraction_BHA)).sum(-1).mean(-1)
    return p_BHA.shape[-1] * (p_BHA * fraction_BHA).sum(-1).mean(-1)


def pooled_balance(sums: dict[str, Tensor], scope: str, running: RunningSum) -> Tensor:
    """Computes the balancing loss of all layers in one pool as per-sequence shares, (B,).

    E·Σ_e f_e·P_e with f_e = choices of e ÷ rows and P_e = Σ softmax(z)_e ÷ rows, all sums over layers and
    over the scope's rows: K at perfect balance (transformers' load_balancing_loss_func).

    Args:
        sums: from `choice_sums`, added up over layers and repeats.
        scope: "sequence", "micro_batch" or "global_batch", of f; P is the micro-batch's in the latter two.
        running: sums over the global batch so far.
    """
    rows_B, probability_BE = sums["rows"].clamp_min(1), sums["probability"].squeeze(1)
    fraction_BE = _in_scope(sums["load"], "load", scope, running).to(probability_BE.dtype)
    fraction_BE = fraction_BE / _in_scope(rows_B, "rows", scope, running)[:, None]
    mean_rows_B = rows_B if scope == "sequence" else rows_B.mean(0, keepdim=True)
    shares_B = (probability_BE * fraction_BE).sum(1) / mean_rows_B
    return probability_BE.shape[1] * shares_B


def _mean_over_documents(sums: dict[str, Tensor], form: str, running: RunningSum) -> Tensor:
    """Computes each sequence's mean over its documents, weighted by their rows: (B,).

    A sequence that is all padding gets 0.
    """
    rows_DB = sums["document_rows"].to(sums["document_probability"].dtype)
    value_D = balance_value(
        {
            "probability": sums["document_probability"],
            "load": sums["document_load"],
            "rows": rows_DB.sum(1),
        },
        form,
        "sequence",
        running,
    )
    return (rows_DB / rows_DB.sum(0).clamp_min(1)).T @ value_D


def _in_scope(per_sequence: Tensor, name: str, scope: str, running: RunningSum) -> Tensor:
    """Returns the sum over the scope, without gradient: (B, …), or (1, …) if it is shared."""
    if scope == "sequence":
        return per_sequence.detach()
    micro_batch = per_sequence.detach().sum(0, keepdim=True)
    return running.add(name, micro_batch) if scope == "global_batch" else micro_batch


@dataclass(frozen=True)
class Choices:
    """Lists which expert serves which row, a pair for each of N routes."""

    expert_N: Tensor
    row_N: Tensor | None  # None: row after row, equally many routes each
    num_rows: int
    num_experts: int

    def of_rows(self, value_T: Tensor) -> Tensor:
        """Returns the values of the routes' rows, (N,)."""
        if self.row_N is not None:
            return value_T[self.row_N]
        return value_T.repeat_interleave(len(self.expert_N) // max(self.num_rows, 1))


@dataclass(frozen=True)
class RouterReport:
    """Reports one router's decisions in one depth step."""

    sums: dict[str, Tensor]  # the router's own statistics, per sequence, differentiable
    # Served routes, int64 or int32: per expert, (N,), or each expert's start in sorted order,
    # (N + 1,), from which a pass derives the loads of all its depth steps at once.
    load_N: Tensor | None
    starts_N1: Tensor | None
    wanted: int | None  # requested routes; None: equal to the served ones
    # float32 scalar: Σ of gate weights; for a mixture Σ of every slot's largest merge weight
    gate_sum: Tensor
    choices: Choices | None = None  # which experts serve which rows; None: not asked for


def report_routing(
    routing: Routing, sums: dict[str, Tensor], *, marks: bool = False
) -> RouterReport:
    """Builds a router's report for the monitor, together with its statistics."""
    device = routing.logits_THA.device
    if isinstance(routing.plan, Mixture):
        groups, _, slots = routing.plan.merge_GMP.shape
        served = groups * slots // routing.plan.num_experts
        load_N = torch.full((routing.plan.num_experts,), served, dtype=torch.int64, device=device)
        return RouterReport(sums, load_N, None, None, routing.plan.merge_GMP.detach().amax(1).sum())
    routes, wanted = routing.plan, None
    if routing.wanted_TK is not None:
        num_rows = len(routing.wanted_TK) if routing.rows is None else routing.rows.num_real
        wanted = num_rows * routing.wanted_TK.shape[1:].numel()
    choices = None
    if marks:
        row_N = None if routes.per_target else routes.target_N
        choices = Choices(routes.expert_N, row_N, routes.num_targets, routes.num_experts)
    load_N, starts_N1 = None, routes.known_starts()
    if starts_N1 is None:
        load_N = routes.counts()
    gate_sum = routes.weight_N.detach().sum()
    return RouterReport(sums, load_N, starts_N1, wanted, gate_sum, choices)


def add_sums(repeats: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Adds up one router's statistics over its depth steps."""
    repeats = [sums for sums in repeats if sums]  # a depth step without sequences has none
    if not repeats:  # as do all depth steps of a router without losses
        return {}
    if len(repeats) == 1:
        return repeats[0]
    if len(repeats) == 2:
        return {name: first + repeats[1][name] for name, first in repeats[0].items()}
    return {name: torch.stack([sums[name] for sums in repeats]).sum(0) for name in repeats[0]}


@dataclass(frozen=True)
class DepthLoad:
    """Holds the load of one kind of router over the depth steps of one forward pass."""

    load_LN: Tensor  # int64: routes per depth step and expert
    wanted_L: Tensor  # int64: requested routes, including those a capacity refused
    gate_sum_L: Tensor  # float32


def collect_loads(
    steps: Sequence[dict[str, RouterReport]], *, members: Sequence[int] | None = None
) -> dict[str, DepthLoad]:
    """Stacks the reports of all depth steps by kind of router, skipping steps without it.

    With `members`, the layer of each depth step, the depth steps of one layer are added up: passes
    of different depths then have loads of one shape.
    """
    found: dict[str, DepthLoad] = {}
    for kind in {kind: None for step in steps for kind in step}:
        load = _depth_load([step[kind] for step in steps if kind in step])
        if members is not None:
            own = [member for member, step in zip(members, steps, strict=True) if kind in step]
            load = _load_of_layers(load, own)
        found[kind] = load
    return found


def _load_of_layers(load: DepthLoad, members: Sequence[int]) -> DepthLoad:
    layers = sorted(set(members))
    index = tuple(layers.index(member) for member in members)
    index_L = literal(index, torch.int64, load.load_LN.device)

    def added(value_L: Tensor) -> Tensor:
        zeros = value_L.new_zeros(len(layers), *value_L.shape[1:])
        return zeros.index_add(0, index_L, value_L)

    return DepthLoad(added(load.load_LN), added(load.wanted_L), added(load.gate_sum_L))


def _depth_load(reports: Sequence[RouterReport]) -> DepthLoad:
    load_LN = _loads(reports).to(torch.int64)
    gate_sum_L = torch.stack([report.gate_sum for report in reports])
    asked = [report.wanted for report in reports if report.wanted is not None]
    if len(asked) < len(reports):  # a router reports it in every depth step or never
        return DepthLoad(load_LN, load_LN.sum(1), gate_sum_L)
    # Filled on the device: copying a list there would make a GPU wait.
    if len(set(asked)) == 1:
        return DepthLoad(load_LN, load_LN.new_full((len(asked),), asked[0]), gate_sum_L)
    asked_L = torch.stack([load_LN.new_full((), number) for number in asked])
    return DepthLoad(load_LN, asked_L, gate_sum_L)


def _loads(reports: Sequence[RouterReport]) -> Tensor:
    starts = [report.starts_N1 for report in reports if report.starts_N1 is not None]
    if len(starts) == len(reports):
        return torch.stack(starts).diff(dim=1)
    loads = [
        report.load_N if report.starts_N1 is None else report.starts_N1.diff() for report in reports
    ]
    return torch.stack([load_N.to(torch.int64) for load_N in loads if load_N is not None])
