"""Exact match, against answers generated token by token and on saved checkpoints."""

import json
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import TINY

import moebius
from moebius_science.tasks import p_hop
from moebius_science.tasks.recipes import TASKS, ModelSize, Task, input_of, task_of
from moebius_science.tasks.score import Item, read_items, score, score_run
from moebius_science.tasks_command import main

SIZES = {"letters": 3, "hops": 2, "length": 6}
VOCABULARY = 257
FEW = 7  # token ids in the items, so that an untrained model is sometimes right


def loaded(targets: str = "next") -> moebius.LoadedModel:
    """Returns an untrained model with few likely tokens."""
    config = moebius.recipe("smoke", *TINY, f"data.targets={targets}", "data.seq_len=16")
    model: Any = moebius.build(config).eval()
    with torch.no_grad():
        model.head.weight[FEW:] = 0
        model.head.weight[:FEW] *= 50
    return moebius.LoadedModel(model, None, config, 0)  # type: ignore[arg-type]


def written(asked: moebius.LoadedModel, item: Item) -> list[int]:
    """Returns the model's continuation of the prompt, token by token."""
    tokens = item.tokens[: item.num_prompt].tolist()
    while len(tokens) < len(item.tokens):
        tokens.append(int(asked.logits(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[item.num_prompt :]


def test_it_is_what_writing_the_answer_gives() -> None:
    """Prompts of 1 to 3 tokens and answers of 1 to 2, including the end."""
    asked, rng = loaded(), np.random.default_rng(0)
    items = []
    for _ in range(60):
        prompt, answer = rng.integers(1, 4), rng.integers(1, 3)
        items.append(Item(rng.integers(FEW, size=prompt + answer), int(prompt)))
    matched = [written(asked, item) == item.tokens[item.num_prompt :].tolist() for item in items]
    assert 0 < sum(matched) < len(matched)
    found = score(asked, items)
    assert (found.exact_match, found.items) == (sum(matched) / len(matched), 60)


def test_of_pairs_the_labels_of_the_inputs_behind_the_prompt_are_asked() -> None:
    """One pair of prompt and two of answer, the last with the end."""
    asked, rng = loaded("paired"), np.random.default_rng(1)
    pairs = [Item(rng.integers(FEW, size=6), 2) for _ in range(200)]
    exact, inner, loss = 0, 0, 0.0
    for item in pairs:
        inputs, labels = torch.from_numpy(item.tokens[::2]), torch.from_numpy(item.tokens[1::2])
        logits = asked.logits(inputs[None])[0]
        right = (logits.argmax(-1) == labels)[1:]
        exact, inner = exact + bool(right.all()), inner + int(right[0])
        loss -= float(logits.double().log_softmax(-1)[[1, 2], labels[1:]].sum())
    found = astuple(score(asked, pairs))
    assert found == pytest.approx((exact / 200, inner / 200, loss / 400, 200), rel=1e-5)
    assert exact
    assert inner


def test_a_model_whose_answers_are_not_its_own_is_refused() -> None:
    asked = loaded()
    mixing = moebius.recipe(
        "mixture_of_tokens", "prepare.tokenizer=bytes", "prepare.vocab_size=257"
    )
    with pytest.raises(ValueError, match="score would depend on them"):
        score(replace(asked, config=mixing), [Item(np.array([1, 2]), 1)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps on p-hop induction, with a checkpoint after the first."""
    folder = tmp_path_factory.mktemp("p_hop")
    config = moebius.recipe(
        "moebius_science.tasks.recipes:p_hop_moeut",
        "train.steps=2",
        "train.global_batch=4",
        "train.micro_batch=4",
        "train.eval_batch=4",
        "checkpoint.every=1",
        "checkpoint.keep_last=3",
        "optim.decay_steps=2",
        f"prepare.validation_input=['{input_of('p_hop', 'held_out', sequences=20, **SIZES)}']",
        prepare__input=[input_of("p_hop", "train", sequences=200, **SIZES)],
        prepare__tokenizer=input_of("p_hop", "words", letters=3, hops=2),
        data__seq_len=16,
    )
    moebius.fit(config, folder / "run", show=False)
    return folder / "run"


def sets_of(**changes: int) -> dict[str, Any]:
    return {"p_hop": partial(p_hop.held_out, sequences=20, **SIZES | changes)}


def test_a_checkpoint_scores_what_its_evaluation_says(run: Path) -> None:
    found = score_run(run, sets_of())
    assert (found.step, found.depth_steps, found.trained_depth_steps) == (2, 6, 6)
    assert found.scores["p_hop"].items == 20
    # the validation split is the same items but for the rows that fill no batch
    loss = moebius.evaluate(run).result.loss
    assert found.scores["p_hop"].loss == pytest.approx(loss, rel=2e-2)
    before = score_run(run, sets_of(), step=1)
    assert before.scores["p_hop"].loss != found.scores["p_hop"].loss


def test_a_model_can_be_asked_with_more_depth_steps(run: Path) -> None:
    once, more = (score_run(run, sets_of(length=9), depth_steps=count) for count in (None, 12))
    assert more.depth_steps == 12
    assert once.scores["p_hop"].loss != more.scores["p_hop"].loss
    with pytest.raises(
        ValueError, match="0 depth steps must be a multiple of the group of 2 layers"
    ):
        score_run(run, sets_of(), depth_steps=0)


def test_items_are_prompts_and_answers_as_tokens(run: Path) -> None:
    asked = moebius.load(run)
    [item] = read_items(asked, [{"prompt": "hops_1 none", "answer": " a none end"}])
    assert asked.tokenizer.decode(item.tokens[: item.num_prompt].tolist()).split() == [
        "hops_1",
        "none",
    ]
    assert item.tokens[-1] == asked.tokenizer.end_of_document_id
    with pytest.raises(ValueError, match="at least one token"):
        read_items(asked, [{"prompt": "", "answer": "a"}])


def test_the_command_scores_runs_of_a_task_and_refuses_others(
    run: Path, trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert task_of(moebius.recipe("moebius_science.tasks.recipes:addition_dense")) == "addition"
    train = input_of("p_hop", "train", sequences=200, **SIZES)
    small = Task(ModelSize(), {"prepare": {"input": [train]}}, sets_of())
    monkeypatch.setitem(TASKS, "p_hop", lambda: small)
    words = [str(run), "--depth-steps", "12"]
    assert main([*words, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert (found["run"], found["depth_steps"]) == ("p_hop_moeut", 12)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "exact match %" in shown
    assert "12 depth steps (trained with 6)" in shown
    with pytest.raises(ValueError, match="to none of the tasks p_hop"):
        main([str(trained)])
    with pytest.raises(ValueError, match="is not a run folder"):
        main([str(run / "nowhere")])
