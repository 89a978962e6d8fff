"""Recomputation changes memory and nothing else: loss, gradients, side effects, random numbers."""

import pytest
import torch
from family import NAMES, VOCABULARY, make_uneven, tiny_model
from torch import Tensor

from moebius.model.precision import forward_in
from moebius.model.recompute import Recompute
from moebius.model.transformer import Transformer
from moebius.train.loss import micro_batch_loss

MICRO_BATCH, POSITIONS = 8, 6
DRAWS = {  # what no recipe of the family has
    "jitter": ("switch", {"router": {"kind": "token_choice", "top_k": 2, "jitter": 0.2, "capacity_factor": 0.7}}),
    "jitter and a random second expert": (
        "gshard", {"router": {
            "kind": "token_choice", "top_k": 2, "renormalise": True, "second_expert": "random", "jitter": 0.2,
            "capacity_factor": 1.0, "drop_order": "slot_major",
        }},
    ),
    "drawn experts": ("sut", {"router": {"kind": "sut", "top_k": 3, "sampled": 2}, "attention_sampled": 1}),
    "priority": ("switch", {"router": {
        "kind": "token_choice", "top_k": 2, "capacity_factor": 0.5, "drop_order": "priority",
    }}),
}  # fmt: skip


def model_of(name: str, mode: Recompute) -> Transformer:
    recipe, changes = DRAWS.get(name, (name, {}))
    model = make_uneven(tiny_model(recipe, **changes))
    model.recompute_layers(mode)
    return model


def rows() -> Tensor:
    return torch.randint(VOCABULARY, (MICRO_BATCH, POSITIONS + 1), generator=torch.Generator().manual_seed(5))


def loss_and_gradients(model: Transformer, dtype: torch.dtype, *, step: int = 0) -> dict[str, Tensor]:
    model.before_step(step)
    torch.manual_seed(3)
    result = micro_batch_loss(lambda tokens: forward_in(model, dtype, tokens), rows(), global_sequences=MICRO_BATCH)
    drawn_next = torch.rand(4)
    result.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {"loss": result.loss, "regularisation": result.regularisation, "drawn next": drawn_next}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*NAMES, *DRAWS])
def test_loss_and_every_gradient_keep_their_bits(name: str, dtype: torch.dtype) -> None:
    expected = loss_and_gradients(model_of(name, "none"), dtype)
    for mode in ("selective", "full"):
        found = loss_and_gradients(model_of(name, mode), dtype)
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert torch.equal(value, expected[key]), (mode, key)


def test_a_transition_that_has_switched() -> None:
    expected = loss_and_gradients(model_of("transition", "none"), torch.float32, step=10**9)
    found = loss_and_gradients(model_of("transition", "full"), torch.float32, step=10**9)
    assert all(torch.equal(found[key], value) for key, value in expected.items())
