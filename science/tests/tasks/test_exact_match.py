"""Exact match while training: against answers that are really written token by token, on any number
of ranks, and in the log of a run.
"""

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_model import TINY
from world import run_ranks

from moebius.data_pipeline.data_config import DataConfig, TestSet
from moebius.data_pipeline.make.prepare import prepare
from moebius.distributed.process.process import start_process
from moebius.evaluation.generate import generate
from moebius.model.initialise import initialise
from moebius.model.transformer import Transformer
from moebius.train.config.run_config import CheckpointConfig, Config, TrainConfig
from moebius.train.loop import train
from moebius_science.tasks.exact_match import ExactMatch, score_items
from moebius_science.tasks.items import TestItem
from moebius_science.tasks.recipes import input_of

FIELDS: dict[str, Any] = {"prompt_field": "prompt", "answer_field": "answer"}
SIZES = {"letters": 3, "hops": 2, "length": 6}
VOCABULARY = 7  # of the items below, so that an untrained model is sometimes right
MODEL = TINY.changed({"vocab_size": VOCABULARY})


def items(count: int = 60) -> list[TestItem]:
    """Prompts of 1 to 3 tokens and answers of 1 to 2, the end included."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        prompt, answer = rng.integers(1, 4), rng.integers(1, 3)
        found.append(TestItem(rng.integers(VOCABULARY, size=prompt + answer), int(prompt)))
    return found


def model() -> Transformer:
    built = Transformer(MODEL)
    initialise(built, 3)
    return built.eval()


def scored(config: Config, run_dir: Path) -> ExactMatch:
    with start_process("cpu", timeout_s=60) as process:
        return score_items(model(), config, process, items())


def config_of(targets: str = "next") -> Config:
    data = DataConfig(vocab_size=257, targets=targets, **FIELDS)  # type: ignore[arg-type]
    return Config(model=TINY, data=data, train=TrainConfig(global_batch=8, micro_batch=4))


def written(built: Transformer, item: TestItem) -> list[int]:
    """What the model writes behind the prompt, token by token, with the cache."""
    prompt_S = torch.from_numpy(item.tokens[: item.num_prompt])
    count = len(item.tokens) - item.num_prompt
    return list(generate(built, prompt_S, num_tokens=count, temperature=0.0))


def test_it_is_what_writing_the_answer_gives_on_any_number_of_ranks(tmp_path: Path) -> None:
    built = model()
    matched = [written(built, item) == item.tokens[item.num_prompt :].tolist() for item in items()]
    assert 0 < sum(matched) < len(matched)
    found = [run_ranks(scored, world, config_of(), tmp_path / str(world)) for world in (1, 2)]
    assert astuple(found[0][0]) == pytest.approx(astuple(found[1][0]), rel=1e-12)
    assert found[1][0] == found[1][1]
    assert found[0][0].exact_match == sum(matched) / len(matched)
    assert found[0][0].items == 60


@torch.no_grad()
def test_of_pairs_the_labels_of_the_inputs_behind_the_prompt_are_asked(tmp_path: Path) -> None:
    """One pair of prompt, two of answer, the last with the end."""
    rng = np.random.default_rng(1)
    pairs = [TestItem(rng.integers(VOCABULARY, size=6), 2) for _ in range(200)]
    built = model()
    exact, inner, loss = 0, 0, 0.0
    for item in pairs:
        inputs, labels = torch.from_numpy(item.tokens[::2]), torch.from_numpy(item.tokens[1::2])
        logits = built(inputs[None]).logits_BSV[0]
        right = (logits.argmax(-1) == labels)[1:]
        exact, inner = exact + bool(right.all()), inner + int(right[0])
        loss -= float(logits.double().log_softmax(-1)[[1, 2], labels[1:]].sum())
    [found] = run_ranks(scored_pairs, 1, config_of("paired"), tmp_path, pairs)
    assert astuple(found) == pytest.approx((exact / 200, inner / 200, loss / 400, 200), rel=1e-5)
    assert exact
    assert inner


def scored_pairs(config: Config, run_dir: Path, pairs: list[TestItem]) -> ExactMatch:
    with start_process("cpu", timeout_s=60) as process:
        return score_items(model(), config, process, pairs)


def p_hop_config(folder: Path) -> Config:
    sets = [
        TestSet(name=name, input=(input_of("p_hop", "held_out", sequences=20, **SIZES | sizes),))
        for name, sizes in (("in_distribution", {}), ("out_of_distribution", {"length": 9}))
    ]
    data = DataConfig(
        input=(input_of("p_hop", "train", sequences=400, **SIZES),),
        validation_input=sets[0].input,
        tokenizer=input_of("p_hop", "words", letters=3, hops=2),
        vocab_size=257,
        targets="paired",
        seq_len=16,
        test_sets=tuple(sets),
        directory=str(folder),
        **FIELDS,
    )
    return Config(
        model=TINY,
        data=data,
        checkpoint=CheckpointConfig(every=0),
        train=TrainConfig(steps=3, global_batch=8, micro_batch=4, eval_every=2),
    )


def run_training(config: Config, run_dir: Path) -> str:
    return train(config, run_dir)


def test_a_run_logs_every_test_set_at_every_evaluation(tmp_path: Path) -> None:
    config = p_hop_config(tmp_path / "data")
    prepare(config.data, config.data.directory)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    assert run_ranks(run_training, 2, config, run_dir) == ["finished"] * 2
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    tasks = [line for line in found if line["kind"] == "task"]
    assert [line["step"] for line in tasks] == [0, 2, 3]
    names = [f"{split}/{key}" for split in ("in_distribution", "out_of_distribution")
             for key in ("exact_match", "accuracy", "loss", "items")]  # fmt: skip
    assert list(tasks[0])[3:] == names
    evals = {line["step"]: line["loss"] for line in found if line["kind"] == "eval"}
    for line in tasks:  # the validation split is the same items but for the last
        assert line["in_distribution/loss"] == pytest.approx(evals[line["step"]], rel=1e-2)
        assert line["in_distribution/items"] == 20


def test_a_model_whose_answers_are_not_its_own_is_refused() -> None:
    router = {"kind": "mixture_of_tokens", "sequences_per_group": 2}
    mixing = TINY.changed({"feed_forward.router": router})
    sets = (TestSet(name="sums", input=("sums.jsonl",)),)
    with pytest.raises(ValueError, match="the score of an item would not be its own"):
        Config(
            model=mixing, data=DataConfig(vocab_size=257, test_sets=sets, **FIELDS),
            train=TrainConfig(micro_batch=2),
        )  # fmt: skip
