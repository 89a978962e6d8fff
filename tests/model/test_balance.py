"""The balancing losses against their formulas written out, their conventions, their scopes and
their limits.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from family import NAMES, PROGRAMS, program, some_tokens, tiny_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moebius.model.balance import (
    RunningSum,
    add_sums,
    balance_value,
    choice_sums,
    collect_loads,
    report_routing,
)
from moebius.model.documents import mark_documents
from moebius.model.routing import Routing, token_routes

E = 7
INEXACT = {"div", "pow", "exp", "log", "sin", "cos", "rsqrt", "mm", "bmm", "addmm"}


class InFloat32(TorchDispatchMode):
    """Collects the operations that round to float32; products of counts are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.__name__.partition(".")[0].strip("_")
        if name in INEXACT and isinstance(result, Tensor) and result.dtype == torch.float32:
            self.found.add(f"{name} {tuple(result.shape)}")
        return result


@pytest.mark.quick(16)
@pytest.mark.parametrize("name", [*NAMES, *PROGRAMS])
def test_a_float64_model_rounds_nothing_to_float32(name: str) -> None:
    model = program(name) if name in PROGRAMS else tiny_model(name).double()
    rows, ids = some_tokens(32, 16), torch.arange(16).expand(32, 16) // 5
    for balance in (False, True) if model.halting is None else (False,):
        documents = mark_documents(ids, torch.device("cpu"), attention=False, balance=balance)
        with InFloat32() as mode:
            model(rows, targets_BS=rows, documents=documents)
        assert not mode.found


def routing(logits_T1E: Tensor, top_k: int = 2) -> Routing:
    experts = logits_T1E.squeeze(1).topk(top_k).indices
    return Routing(
        token_routes(experts, torch.full(experts.shape, 0.25), num_experts=logits_T1E.shape[2]),
        logits_T1E,
    )


def random_logits(rows: int, seed: int = 0, num_experts: int = E) -> Tensor:
    return torch.randn(rows, 1, num_experts, generator=torch.Generator().manual_seed(seed)) * 3


def test_the_entropy_is_that_of_the_average_over_time_and_repeats() -> None:
    """log p = logsumexp over (r, t) of log_softmax(z) − ln(R·T); ℓ = Σ p ln p, per sequence; the
    gradient is its own.
    """
    batch, length, repeats = 3, 11, 4
    z_RBTE = (
        random_logits(repeats * batch * length).view(repeats, batch, length, E).requires_grad_()
    )
    expected = []
    for b in range(batch):
        log_p = torch.logsumexp(z_RBTE[:, b].reshape(-1, E).log_softmax(-1), 0) - math.log(
            repeats * length
        )
        expected.append((log_p.exp() * log_p).sum())
    sums = add_sums([choice_sums(routing(z.reshape(-1, 1, E)), batch) for z in z_RBTE])
    value_B = balance_value(sums, "entropy", "sequence", RunningSum())
    torch.testing.assert_close(value_B, torch.stack(expected))
    ours, theirs = (
        torch.autograd.grad(x.sum(), z_RBTE, retain_graph=True)[0]
        for x in (value_B, torch.stack(expected))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def test_no_nan_where_an_expert_is_never_likely() -> None:
    logits = torch.full((4, 1, E), -1e4).index_fill(2, torch.tensor([2]), 1e4).requires_grad_()
    collapsed = balance_value(choice_sums(routing(logits), 1), "entropy", "sequence", RunningSum())
    assert collapsed.item() == 0.0
    collapsed.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("form", ["load", "entropy"])
def test_shares_of_the_sequences_add_up_to_the_loss_over_the_scope(form: str) -> None:
    logits = random_logits(4 * 9).requires_grad_()
    sums = choice_sums(routing(logits), 4)
    p_E = logits.softmax(-1).mean((0, 1))
    n_E = torch.bincount(routing(logits).routes.expert_N, minlength=E)
    expected = E * (p_E * n_E / n_E.sum()).sum() if form == "load" else (p_E * p_E.log()).sum()
    value = balance_value(sums, form, "micro_batch", RunningSum()).mean()
    torch.testing.assert_close(value, expected)
    ours, theirs = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (value, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("form", ["load", "entropy"])
def test_the_global_scope_sees_the_micro_batches_before_and_no_other_step(form: str) -> None:
    running = RunningSum()
    for _ in range(2):
        running.reset()
        first, second = (choice_sums(routing(random_logits(2 * 5, seed)), 2) for seed in (1, 2))
        one = balance_value(first, form, "global_batch", running.named("a"))
        torch.testing.assert_close(one, balance_value(first, form, "micro_batch", RunningSum()))
        both = {name: torch.cat((first[name], second[name])) for name in first}
        two = balance_value(second, form, "global_batch", running.named("a"))
        torch.testing.assert_close(two, balance_value(both, form, "micro_batch", RunningSum())[2:])
        alone = balance_value(second, form, "global_batch", running.named("another router"))
        torch.testing.assert_close(alone, balance_value(second, form, "micro_batch", RunningSum()))


def test_running_sums_stay_in_their_memory() -> None:
    """A recorded pass adds there, whatever Python holds; a cast model has sums of its own."""
    running, ones = RunningSum(), torch.ones(1, 3)
    total = running.named("a").add("load", ones)
    assert running.named("a").add("load", ones) is total
    total.add_(ones)  # a replay
    assert running.named("a").add("load", ones).tolist() == [[4.0] * 3]
    assert running.named("a").add("load", ones.double()).tolist() == [[1.0] * 3]
    running.reset()
    assert running.named("a").add("load", ones) is total
    assert total.tolist() == [[1.0] * 3]


def test_rows_may_have_any_number_of_routes() -> None:
    """Rows without a route, and with one or two: each route counts for the sequence of its row."""
    experts_TK = torch.tensor([[0, 1], [2, 1], [2, 3], [4, 3], [5, 6], [5, 0]])
    routes = token_routes(experts_TK, torch.ones(6, 2), num_experts=E)
    kept = routes.kept(torch.tensor([1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 0], dtype=torch.bool))
    sums = choice_sums(Routing(kept, random_logits(6)), 2)
    assert sums["load"].tolist() == [[1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 2, 0]]
    asked = choice_sums(Routing(kept, random_logits(6), wanted_TK=experts_TK), 2)
    assert asked["load"].sum(1).tolist() == [6, 6]


def test_what_no_loss_reads_is_not_counted() -> None:
    found = routing(random_logits(10, 1))
    full, lean = (choice_sums(found, 2, with_z=True, with_load=load) for load in (True, False))
    assert full.keys() - lean.keys() == {"load"}
    assert all(torch.equal(value, full[name]) for name, value in lean.items())
    entropy = [balance_value(sums, "entropy", "sequence", RunningSum()) for sums in (full, lean)]
    assert torch.equal(*entropy)


@pytest.mark.parametrize("sorted_steps", [(), (0, 2), (0, 1, 2)])
def test_loads_are_those_of_sorted_and_of_unsorted_routes(sorted_steps: tuple[int, ...]) -> None:
    """Where routes are sorted, counts follow from where each expert's start, for all steps at once."""
    steps = [routing(random_logits(10, seed)) for seed in range(3)]
    for step in sorted_steps:
        assert steps[step].routes.sorting.starts_E1.dtype == torch.int32
    reports = [report_routing(found, {}) for found in steps]
    assert [each.starts_N1 is not None for each in reports] == [n in sorted_steps for n in range(3)]
    load = collect_loads([{"feed_forward": report} for report in reports])["feed_forward"]
    expected = [
        [(found.routes.expert_N == expert).sum().item() for expert in range(E)] for found in steps
    ]
    assert load.load_LN.dtype == torch.int64
    assert load.load_LN.tolist() == expected
    assert load.wanted_L.tolist() == [20, 20, 20]


def test_loads_count_routes_and_gates() -> None:
    found = routing(random_logits(10, 1))
    report = report_routing(found, choice_sums(found, 2))
    assert report.load_N is not None
    assert report.load_N.sum().item() == 20
    asked_more = replace(report, wanted=23)  # as where a capacity refused three
    for one, wanted in ((report, 20), (asked_more, 23)):
        load = collect_loads([{"feed_forward": one}, {}, {"feed_forward": one}])["feed_forward"]
        assert load.load_LN.shape == (2, E)
        assert load.wanted_L.tolist() == [wanted, wanted]
    assert report.gate_sum.item() == 5.0
    torch.testing.assert_close(report.sums["probability"].sum(), torch.tensor(10.0))
    assert report.sums["load"].sum(1).tolist() == [10, 10]


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("scope", ["sequence", "micro_batch", "global_batch"])
def test_the_load_balancing_loss_is_one_at_perfect_balance(top_k: int, scope: str) -> None:
    """E/k Σ_e (n_e/T) P_e: 1 where all is even, E where one expert has every first choice and all
    probability (k = 1).
    """
    experts = 6
    rotated = torch.eye(experts).repeat(
        4, 1
    )  # every expert first equally often; the topk of ties is spread below
    logits = torch.stack(
        [0.01 * (top_k - shift) * rotated.roll(shift, 1) for shift in range(top_k)]
    ).sum(0)
    even = choice_sums(routing(logits[:, None], top_k), 2)
    value = balance_value(even, "load", scope, RunningSum()).mean()
    torch.testing.assert_close(value, torch.tensor(1.0), rtol=1e-6, atol=0)
    if top_k == 1:
        collapsed = torch.zeros(8, 1, experts).index_fill(2, torch.tensor([0]), 50.0)
        value = balance_value(
            choice_sums(routing(collapsed, 1), 2), "load", scope, RunningSum()
        ).mean()
        torch.testing.assert_close(value, torch.tensor(float(experts)))
