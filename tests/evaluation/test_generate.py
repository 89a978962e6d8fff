"""Generated text against the full forward pass."""

from typing import Any

import pytest
import torch

from moebius.evaluation.generate import _nucleus, generate
from moebius.model.config.attention_config import SwitchHeadConfig
from moebius.model.config.model_config import ModelConfig
from moebius.model.initialise import initialise
from moebius.model.transformer import Transformer


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(
        ModelConfig(
            vocab_size=97,
            d_model=32,
            num_layers=4,
            layers_per_group=2,
            attention=SwitchHeadConfig(num_heads=2, d_head=16),
        )
    )
    initialise(model, 3)
    with torch.no_grad():
        model.head.weight.mul_(20)  # clear winners, so that rounding decides nothing
    return model.eval()


PROMPT = torch.tensor([5, 17, 40])


def test_greedy_tokens_are_the_most_likely_ones_of_the_full_pass(model: Transformer) -> None:
    tokens = PROMPT.tolist()
    for token in generate(model, PROMPT, num_tokens=25, temperature=0):
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits_BSV[0, -1].argmax().item()
        assert token == expected
        tokens.append(token)
    assert len(tokens) == 28


@pytest.mark.slow
def test_top_p_samples_among_the_likeliest_tokens_only(model: Transformer) -> None:
    with torch.no_grad():
        p_V = (model(PROMPT[None]).logits_BSV[0, -1] / 3.0).softmax(-1)
    order = p_V.argsort(descending=True).tolist()
    for top_p in (0.01, 0.5, 0.8):
        count = 1 + int((p_V[order].cumsum(0) < top_p).sum())
        drawn = {
            next(generate(model, PROMPT, num_tokens=1, temperature=3.0, top_p=top_p, seed=seed))
            for seed in range(40)
        }
        assert drawn <= set(order[:count])
        assert count > 1 or drawn == {order[0]}
        likely_V = _nucleus(p_V, top_p)
        assert likely_V.count_nonzero() == count
        assert torch.equal(likely_V[order[:count]], p_V[order[:count]])
    assert torch.equal(_nucleus(p_V, 1.0), p_V)


@pytest.mark.slow
def test_sampling_follows_the_distribution_and_its_seed(model: Transformer) -> None:
    draws = [
        next(generate(model, PROMPT, num_tokens=1, temperature=2.0, seed=seed))
        for seed in range(400)
    ]
    assert draws[0] == next(generate(model, PROMPT, num_tokens=1, temperature=2.0, seed=2**64))
    assert draws[:50] == [
        next(generate(model, PROMPT, num_tokens=1, temperature=2.0, seed=seed))
        for seed in range(50)
    ]
    with torch.no_grad():
        expected_V = (model(PROMPT[None]).logits_BSV[0, -1] / 2.0).softmax(-1)
    measured_V = torch.bincount(torch.tensor(draws), minlength=97) / 400
    deviation_V = (expected_V * (1 - expected_V) / 400).sqrt()
    likely = expected_V > 0.02
    assert likely.sum() > 1
    assert ((measured_V - expected_V).abs() < 4 * deviation_V)[likely].all()
    assert len(set(draws)) > 3


def test_the_coldest_sample_is_the_most_likely_token(model: Transformer) -> None:
    """At temperatures whose division overflows, and just above."""
    greedy = list(generate(model, PROMPT, num_tokens=5, temperature=0))
    for temperature in (5e-324, 1e-40, 1e-30, 1e-9):
        assert list(generate(model, PROMPT, num_tokens=5, temperature=temperature)) == greedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_S": PROMPT[:0]}, "at least one token"),
        ({"top_p": 0.0}, r"top_p=0\.0 must be above 0 and at most 1"),
        *(
            ({"temperature": value}, r"temperature=.* must be finite and at least 0")
            for value in (float("nan"), float("inf"), -1.0)
        ),
    ],
)
def test_what_cannot_be_continued_is_refused(
    model: Transformer, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        next(generate(model, **{"prompt_S": PROMPT, "num_tokens": 1} | options))
