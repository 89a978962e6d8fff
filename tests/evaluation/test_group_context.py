"""Scoring and generation with a group context: the request's own numbers, drawn contexts, caches."""

from pathlib import Path

import pytest
import torch
from bytes_run import train_bytes
from parts import layers
from token_stream import tokens_of

from moebius.distributed.process.process import start_process
from moebius.evaluation.generate import generate
from moebius.evaluation.group_context import (
    GroupContextText,
    group_context_size,
    in_group_context,
    refuse_future_readers,
)
from moebius.evaluation.restore import restore
from moebius.evaluation.text import score_text, write_text
from moebius.model.config.model_config import ModelConfig
from moebius.model.initialise import initialise
from moebius.model.transformer import Transformer
from moebius.train.recipes.smoke import RECIPES

ROUTERS = {
    "mixture": {"kind": "mixture_of_tokens", "sequences_per_group": 4},
    "expert choice": {"kind": "expert_choice", "sequences_per_group": 4, "mean_experts": 2.0},
    "sigmoid": {"kind": "sigmoid", "top_k": 2},
}
END, CONTEXT = 256, 16


def config(kind: str) -> ModelConfig:
    return ModelConfig.from_dotted(
        {
            "vocab_size": 257,
            "d_model": 32,
            "num_layers": 2,
            "layers_per_group": 2,
            "attention.num_heads": 2,
            "attention.d_head": 16,
            "norm": "pre",
            "attention.kind": "dense",
            "feed_forward.num_experts": 4,
            "feed_forward.d_expert": 16,
            "feed_forward.router": ROUTERS[kind],
        }
    )


def make(kind: str) -> Transformer:
    model = Transformer(config(kind))
    initialise(model, 3)
    with torch.no_grad():
        for layer in layers(model):
            layer.feed_forward.router.weight.mul_(8)
            layer.feed_forward.sparse.experts.w_down.mul_(8)  # make the group context matter
        model.head.weight.mul_(20)
    return model.eval()


def test_a_group_context_is_different_rows_of_the_training_text(mixture_folder: Path) -> None:
    stream = tokens_of(mixture_folder)
    text = GroupContextText(mixture_folder, seq_len=40, seed=5)
    drawn = text.draw(31, 41, key=(2, 0))
    starts = []
    for row in drawn.tolist():
        places = [p for p in range(0, len(stream) - 40, 40) if stream[p : p + 41].tolist() == row]
        assert len(places) == 1
        starts += places
    assert len(set(starts)) == 31
    assert text.draw(31, 9, key=(2, 0)).equal(drawn[:, :9])
    assert drawn.equal(text.draw(31, 41, key=(2, 0)))
    assert not drawn.equal(text.draw(31, 41, key=(2, 1)))
    assert text.draw(3, 100).shape == (3, 100)  # longer than a training row
    with pytest.raises(
        ValueError, match=r"training tokens are too few for a group context of 1000000 tokens"
    ):
        text.draw(1, 10**6)
    other = GroupContextText(mixture_folder, seq_len=40, seed=6)
    assert not drawn.equal(other.draw(31, 41, key=(2, 0)))


def test_the_request_stands_in_any_row() -> None:
    request, context = torch.arange(5), torch.full((3, 5), 9)
    seen = set()
    for key in range(40):
        group, row = in_group_context(request, context, key=(key,))
        assert group[row].equal(request)
        assert (group.sum(1) == 45).sum() == 3
        seen.add(row)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", ["mixture", "expert choice"])
def test_written_tokens_are_those_of_the_full_pass_beside_the_same_text(
    kind: str, mixture_folder: Path
) -> None:
    model, prompt = make(kind), [116, 104, 101]
    text = GroupContextText(mixture_folder, seq_len=CONTEXT, seed=1)

    def written(key: int) -> tuple[list[int], torch.Tensor]:
        context = text.draw(group_context_size(model), 3 + 12 - 1, key=(key,))
        options = {"num_tokens": 12, "temperature": 0.0, "seed": 4, "context_MS": context}
        return [*generate(model, torch.tensor(prompt), **options)], context  # type: ignore[arg-type]

    found, context = written(0)
    for place, token in enumerate(found, start=3):
        tokens = torch.tensor([*prompt, *found][:place])
        group, row = in_group_context(tokens, context[:, :place], key=(4,))
        with torch.no_grad():
            assert token == model(group).logits_BSV[row, -1].argmax().item()
    assert len(found) == 12
    assert written(1)[0] != found


def test_a_group_context_that_does_not_fit_is_refused() -> None:
    mixture, sigmoid = make("mixture"), make("sigmoid")
    for model, shape, asked in (
        (mixture, None, "3 sequences of at least 5 tokens, got"),
        (mixture, (2, 9), "3 sequences of at least 5 tokens, got 2 of 9"),
        (mixture, (3, 4), "3 sequences of at least 5 tokens, got 3 of 4"),
        (sigmoid, (3, 9), "0 sequences"),
    ):
        context = None if shape is None else torch.zeros(shape, dtype=torch.int64)
        with pytest.raises(ValueError, match=f"a group context of {asked}"):
            next(generate(model, torch.tensor([1, 2]), num_tokens=4, context_MS=context))


def test_a_model_that_reads_whole_sequences_cannot_write() -> None:
    soft = {
        "feed_forward.router": {"kind": "soft_moe", "slots_per_expert": 1},
        "feed_forward.allow_future_leak": True,
    }
    model = Transformer(config("sigmoid").changed(soft))
    with pytest.raises(ValueError, match=r"'soft_moe' as configured reads whole sequences"):
        next(generate(model, torch.tensor([1]), num_tokens=1))


def test_a_trained_mixture_writes_from_its_run_folder(mixture_folder: Path, tmp_path: Path) -> None:
    run_dir = train_bytes(mixture_folder, tmp_path / "run", config("mixture"), seq_len=CONTEXT)
    with start_process("cpu") as process:
        trained = restore(run_dir, process)
    written = [
        "".join(write_text(trained, "one", num_tokens=20, temperature=1.0, seed=seed))
        for seed in (0, 0, 1)
    ]
    assert written[0].startswith("one")
    assert written[0] == written[1] != written[2]
    found, again, other = (score_text(trained, "one two", draws=3, seed=s) for s in (0, 0, 1))
    assert found.log_probability_RS.shape == (3, 7)
    assert str(found) == str(again) != str(other)
    assert found.mean == pytest.approx(found.log_probability_RS.sum(1).mean())
    assert found.spread == pytest.approx(found.log_probability_RS.sum(1).std(ddof=1))
    assert found.spread > 0
    long = score_text(trained, "twenty letters and more", draws=1)
    assert long.log_probability_RS.shape == (1, CONTEXT)
    for text, draws in (("", 1), ("one", 0)):
        with pytest.raises(ValueError, match="at least one token and one draw"):
            score_text(trained, text, draws=draws)


def test_gshard_is_scored_by_what_it_promises_in_evaluation() -> None:
    """GShard drops rows only in training, where it reads later positions; `switch` does so in both."""
    gshard = Transformer(RECIPES["gshard"]().model)
    refuse_future_readers(gshard, "score text")
    switch = Transformer(RECIPES["switch"]().model)
    with pytest.raises(ValueError, match="lets a position read later ones"):
        refuse_future_readers(switch, "score text")
