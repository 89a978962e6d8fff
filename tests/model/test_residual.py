"""A layer whose additions, norms and casts are one pass over the rows computes what it does by plain
operations: all of the family, both precisions, with recomputation, cast weights and a cache.
"""

from collections import Counter

import pytest
import torch
from family import NAMES, make_uneven, set_options, some_tokens, tiny_config, tiny_model
from norm_kernels import stand_in
from pairwise import slow_but
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch_modes import Operations

from moebius.model.attention import attention
from moebius.model.execution.compiled import compile_dense_parts
from moebius.model.execution.precision import (
    Precision,
    cast_weights,
    forward_in,
    products_dtype,
    store_in,
    stored_dtype,
)
from moebius.model.execution.recompute import Recompute
from moebius.model.transformer import Transformer

TOKENS = some_tokens(8, 9, seed=1)


def join_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes queries and keys of shared layers one product, as on a GPU."""
    monkeypatch.setattr(attention, "runs_triton", lambda *given: True)


def gradients(
    name: str, precision: Precision, recompute: Recompute = "none", *, compiles: bool = False
) -> dict[str, Tensor]:
    """Of a training pass; and the loss."""
    model = make_uneven(tiny_model(name))
    store_in(model, stored_dtype(precision))
    set_options(model, recompute=recompute)
    if compiles:
        compile_dense_parts(model, backend="aot_eager")
    torch.manual_seed(2)
    output = forward_in(model, products_dtype(precision), TOKENS, targets_BS=TOKENS)
    (output.cross_entropy + output.regularisation_B.sum()).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": output.cross_entropy.detach()}


def off(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The relative norm of all differences."""
    assert set(found) == set(expected)
    differences = [(found[name] - expected[name]).double().norm() for name in expected]
    sizes = [value.double().norm() for value in expected.values()]
    return (torch.stack(differences).norm() / torch.stack(sizes).norm()).item()


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gradients(name, "float32")
    stand_in(monkeypatch)
    join_products(monkeypatch)
    assert off(gradients(name, "float32"), plain) < 1e-5


@pytest.mark.sample(16)
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "bfloat16") for name in NAMES),
        *((name, "bfloat16_only") for name in ("moeut", "moeut_pre", "moeut_post", "deepseek")),
    ],
)
def test_low_precision_is_as_exact_as_by_plain_operations(
    name: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, plain = gradients(name, "float32"), gradients(name, precision)
    stand_in(monkeypatch)
    join_products(monkeypatch)
    fused = gradients(name, precision)
    assert off(fused, exact) < 1.05 * off(plain, exact) + 1e-4
    assert off(fused, plain) < 0.03


@pytest.mark.parametrize("name", ["moeut", "moeut_g1", "switchhead"])
def test_no_sum_of_gradients_is_rounded_to_bfloat16(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it were, whole models would be off by 1e-4 and more."""
    plain = gradients(name, "bfloat16")
    stand_in(monkeypatch)
    assert off(gradients(name, "bfloat16"), plain) < 2e-5


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["moeut", "moeut_post", "sut", "deepseek"])
def test_recomputation_gives_equal_bits(
    name: str, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    join_products(monkeypatch)
    kept, made_again = (gradients(name, "bfloat16", mode) for mode in ("none", recompute))
    assert all(torch.equal(made_again[key], kept[key]) for key in kept)


@pytest.mark.parametrize("name", slow_but(["moeut", "moeut_pre", "sut"], "moeut"))
def test_compiled_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    plain = gradients(name, "bfloat16")
    torch._dynamo.reset()
    assert off(gradients(name, "bfloat16", compiles=True), plain) < 1e-5


def operations(name: str, num_layers: int) -> Counter[str]:
    """Of a training pass in bfloat16, on tensors without values."""
    with FakeTensorMode():
        model = Transformer(tiny_config(name, {"num_layers": num_layers}))
        tokens = torch.zeros(8, 9, dtype=torch.int64)
        with Operations() as ran:
            output = forward_in(model, torch.bfloat16, tokens, targets_BS=tokens)
            (output.cross_entropy + output.regularisation_B.sum()).backward()
    return ran.names


def of_a_depth_step(name: str) -> dict[str, float]:
    """The operations that one more repeat of the group costs, by its layers."""
    per_group = tiny_config(name).layers_per_group
    few, many = (operations(name, repeats * per_group) for repeats in (2, 3))
    counts = {key: (many[key] - few[key]) / per_group for key in many}
    return {key: count for key, count in counts.items() if count}


@pytest.mark.parametrize("name", slow_but(["moeut", "moeut_pre", "moeut_post"], "moeut"))
def test_norms_and_casts_are_no_operations_of_their_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = of_a_depth_step(name)
    stand_in(monkeypatch)
    fused = of_a_depth_step(name)
    norm, backward = "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default"
    assert plain[norm] == plain[backward] == 2
    assert fused["moebius.add_norm.default"] == fused["moebius.add_norm_backward.default"] == 2
    assert norm not in fused


def test_weights_are_cast_by_layer_and_frozen_ones_stay_so() -> None:
    model = make_uneven(tiny_model("moeut"))
    frozen = "group.0.attention.query.weight"
    model.get_parameter(frozen).requires_grad_(False)
    with Operations() as ran:
        copies = cast_weights(model, torch.bfloat16)
        wanted = [copy for copy in copies.values() if copy.requires_grad]
        torch.stack([copy.sum() for copy in wanted[1:]]).sum().backward()
    assert not copies[frozen].requires_grad
    parts = {tuple(name.split(".")[:2]) for name in copies}
    assert ran.names["aten._foreach_copy_.default"] == 2 * len(parts)
    given = dict(model.named_parameters())
    for name, copy in copies.items():
        assert torch.equal(copy, given[name].to(torch.bfloat16))
        if copy.requires_grad and copy is not wanted[0]:
            gradient = given[name].grad
            assert gradient is not None
            assert torch.equal(gradient, torch.ones_like(given[name]))
