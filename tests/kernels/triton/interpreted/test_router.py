"""The router's kernels against float64 and against torch's selection."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from family import make_uneven, some_tokens, tiny_model
from pairwise import parametrize_pairs, slow_but
from router_cases import GATES, RECORDED, gates_of, recorded_choices, step_by_step
from torch import Tensor

from moebius.kernels.fused import router as torchs
from moebius.kernels.fused.router import Gate, route_top_k
from moebius.kernels.gradients import sum_parts
from moebius.kernels.triton import router as kernel
from moebius.kernels.triton import router_gradients, tiles
from moebius.model.execution.recompute import Recompute
from moebius.model.loops.steps import PassOptions
from moebius.model.routers import router as routers

# tokens, width, heads, experts of a head, top_k
CASES = {
    "several blocks of rows": (37, 41, 3, 10, 2),
    "several tiles of experts": (20, 64, 1, 70, 5),
    "the 44M model's": (17, 412, 1, 155, 12),
    "many experts": (3, 33, 1, 300, 24),
    "all experts": (5, 16, 2, 4, 4),
    "one of each": (1, 1, 1, 1, 1),
    "no row": (0, 8, 2, 3, 1),
}


def make(name: str) -> tuple[Tensor, Tensor, int, int]:
    tokens, width, heads, per_head, top_k = CASES[name]
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(tokens, width, generator=generator)
    weight = torch.randn(heads * per_head, width, generator=generator) / width**0.5
    return x, weight, heads, top_k


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("name", slow_but(CASES, "several blocks of rows", "no row", "one of each"))
def test_logits_choice_and_gates(name: str, gate: Gate) -> None:
    x, weight, heads, top_k = make(name)
    logits, experts, gates, _ = route_top_k(x, weight, top_k=top_k, gate=gate, heads=heads)
    exact, wanted, weighed = step_by_step(
        x.double(), weight.double(), top_k=top_k, gate=gate, heads=heads
    )
    sizes = (x.abs() @ weight.abs().T).view_as(logits).double()
    assert ((logits.double() - exact).abs() <= kernel.BOUND * sizes).all()
    assert torch.equal(experts, wanted)
    torch.testing.assert_close(gates.double(), weighed, rtol=1e-4, atol=1e-6)
    again = route_top_k(x, weight, top_k=top_k, gate=gate, heads=heads, given_THK=experts)
    for first, second in zip((logits, experts, gates), again[:3], strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("gate", GATES)
def test_given_experts_are_weighed_in_their_order(gate: Gate) -> None:
    x, weight, heads, _ = make("several blocks of rows")
    place_THK = torch.rand(37, heads, 10, generator=torch.Generator().manual_seed(8)).argsort(-1)
    given_THK = place_THK[..., :3] + torch.arange(heads)[:, None] * 10
    logits, experts, gates, _ = route_top_k(
        x, weight, top_k=3, gate=gate, heads=heads, given_THK=given_THK
    )
    assert torch.equal(experts, given_THK)
    chosen = logits.gather(-1, place_THK[..., :3])
    torch.testing.assert_close(gates, gates_of(logits, chosen, gate))


def test_equal_logits_and_those_that_are_no_numbers() -> None:
    """With one channel of 1 the logits are the weights. Ties select the lowest index; NaN is greatest."""
    nan, inf = torch.nan, torch.inf
    rows = {
        (0.0, -0.0, 0.0, -1.0): [0, 1, 2],
        (-0.0, 0.0, 1.0, 0.0): [2, 0, 1],
        (-3.0, -1.0, -2.0, -1.0): [1, 3, 2],
        (5.0, nan, 5.0, nan): [1, 3, 0],
    }
    for logits, chosen in rows.items():
        weight = torch.tensor(logits)[:, None]
        experts = route_top_k(torch.ones(1, 1), weight, top_k=3, gate="sigmoid")[1]
        assert experts[0, 0].tolist() == chosen
    # Splitting an infinity gives NaN, which is selected first.
    weight = torch.tensor([[1.0], [-inf], [2.0]])
    logits, experts, gates, _ = route_top_k(torch.ones(1, 1), weight, top_k=2, gate="sigmoid")
    assert experts[0, 0].tolist() == [1, 2]
    assert logits[0, 0].isnan().tolist() == [False, True, False]
    assert gates[0, 0].isnan().tolist() == [True, False]


@dataclass(frozen=True)
class Backward:
    """The inputs of a router's backward pass."""

    x_TD: Tensor
    weight_ED: Tensor
    made: tuple[Tensor, Tensor, Tensor]
    grads: tuple[Tensor | None, Tensor | None, Tensor | None]
    gate: Gate

    def kernels(self, wants_x: bool, wants_weight: bool) -> tuple[Tensor | None, Tensor | None]:
        """By the kernels."""
        wants = wants_x, wants_weight
        grad_x, parts = router_gradients.route_top_k_backward(
            self.x_TD, self.weight_ED, self.made, self.grads, gate=self.gate, wants=wants
        )
        return grad_x, None if parts is None else sum_parts(parts)

    def of_logits(self) -> tuple[Tensor, Tensor]:
        """The logits' gradient and the sum of its terms' sizes, by torch in float64."""
        experts, gates, logits = self.made
        logits_TE = logits.double() if self.gate == "softmax" else None
        of_logits, of_gates = (None if grad is None else grad.double() for grad in self.grads[:2])
        if of_gates is None:
            assert of_logits is not None
            return of_logits, of_logits.abs()
        made = experts, gates.double(), logits_TE
        num_experts = len(self.weight_ED)
        grad_TE = torchs._logit_gradient(
            made, of_logits, of_gates, self.gate, num_experts=num_experts
        )
        weighed_THK = (of_gates * gates).abs()
        share_THA = logits.double().unflatten(1, (gates.shape[1], -1)).softmax(
            -1
        ) * weighed_THK.sum(-1, keepdim=True)
        most_THK = weighed_THK + gates * weighed_THK.sum(-1, keepdim=True)
        sizes_TE = share_THA.flatten(1) + (0 if of_logits is None else of_logits.abs())
        return grad_TE, sizes_TE.scatter_add(1, experts.flatten(1), most_THK.flatten(1))


def make_backward(name: str, gate: Gate, *, parts: tuple[bool, bool] = (True, True)) -> Backward:
    """`parts`: whether the logits have a gradient, and the gates."""
    x, weight, heads, top_k = make(name)
    logits, experts, gates, _ = route_top_k(x, weight, top_k=top_k, gate=gate, heads=heads)
    generator = torch.Generator().manual_seed(9)
    flat_TE = logits.flatten(1)
    grad_TE = torch.randn(flat_TE.shape, generator=generator) if parts[0] else None
    grad_THK = torch.randn(gates.shape, generator=generator) if parts[1] else None
    return Backward(x, weight, (experts, gates, flat_TE), (grad_TE, grad_THK, None), gate)


def check_bounds(given: Backward) -> None:
    """Checks the bound of three products, plus the rounding of the logits' gradient."""
    grad_TE, sizes_TE = given.of_logits()
    slack_TE = kernel.BOUND * grad_TE.abs() + 2**-20 * sizes_TE
    x, weight = given.x_TD.double(), given.weight_ED.double()
    grad_x, grad_weight = given.kernels(True, True)
    assert grad_x is not None
    assert grad_weight is not None
    assert ((grad_x.double() - grad_TE @ weight).abs() <= slack_TE @ weight.abs()).all()
    assert ((grad_weight.double() - grad_TE.T @ x).abs() <= slack_TE.T @ x.abs()).all()


@pytest.mark.sample(5)
@parametrize_pairs(
    {"name": CASES, "gate": GATES, "parts": [((True, True),), ((True, False),), ((False, True),)]}
)
def test_gradients_are_within_the_bound(name: str, gate: Gate, parts: tuple[bool, bool]) -> None:
    check_bounds(make_backward(name, gate, parts=parts))


@pytest.mark.parametrize("wants", [(True, False), (False, True)])
def test_only_gradients_that_are_wanted_are_made(wants: tuple[bool, bool]) -> None:
    given = make_backward("several blocks of rows", "sigmoid")
    both, found = given.kernels(True, True), given.kernels(*wants)
    for one, alone, wanted in zip(both, found, wants, strict=True):
        assert (alone is not None) == wanted
        if one is not None and alone is not None:
            assert torch.equal(one, alone)


def test_rows_in_several_parts_are_added_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few rows per program, and fewer in the last."""
    given = make_backward("several blocks of rows", "softmax")
    whole = given.kernels(False, True)[1]
    monkeypatch.setattr(tiles, "_LEAST_ROWS", 16)
    assert tiles.rows_of_part(37, 30, 41, tiles.Tile(16, 32, 16, 4, 1)) == 16
    check_bounds(given)
    in_parts = given.kernels(False, True)[1]
    torch.testing.assert_close(in_parts, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_stays_in_its_row_and_its_experts(bad: float) -> None:
    given = make_backward("several blocks of rows", "sigmoid")
    grad_TE = given.grads[0]
    assert grad_TE is not None
    grad_TE[36, 29] = bad
    grad_x, grad_weight = given.kernels(True, True)
    assert grad_x is not None
    assert grad_weight is not None
    assert grad_x[36].isnan().all()
    assert grad_x[:36].isfinite().all()
    assert grad_weight[29].isnan().all()
    assert grad_weight[:29].isfinite().all()


# sequences, rows of one, width, routers, heads, experts of a head, top_k
SUMMED = {
    "blocks of one sequence": (2, 32, 9, 1, 1, 19, 3),
    "V and O": (2, 16, 9, 2, 3, 5, 2),
    "a block has rows of two sequences": (3, 9, 7, 2, 2, 4, 1),
}


# which of every router's gates, sums and logits have a gradient
EVERY, GATES_ALONE, SUMS_ALONE = slice(None), slice(0, None, 3), slice(1, None, 3)


@pytest.mark.parametrize(
    ("gate", "parts"),
    [*((gate, EVERY) for gate in GATES), ("sigmoid", GATES_ALONE), ("sigmoid", SUMS_ALONE)],
)
@pytest.mark.parametrize("name", slow_but(SUMMED, "V and O"))
def test_sums_and_several_routers_are_those_of_float64(name: str, gate: Gate, parts: slice) -> None:
    batch, length, width, routers, heads, per_head, top_k = SUMMED[name]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(batch * length, width, generator=generator)
    weights = torch.randn(routers, heads * per_head, width, generator=generator) / width**0.5
    given: dict[str, Any] = {"top_k": top_k, "gate": gate, "heads": heads}

    def outputs(x: Tensor, weight: Tensor) -> list[Tensor]:
        """Of every router: gates, sums and logits."""
        if x.dtype is torch.float32:
            together: dict[str, Any] = given | {"routers": routers, "num_sequences": batch}
            found = route_top_k(x, weight.flatten(0, 1), **together)
            each = found.of_each(routers) if routers > 1 else [found]
            chosen.extend(one.experts_THK for one in each)
            parts = [(one.gates_THK, one.sums_BHA, one.logits_THA) for one in each]
            return [part for three in parts for part in three if part is not None]
        found = []
        for number, weight_ED in enumerate(weight):
            logits, experts, gates = step_by_step(x, weight_ED, **given)
            assert torch.equal(experts, chosen[number])
            found += [gates, logits.softmax(-1).unflatten(0, (batch, -1)).sum(1), logits]
        return found

    chosen: list[Tensor] = []
    results: list[list[Tensor]] = []
    for dtype in (torch.float32, torch.float64):
        leaves = [each.to(dtype).requires_grad_() for each in (x, weights)]
        found = outputs(*leaves)
        value = sum(
            (part * torch.arange(part.numel()).view_as(part).sin()).sum() for part in found[parts]
        )
        assert isinstance(value, Tensor)
        results.append([*found, *torch.autograd.grad(value, leaves)])
    for mine, exact in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_models_routers_are_as_in_separate_operations(recompute: Recompute) -> None:
    """Losses, loads and gradients; and that V and O were one kernel, with their sums."""
    tokens, found = some_tokens(2, 17), []
    for backend in ("segments", "triton"):
        model = make_uneven(tiny_model("moeut", {"num_layers": 4}))
        for _, _, router in model.routers():
            router.backend = backend
        seen = [] if backend == "triton" else None
        options = PassOptions(recompute=recompute)
        with watched_routers(seen):
            out = model(tokens[:, :-1], targets_BS=tokens[:, 1:], options=options)
            (out.cross_entropy + 50 * out.regularisation_B.sum()).backward()
        found.append((out, {name: each.grad for name, each in model.named_parameters()}))
        if seen is not None:
            assert {(each["routers"], each["num_sequences"]) for each in seen} == {(1, 2), (2, 2)}
    (plain, grads), (ours, fused_grads) = found
    torch.testing.assert_close(ours.cross_entropy, plain.cross_entropy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.regularisation_B, plain.regularisation_B, rtol=1e-4, atol=1e-6)
    for kind, load in plain.loads.items():
        assert torch.equal(ours.loads[kind].load_LN, load.load_LN)
        torch.testing.assert_close(ours.loads[kind].gate_sum_L, load.gate_sum_L)
    for name, grad in grads.items():
        assert grad is not None
        error = (fused_grads[name] - grad).norm() / grad.norm().clamp_min(1e-6)
        assert error < 2e-3, name


@contextmanager
def watched_routers(seen: list[dict[str, Any]] | None) -> Iterator[None]:
    """Writes down what every call of `route_top_k` was asked."""

    def noted(*args: Any, **given: Any) -> Any:
        if seen is not None:
            seen.append(given)
        return route_top_k(*args, **given)

    with patch.object(routers, "route_top_k", noted):
        yield


def test_rows_in_bfloat16_get_gradients_in_bfloat16() -> None:
    x, weight, heads, top_k = make("several blocks of rows")
    low = x.bfloat16().requires_grad_()
    gates = route_top_k(low, weight, top_k=top_k, gate="sigmoid", heads=heads)[2]
    [grad] = torch.autograd.grad(gates.sum(), [low])
    assert grad.dtype is torch.bfloat16


@pytest.mark.needs_shared
@pytest.mark.parametrize("name", slow_but(RECORDED, RECORDED[0]))
def test_recorded_routers_choose_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recorded_choices(name, monkeypatch)
    assert asked
    for one in asked:
        _, experts_THK, *_ = route_top_k(
            one.x_TD, one.weight_ED, top_k=one.top_k, gate="sigmoid", heads=one.heads
        )
        assert torch.equal(experts_THK, one.experts_THK)
