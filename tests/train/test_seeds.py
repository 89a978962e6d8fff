"""Every sequence draws its own numbers: of the seed, the step and its place in the batch."""

import hashlib
from typing import Any

import pytest
import torch
from family import gradients_of, make_uneven, own_depths, set_options, some_tokens, tiny_model
from torch import Tensor

from moebius.model.execution.draws import Draws, draws_of
from moebius.model.execution.recompute import Recompute
from moebius.model.initialise import zeros
from moebius.model.routers.sut import SutConfig, SutRouter
from moebius.model.transformer import Transformer
from moebius.train.recipes.family import FAMILY
from moebius.train.state import seed_micro_batch

SEQUENCES = 8
DEPTHS = (3, 1, 5, 2, 4, 1, 2, 6)


def draw(step: int, index: int) -> torch.Tensor:
    seed_micro_batch(7, step, index)
    return torch.rand(4)


def test_a_micro_batch_draws_its_own_numbers_again() -> None:
    assert torch.equal(draw(3, 1), draw(3, 1))
    draws = [draw(step, index) for step in range(3) for index in range(3)]
    assert len({tuple(numbers.tolist()) for numbers in draws}) == 9


def test_the_stream_is_that_of_torch_seeded_so() -> None:
    """Checkpoints and published runs rely on these exact numbers."""
    seed = int.from_bytes(hashlib.blake2b(b"7/3/1", digest_size=8).digest(), "little") >> 1
    found = draw(3, 1)
    torch.manual_seed(seed)
    assert torch.equal(found, torch.rand(4))


# What a model draws, each with everything else that reads other sequences turned off
_PLAIN = {"feed_forward.router.balance": 0.0}
_TOP_2 = {"kind": "token_choice", "top_k": 2, "renormalise": True, "balance": 0.0}
_DROPOUT = {"kind": "sigmoid", "top_k": 4, "balance": 0.0, "expert_dropout": 0.3}
_SUT = {"kind": "sut", "top_k": 3, "sampled": 2, "mi_loss": 0.0}
DRAWING: dict[str, tuple[str, dict[str, Any]]] = {
    "start": ("huginn_moe", _PLAIN),
    "start of a decaying state": ("parcae_moe", _PLAIN),
    "start and jitter": (
        "huginn_moe",
        {
            "feed_forward.router": _TOP_2 | {"jitter": 0.1},
            "loops.read_out": (1,),
            "loops.depth": {},
        },
    ),
    "start and dropout": ("parcae_moe", {"feed_forward.router": _DROPOUT}),
    "jitter": ("top_k", {"feed_forward.router": _TOP_2 | {"jitter": 0.1}}),
    "jitter of sub-tokens": ("mh_moe", {"feed_forward.router": _TOP_2 | {"jitter": 0.1}}),
    "second expert": ("top_k", {"feed_forward.router": _TOP_2 | {"second_expert": "random"}}),
    "second expert of x_moe": (
        "x_moe_torchscale",
        {
            "feed_forward.router.capacity_factor": None,
            "feed_forward.router.evaluation_capacity_factor": None,
            "feed_forward.router.balance": 0.0,
        },
    ),
    "dropout of V and O too": (
        "moeut",
        {"feed_forward.router": _DROPOUT, "attention.balance": 0.0},
    ),
    "sampled experts": (
        "sut_no_act",
        {"feed_forward.router": _SUT, "attention.sampled": 1, "attention.balance": 0.0},
    ),
    "sampled experts and halting": (
        "sut",
        {"feed_forward.router": _SUT, "attention.sampled": 1, "attention.balance": 0.0},
    ),
}


def drawing(name: str, recompute: Recompute = "none") -> Transformer:
    recipe, changes = DRAWING[name]
    model = make_uneven(tiny_model(recipe, changes)).double()
    set_options(model, recompute=recompute)
    return model


def numbered(model: Transformer, first: int, last: int, *, step: int = 0) -> Transformer:
    """Gives a model's next pass the sequences from `first` on, and their depths."""
    set_options(model, draws=draws_of(f"7/{step}", torch.arange(first, last)))
    if model.config.loops.depth.per == "sequence":
        set_options(model, depth=own_depths(model, *DEPTHS[first:last]))
    return model


def in_parts(model: Transformer, size: int, *, step: int = 0) -> dict[str, Tensor]:
    """Returns the summed loss and gradients of micro-batches of so many sequences."""
    rows, losses, found = some_tokens(SEQUENCES, 8), [], dict[str, Tensor]()
    model.zero_grad()
    for first in range(0, SEQUENCES, size):
        numbered(model, first, first + size, step=step)
        found = gradients_of(model, torch.float64, rows[first : first + size])
        losses.append(found.pop("loss"))
    return {"loss": torch.stack(losses).mean()} | {
        name: size / SEQUENCES * each for name, each in found.items()
    }


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", DRAWING)
def test_micro_batches_and_recomputation_change_no_number(name: str) -> None:
    whole = in_parts(drawing(name), SEQUENCES)
    cases: list[tuple[int, Recompute]] = [(4, "none"), (2, "full"), (1, "selective")]
    for size, recompute in cases:
        parts = in_parts(drawing(name, recompute), size)
        assert parts.keys() == whole.keys()
        for key, value in whole.items():
            torch.testing.assert_close(parts[key], value, rtol=1e-10, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", DRAWING)
def test_other_sequences_and_steps_draw_other_numbers(name: str) -> None:
    model, rows = drawing(name), some_tokens(1, 8).expand(2, 8)

    def loss(first: int, last: int, step: int) -> float:
        set_options(numbered(model, first, last, step=step), depth=None)
        model.before_step(0)
        with torch.no_grad():
            return model(
                rows[: last - first, :-1], targets_BS=rows[: last - first, 1:]
            ).cross_entropy.item()

    first, second = loss(0, 1, 3), loss(1, 2, 3)
    assert loss(0, 1, 3) == first
    assert first not in (second, loss(0, 1, 4))
    assert loss(0, 2, 3) == pytest.approx(first + second, rel=1e-12)


@pytest.mark.quick(15)
@pytest.mark.parametrize("name", [*FAMILY, *DRAWING])
def test_nothing_draws_from_the_default_generator(name: str) -> None:
    model = drawing(name) if name in DRAWING else tiny_model(name)
    before = torch.get_rng_state()
    numbered(model, 0, SEQUENCES)(some_tokens(SEQUENCES, 16))
    assert torch.equal(torch.get_rng_state(), before)


def drawn_after(count: int, draws: Draws, shape: tuple[int, ...]) -> Tensor:
    for _ in range(count):
        draws.uniform(shape)
    return draws.uniform(shape)


def test_layers_loops_and_tensors_draw_other_numbers() -> None:
    draws, shape = draws_of("7/0", torch.arange(2)), (6, 4)
    found = [
        drawn_after(count, draws.at(place, loops, None), shape)
        for place in ("layer 0", "layer 1")
        for loops in (-1, 0, 1)
        for count in (0, 1)
    ]
    assert len({tuple(each.flatten().tolist()) for each in found}) == 12
    mixed = draws.at("layer 0", [0, 1], None).uniform(shape)
    assert torch.equal(mixed, torch.cat((found[2][:3], found[4][3:])))
    only = draws.at("layer 0", [1], torch.tensor([1])).uniform((3, 4))
    assert torch.equal(only, mixed[3:])


def test_only_tensors_of_a_pass_tell_its_numbers() -> None:
    """A recorded pass reads the key and the numbers of another one where it read its own."""
    first, other = (draws_of(f"7/{step}", torch.arange(2) + step) for step in (0, 1))
    wanted = other.at("layer 0", 1, None).uniform((6, 4))
    first.key.copy_(other.key)
    first.numbers_B.copy_(other.numbers_B)
    assert torch.equal(first.at("layer 0", 1, None).uniform((6, 4)), wanted)


def test_numbers_are_uniform_and_independent() -> None:
    """Means, variances and correlations of 2¹⁹ numbers are within five standard errors."""
    rows = draws_of("7/0", torch.arange(8)).uniform((8, 2**16)).double()
    assert 0 <= rows.min() < 1e-4
    assert 1 - 1e-4 < rows.max() < 1
    assert abs(rows.mean() - 0.5) < 5 * (12 * rows.numel()) ** -0.5
    shares = torch.histc(rows, 64, 0, 1) / rows.numel()
    assert (64 * shares - 1).abs().max() < 5 * (64 / rows.numel()) ** 0.5
    neighbors = torch.cat((rows, rows.roll(1, 1)))  # of the same sequence, and of others
    off = torch.corrcoef(neighbors) - torch.eye(16)
    assert off.abs().max() < 5 * 2**-8


def test_sampled_experts_follow_their_probabilities() -> None:
    """The first of two drawn is expert e with probability p_e, and no expert is drawn twice."""
    router = SutRouter(SutConfig(top_k=2, sampled=2), 1, 4, init=zeros)
    p_E = torch.tensor([0.5, 0.3, 0.15, 0.05])
    torch.manual_seed(0)
    chosen_TK = router._chosen(p_E.expand(40_000, 4))
    assert (chosen_TK[:, 0] != chosen_TK[:, 1]).all()
    shares = chosen_TK[:, 0].bincount(minlength=4) / len(chosen_TK)
    assert (shares - p_E).abs().max() < 5 * 0.5 * 40_000**-0.5
