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
    stack_sums,
)
from moebius.model.documents import mark_documents
from moebius.model.routers.router import ChoiceRouter, Router
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


@pytest.mark.parametrize("repeats", [1, 2, 5])
@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
@pytest.mark.parametrize("form", ["load", "entropy"])
def test_equal_routers_at_once_have_the_bits_of_each_alone(
    form: str, scope: str, repeats: int
) -> None:
    logits_RL = [[random_logits(12, 9 * r + n) for n in range(repeats)] for r in range(3)]
    flat = [logits.requires_grad_() for own in logits_RL for logits in own]
    sums_RL = [[choice_sums(routing(logits), 4) for logits in own] for own in logits_RL]
    at_once_RB = balance_value(stack_sums(sums_RL), form, scope, RunningSum())
    alone_RB = torch.stack(
        [balance_value(add_sums(own), form, scope, RunningSum()) for own in sums_RL]
    )
    assert torch.equal(at_once_RB, alone_RB)
    ours, theirs = (
        torch.autograd.grad(value.sum(), flat, retain_graph=True)
        for value in (at_once_RB, alone_RB)
    )
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("alike", [True, False])
def test_a_pass_adds_the_losses_of_equal_routers_at_once(
    alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers' routers of values and outputs, and of the feed-forward: two calls instead of six."""
    calls: list[Tensor] = []

    def counted(sums: dict[str, Tensor], *args: Any) -> Tensor:
        calls.append(balance_value(sums, *args))
        return calls[-1]

    model = tiny_model("moeut").double()
    rows = some_tokens(4, 16)
    expected = model(rows, targets_BS=rows)
    if not alike:
        monkeypatch.setattr(ChoiceRouter, "alike", Router.alike)
    monkeypatch.setattr("moebius.model.routers.router.balance_value", counted)
    found = model(rows, targets_BS=rows)
    assert len(calls) == (2 if alike else 6)
    torch.testing.assert_close(found.regularisation_B, expected.regularisation_B)
    torch.testing.assert_close(found.auxiliary, expected.auxiliary)
    ours, theirs = (
        torch.autograd.grad(
            each.regularisation_B.sum(), list(model.parameters()), allow_unused=True
        )
        for each in (found, expected)
    )
    torch.testing.assert_close(ours, theirs)


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


def test_loads_count_what_a_capacity_refused_as_asked_for() -> None:
    report = report_routing(routing(random_logits(10, 1)), {})
    asked_more = replace(report, wanted=23)  # as where a capacity refused three
    steps = [{"feed_forward": each} for each in (asked_more, asked_more)]
    load = collect_loads([steps[0], {}, steps[1]])["feed_forward"]
    assert load.load_LN.sum(1).tolist() == [20, 20]
    assert load.wanted_L.tolist() == [23, 23]
    assert load.gate_sum_L.tolist() == [5.0, 5.0]


@pytest.mark.parametrize("sorted_steps", [(), (0,), (0, 1, 2, 3)])
def test_loads_of_all_kinds_are_collected_at_once_and_added_up_by_layer(
    sorted_steps: tuple[int, ...],
) -> None:
    """Kinds of different sizes; depth step 1 has no feed-forward; layers 0, 1, 0, 1 in passes of four."""
    places = {"feed_forward": (0, 2, 3), "value": (0, 1, 2, 3)}
    steps: list[dict[str, Any]] = [{} for _ in range(4)]
    expected: dict[str, list[Tensor]] = {}
    for size, (kind, own) in enumerate(places.items()):
        for place in own:
            found = routing(random_logits(10, place, num_experts=E + size))
            if place in sorted_steps:  # counts follow from where each expert's routes start
                assert found.routes.sorting.starts_E1.dtype == torch.int32
            steps[place][kind] = report_routing(found, {})
            count_N = torch.bincount(found.routes.expert_N, minlength=E + size)
            expected.setdefault(kind, []).append(count_N)
    for kind, load in collect_loads(steps).items():
        assert torch.equal(load.load_LN, torch.stack(expected[kind]))
        assert load.wanted_L.tolist() == [20] * len(expected[kind])
    added = collect_loads(steps, members=[0, 1, 0, 1])
    first, second, third = expected["feed_forward"]
    assert torch.equal(added["feed_forward"].load_LN, torch.stack([first + second, third]))
    assert added["feed_forward"].wanted_L.tolist() == [40, 20]
    assert added["feed_forward"].gate_sum_L.tolist() == [10.0, 5.0]
    assert added["value"].load_LN.sum(1).tolist() == [40, 40]
